"""Whole articles out of a corpus of lines under headings, as WikiText has them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from linearize.errors import ConfigError, DataError

_TITLE = re.compile(r"\s*= [^=].*[^=] =\s*")


@dataclass(frozen=True)
class Articles:
    """Which articles are taken."""

    text_column: str = field(default="text", metadata={"help": "column of the lines"})
    shortest: int = field(default=200, metadata={"help": "words of an article, at least"})

    def __post_init__(self) -> None:
        if self.shortest < 2:
            raise ConfigError(f"articles: got shortest {self.shortest}, expected at least 2 words")


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
