"""Long documents whose class stands in one passage at any place: texts of a data set in a row, one of which decides.

Where real documents can be told by their beginnings, or by what most of their parts say, neither cutting them nor
averaging over chunks costs anything, and nothing is learned about long inputs. Here the other passages are texts about
something else (`filler`), or of random classes, told from the one that decides by what stands before it.
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
    filler: str = field(
        default="", metadata={"help": "data set of texts for the other passages, beside the source or elsewhere"}
    )
    filler_column: str = field(default="text", metadata={"help": "column of those"})
    parts: int = field(default=6, metadata={"help": "texts of a document"})
    words: int = field(default=200, metadata={"help": "words of a text, at most; longer ones are cut"})
    train: int = field(default=2_000, metadata={"help": "training documents"})
    validation: int = field(default=1_000, metadata={"help": "documents to measure on"})
    heading: str | None = field(
        default=None, metadata={"help": "what stands before the text that decides (Verdict:, beside a filler nothing)"}
    )
    other: str | None = field(
        default=None, metadata={"help": "what stands before the others (Report:, beside a filler nothing)"}
    )
    seed: int = field(default=0, metadata={"help": "of all draws"})

    def __post_init__(self) -> None:
        if min(self.parts, self.words, self.train, self.validation) < 1:
            raise ConfigError("documents: parts, words, train and validation: expected numbers from 1")
        if self.headings[0] == self.headings[1] and not self.filler:
            raise ConfigError(
                f"documents: got {self.headings[0]!r} before every text, expected another one before the others"
            )

    @property
    def headings(self) -> tuple[str, str]:
        """What stands before the text that decides, and before the others."""
        usual = ("", "") if self.filler else ("Verdict:", "Report:")
        return (
            usual[0] if self.heading is None else self.heading,
            usual[1] if self.other is None else self.other,
        )


def documents(
    config: Documents,
    texts: Sequence[str],
    labels: Sequence[int | str],
    count: int,
    seed: int,
    filler: Sequence[str] | None = None,
) -> list[dict[str, object]]:
    """Put documents together -> rows with `text`, `label` and `place` (of the text that decides, from 0).

    Args:
        config: how.
        texts: to draw from; none comes twice in a document.
        labels: their classes.
        count: how many documents.
        seed: of the draws.
        filler: texts for the other passages; those of fewer than `config.words` words are left out. None: `texts`.

    Raises:
        DataError: if there are fewer texts than a document has.
    """
    if filler is not None:
        filler = [text for text in filler if len(text.split()) >= config.words]
    others = texts if filler is None else filler
    if len(others) < config.parts or not texts:
        what = "texts" if filler is None else f"other texts of at least {config.words} words"
        raise DataError(f"documents: got {len(others)} {what}, expected at least the {config.parts} of a document")
    chance = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    heading, other = config.headings
    for _ in range(count):
        drawn = chance.choice(len(others), size=config.parts, replace=False)
        place = int(chance.integers(config.parts))
        decides = int(drawn[place] if filler is None else chance.integers(len(texts)))
        passages = [others[one] for one in drawn]
        passages[place] = texts[decides]
        parts = [
            f"{heading if n == place else other} {' '.join(text.split()[: config.words])}".strip()
            for n, text in enumerate(passages)
        ]
        rows.append({"text": "\n".join(parts), "label": labels[decides], "place": place})
    return rows
