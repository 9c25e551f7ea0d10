"""Whole articles out of a corpus of lines under headings, as WikiText has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from linearize.errors import ConfigError, DataError

_TITLE = re.compile(r"\s*= [^=].*[^=] =\s*")


@dataclass(frozen=True)
class Articles:
    """Which articles are taken."""

    text_column: str = field(default="text", metadata={"help": "column of the lines"})
    shortest: int = field(default=200, metadata={"help": "words of an article, at least"})
    held: float | None = field(
        default=None, metadata={"help": "share of all articles to measure on, in place of a split"}
    )
    opening: int = field(
        default=0,
        metadata={"help": "words of another article, always the same, before each half of every article"},
    )
    seed: int = field(default=0, metadata={"help": "of the choice of those"})

    def __post_init__(self) -> None:
        if self.shortest < 2:
            raise ConfigError(f"articles: got shortest {self.shortest}, expected at least 2 words")
        if self.held is not None and not 0 < self.held < 1:
            raise ConfigError(f"articles: got held {self.held}, expected a share between 0 and 1")
        if self.opening < 0:
            raise ConfigError(f"articles: got opening {self.opening}, expected 0 words or more")


def split_anew(config: Articles, splits: Mapping[str, list[dict[str, str]]]) -> dict[str, list[dict[str, str]]]:
    """Set a share of all articles aside to measure on, where the options say one; else leave the splits as they are.

    Raises:
        DataError: if nothing is left on one side.
    """
    if config.held is None:
        return dict(splits)
    everything = [row for rows in splits.values() for row in rows]
    order = np.random.default_rng(config.seed).permutation(len(everything))
    count = round(config.held * len(everything))
    if not 0 < count < len(everything):
        raise DataError(f"articles: got {len(everything)} articles, too few to hold a share of {config.held} out")
    held, kept = (np.sort(part) for part in (order[:count], order[count:]))
    return {"train": [everything[n] for n in kept], "validation": [everything[n] for n in held]}


def open_alike(config: Articles, splits: Mapping[str, list[dict[str, str]]]) -> dict[str, list[dict[str, str]]]:
    """Let both halves of every article open with the same words, as contracts, reports or mails of one house do.

    The words are the first of the first training article, which is left out; task `retrieval` cuts in the middle, where
    they stand again. Without `opening` nothing is changed.

    Raises:
        DataError: if that article has too few words, or is the only one.
    """
    if not config.opening:
        return dict(splits)
    first, *train = splits["train"]
    opening = first["text"].split()[: config.opening]
    if len(opening) < config.opening or not train:
        raise DataError(
            f"articles: got {len(splits['train'])} training articles, the first of {len(first['text'].split())} words, "
            f"expected another one behind an opening of {config.opening}; lower opening"
        )

    def opened(row: dict[str, str]) -> dict[str, str]:
        words = row["text"].split()
        middle = len(words) // 2
        return {"text": " ".join([*opening, *words[:middle], *opening, *words[middle:]])}

    return {split: [opened(row) for row in rows] for split, rows in {**splits, "train": train}.items()}


def articles(config: Articles, lines: Iterable[str | None]) -> list[dict[str, str]]:
    """Put lines together -> rows with `text`; a line such as `= Title =` begins an article and is left out.

    Raises:
        DataError: if there is no heading, or no article is long enough.
    """
    found: list[list[str]] = []
    for line in lines:
        if line and _TITLE.fullmatch(line):
            found.append([])
        elif line and line.strip() and found:
            found[-1].append(line.strip())
    if not found:
        raise DataError(
            "articles: got lines without a heading such as '= Title =', expected a corpus as WikiText has it; where "
            "rows are whole texts leave `make: articles` out"
        )
    texts = [" ".join(one) for one in found]
    rows = [{"text": text} for text in texts if len(text.split()) >= config.shortest]
    if not rows:
        raise DataError(
            f"articles: got {len(found)} articles, expected some of at least {config.shortest} words; lower shortest"
        )
    return rows
