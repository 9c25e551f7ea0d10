"""Whole articles, from a corpus of lines under headings such as WikiText."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from linearize.core.errors import DataError
from linearize.core.options import check, option

_TITLE = re.compile(r"\s*= [^=].*[^=] =\s*")


@dataclass(frozen=True)
class Articles:
    """Which articles are taken."""

    text_column: str = option("text", "column of the lines")
    shortest: int = option(200, "words of an article, at least", low=2)
    held: float | None = option(
        None, "share of all articles to measure on, instead of the data's own split", above=0, below=1
    )
    opening: int = option(0, "words of another article, always the same, before each half of every article", low=0)
    seed: int = option(0, "of the choice of those to measure on")

    def __post_init__(self) -> None:
        check(self, "articles")


def resplit(config: Articles, splits: Mapping[str, list[dict[str, str]]]) -> dict[str, list[dict[str, str]]]:
    """Set a share of all articles aside to measure on, if `held` is given; otherwise keep the splits.

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
    """Begin both halves of every article with the same words, as contracts, reports or mails of one company do.

    The words are the first ones of the first training article, which is left out. Task `retrieval` cuts articles in the
    middle, where the words come again. Without `opening` nothing is changed.

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
            f"expected another article and an opening of {config.opening} words; lower opening"
        )

    def opened(row: dict[str, str]) -> dict[str, str]:
        words = row["text"].split()
        middle = len(words) // 2
        return {"text": " ".join([*opening, *words[:middle], *opening, *words[middle:]])}

    return {split: [opened(row) for row in rows] for split, rows in {**splits, "train": train}.items()}


def articles(config: Articles, lines: Iterable[str | None]) -> list[dict[str, str]]:
    """Join lines into articles -> rows with `text`. A line such as `= Title =` begins an article and is left out.

    Raises:
        DataError: if there is no heading, or no article is long enough.
    """
    joined: list[list[str]] = []
    for line in lines:
        if line and _TITLE.fullmatch(line):
            joined.append([])
        elif line and line.strip() and joined:
            joined[-1].append(line.strip())
    if not joined:
        raise DataError(
            "articles: got lines without a heading such as '= Title =', expected a corpus such as WikiText; if rows "
            "are whole texts, leave `make: articles` out"
        )
    texts = [" ".join(lines_of_one) for lines_of_one in joined]
    rows = [{"text": text} for text in texts if len(text.split()) >= config.shortest]
    if not rows:
        raise DataError(
            f"articles: got {len(joined)} articles, expected some of at least {config.shortest} words; lower shortest"
        )
    return rows
