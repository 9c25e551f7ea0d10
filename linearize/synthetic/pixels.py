"""Images as rows of grey values, one token per pixel (Long Range Arena's image task), and Pathfinder's files.

Pathfinder (https://arxiv.org/abs/1805.08315) as Long Range Arena released it: a folder such as
`pathfinder32/curv_contour_length_14` with `metadata/N.npy`, which are lines of text (folder, file, number, label ...),
and the images that they name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linearize.errors import ConfigError, DataError
from linearize.parsing import read_text

if TYPE_CHECKING:
    from PIL.Image import Image

LEVELS = 256
FEWEST_FIELDS = 4


@dataclass(frozen=True)
class Pixels:
    """Rows of pixels made of an image data set."""

    side: int = field(default=32, metadata={"help": "images are scaled to side x side pixels"})
    label_column: str = field(default="label", metadata={"help": "column of the class"})
    limit: int | None = field(default=None, metadata={"help": "only the first so many images of a split"})

    def __post_init__(self) -> None:
        if self.side < 1:
            raise ConfigError(f"pixels: got side {self.side}, expected at least 1")


@dataclass(frozen=True)
class Pathfinder:
    """Pathfinder's released files."""

    side: int = field(default=32, metadata={"help": "images are scaled to side x side pixels"})
    validation: float = field(default=0.1, metadata={"help": "share of the images to measure on"})
    seed: int = field(default=0, metadata={"help": "of the choice of images to measure on"})

    def __post_init__(self) -> None:
        if self.side < 1 or not 0 < self.validation < 1:
            raise ConfigError(
                f"pathfinder: got side {self.side} and validation {self.validation}, expected at least 1 and a share"
            )


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
    found = []
    for file in sorted((root / "metadata").glob("*.npy")):
        try:
            lines = read_text(file).splitlines()
        except (OSError, ValueError) as error:
            raise DataError(f"pathfinder: cannot read {file.name!r} ({error}); copy the files again") from error
        for line in lines:
            if line.strip():
                found.append(_entry(line, file))
    if not found:
        raise DataError(f"pathfinder: got no metadata/*.npy in {folder!r}; expected the released files, such as those "
                        "of pathfinder32/curv_contour_length_14")  # fmt: skip
    order = np.random.default_rng(config.seed).permutation(len(found))
    count = max(1, round(config.validation * len(found)))
    read = [_read(root, *entry, config.side) for entry in found]
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
