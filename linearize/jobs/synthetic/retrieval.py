"""Long Range Arena's retrieval: do two documents belong together? From its released files, or made from any texts.

Long Range Arena's own pairs come from the ACL Anthology Network; its files `new_aan_pairs.{train,eval,test}.tsv` have
no header and the columns label, id, id, text, text. Pairs made from any long texts are halves: those of one text belong
together, those of two texts do not.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linearize.core.errors import ConfigError, DataError
from linearize.core.options import check, option
from linearize.core.parsing import read_text

RELEASED = {"train": "new_aan_pairs.train.tsv", "validation": "new_aan_pairs.eval.tsv"}
FIELDS = 5


@dataclass(frozen=True)
class Halves:
    """Pairs made from texts."""

    text_column: str = option("text", "column of the texts")
    longest: int = option(4_000, "characters of a half, at most", low=2)
    shortest: int = option(0, "characters of a text, at least; shorter ones are left out", low=0)
    overlap: int = option(0, "characters around the middle that both halves have", low=0)
    seed: int = option(0, "of the order of the texts")

    def __post_init__(self) -> None:
        check(self, "retrieval")
        if self.overlap >= self.longest:
            raise ConfigError(f"retrieval: got overlap {self.overlap}, expected less than longest ({self.longest})")


@dataclass(frozen=True)
class Released:
    """Released files have no options."""


def halves(config: Halves, texts: list[str]) -> list[dict[str, object]]:
    """Cut texts in two -> rows with `text1`, `text2` and `label`: first halves with their own second and with another.

    Every half is in one row of each label, so no single text shows the label. Halves of a text shorter than twice
    `longest` are equally long, which would show that they belong together; with `shortest` at twice `longest` all
    halves are. With `overlap`, the first half ends and the second begins with the text's middle.

    Raises:
        DataError: if there are fewer than two texts of the length wanted.
    """
    texts = [text for text in texts if len(text) >= config.shortest]
    if len(texts) < 2:
        wanted = f" of {config.shortest} characters or more" if config.shortest else ""
        raise DataError(f"retrieval: got {len(texts)} texts{wanted}, expected at least two for pairs")
    order = np.random.default_rng(config.seed).permutation(len(texts))
    cut = [_cut(texts[i], config.overlap) for i in order]
    made: list[dict[str, object]] = []
    for place, (first, second) in enumerate(cut):
        for other, label in ((second, 1), (cut[(place + 1) % len(cut)][1], 0)):
            made.append({"text1": first[-config.longest :], "text2": other[: config.longest], "label": label})
    return made


def _cut(text: str, overlap: int) -> tuple[str, str]:
    middle = len(text) // 2
    begin = max(0, middle - overlap // 2)
    return text[: begin + overlap], text[begin:]


def read_released(folder: str) -> dict[str, list[dict[str, object]]]:
    """Read Long Range Arena's pairs.

    Raises:
        DataError: if a file is missing or has other columns.
    """
    found = {}
    for split, name in RELEASED.items():
        path = Path(folder).expanduser() / name
        if not path.is_file():
            raise DataError(f"retrieval: got no {name} in {folder!r}; expected Long Range Arena's released files there")
        try:
            lines = io.StringIO(read_text(path), newline="")
            found[split] = [_pair(row, name) for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]
        except (OSError, ValueError, csv.Error) as error:
            raise DataError(f"retrieval: cannot read {name!r} ({error}); copy the files again") from error
    return found


def _pair(row: list[str], name: str) -> dict[str, object]:
    if len(row) != FIELDS or row[0] not in ("0", "1", "0.0", "1.0"):
        raise DataError(f"retrieval: got {len(row)} columns in a row of {name}, expected label, id, id, text, text")
    return {"text1": row[3], "text2": row[4], "label": int(float(row[0]))}
