"""Images as rows of grey values, one token per pixel (Long Range Arena's image task), and Pathfinder's files.

Pathfinder (https://arxiv.org/abs/1805.08315) as Long Range Arena released it: a folder such as
`pathfinder32/curv_contour_length_14` with `metadata/N.npy`, which are lines of text (folder, file, number, label ...),
and the images that they name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linearize.core.errors import DataError
from linearize.core.options import check, option
from linearize.core.parsing import read_text

if TYPE_CHECKING:
    from PIL.Image import Image

LEVELS = 256
FEWEST_FIELDS = 4


@dataclass(frozen=True)
class Pixels:
    """Rows of pixels, made from an image data set."""

    side: int = option(32, "images are scaled to side x side pixels", low=1)
    label_column: str = option("label", "column of the class")
    limit: int | None = option(None, "only the first so many images of a split")

    def __post_init__(self) -> None:
        check(self, "pixels")


@dataclass(frozen=True)
class Pathfinder:
    """Pathfinder's released files."""

    side: int = option(32, "images are scaled to side x side pixels", low=1)
    validation: float = option(0.1, "share of the images to measure on", above=0, below=1)
    seed: int = option(0, "of the choice of images to measure on")

    def __post_init__(self) -> None:
        check(self, "pathfinder")


def tokens() -> tuple[str, ...]:
    """Return the vocabulary: grey values as words."""
    return tuple(str(value) for value in range(LEVELS))


def pixel_text(image: Image, side: int) -> str:
    """Write a PIL image as `side * side` grey values, line by line."""
    grey = image.convert("L")
    if grey.size != (side, side):
        grey = grey.resize((side, side))
    return " ".join(map(str, np.asarray(grey).reshape(-1).tolist()))


def read_pathfinder(folder: str, config: Pathfinder) -> dict[str, list[dict[str, object]]]:
    """Read Pathfinder's images -> rows with `text` and `label` (1: the two dots are joined), in two splits.

    Raises:
        DataError: if there are no such files, or an image is missing or damaged.
    """
    root = Path(folder).expanduser()
    entries = []
    for file in sorted((root / "metadata").glob("*.npy")):
        try:
            lines = read_text(file).splitlines()
        except (OSError, ValueError) as error:
            raise DataError(f"pathfinder: cannot read {file.name!r} ({error}); copy the files again") from error
        for line in lines:
            if line.strip():
                entries.append(_entry(line, file))
    if not entries:
        raise DataError(f"pathfinder: got no metadata/*.npy in {folder!r}; expected the released files, such as those "
                        "of pathfinder32/curv_contour_length_14")  # fmt: skip
    order = np.random.default_rng(config.seed).permutation(len(entries))
    count = max(1, round(config.validation * len(entries)))
    read = [_read(root, *entry, config.side) for entry in entries]
    return {
        "validation": [read[i] for i in sorted(order[:count])],
        "train": [read[i] for i in sorted(order[count:])],
    }


def _entry(line: str, file: Path) -> tuple[str, int]:
    fields = line.split()
    if len(fields) < FEWEST_FIELDS or fields[3] not in ("0", "1"):
        raise DataError(f"pathfinder: got {line!r} in {file.name}, expected folder, file, number and label (0 or 1)")
    return f"{fields[0]}/{fields[1]}", int(fields[3])


def _read(root: Path, name: str, label: int, side: int) -> dict[str, object]:
    from linearize.data.images import decode

    try:
        data = (root / name).read_bytes()
    except OSError as error:
        raise DataError(f"pathfinder: cannot read image {name!r} ({error.strerror}); copy the files again") from error
    return {"text": pixel_text(decode(data, name), side), "label": label}
