"""Long documents whose class stands in one passage at any place: texts of a data set in a row, one of which decides.

Where real documents can be told by their beginnings, or by what most of their parts say, neither cutting them nor
averaging over chunks costs anything, and nothing is learned about long inputs. Here the other passages are of random
classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from linearize.errors import ConfigError, DataError


@dataclass(frozen=True)
class Documents:
    """How documents are put together."""

    text_column: str = field(default="text", metadata={"help": "column of the texts"})
    label_column: str = field(default="label", metadata={"help": "column of the class"})
    parts: int = field(default=6, metadata={"help": "texts of a document"})
    words: int = field(default=200, metadata={"help": "words of a text, at most; longer ones are cut"})
    train: int = field(default=2_000, metadata={"help": "training documents"})
    validation: int = field(default=1_000, metadata={"help": "documents to measure on"})
    heading: str = field(default="Verdict:", metadata={"help": "what stands before the text that decides"})
    other: str = field(default="Report:", metadata={"help": "what stands before the others"})
    seed: int = field(default=0, metadata={"help": "of all draws"})

    def __post_init__(self) -> None:
        if min(self.parts, self.words, self.train, self.validation) < 1:
            raise ConfigError("documents: parts, words, train and validation: expected numbers from 1")
        if self.heading == self.other:
            raise ConfigError(
                f"documents: got {self.heading!r} before every text, expected another one before the others"
            )


def documents(
    config: Documents, texts: Sequence[str], labels: Sequence[int | str], count: int, seed: int
) -> list[dict[str, object]]:
    """Put documents together -> rows with `text`, `label` and `place` (of the text that decides, from 0).

    Args:
        config: how.
        texts: to draw from; none comes twice in a document.
        labels: their classes.
        count: how many documents.
        seed: of the draws.

    Raises:
        DataError: if there are fewer texts than a document has.
    """
    if len(texts) < config.parts:
        raise DataError(f"documents: got {len(texts)} texts, expected at least the {config.parts} of a document")
    chance = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        drawn = chance.choice(len(texts), size=config.parts, replace=False)
        place = int(chance.integers(config.parts))
        parts = [
            f"{config.heading if n == place else config.other} {' '.join(texts[one].split()[: config.words])}"
            for n, one in enumerate(drawn)
        ]
        rows.append({"text": "\n".join(parts), "label": labels[drawn[place]], "place": place})
    return rows
