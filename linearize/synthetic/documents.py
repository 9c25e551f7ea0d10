"""Long documents whose class stands in one or two passages at any place: texts of a data set in a row, which decide.

Where real documents can be told by their beginnings, or by what most of their parts say, neither cutting them nor
averaging over chunks costs anything, and nothing is learned about long inputs. Here the other passages are texts about
something else (`filler`), or of random classes, told from those that decide by what stands before them.

One text that decides can be found by chunks too: those without it say nothing, and the mean is what its chunk says.
Where two decide and stand farther apart than a chunk is long, no mean over chunks can tell: every chunk sees one of the
two at most. Whether their classes agree comes as often with one class as with the other; and a chunk does not know
whether there is another text behind it, which alone counts if the last decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from linearize.errors import ConfigError, DataError, unknown_name

ONE, LAST, AGREEMENT = "one", "last", "agreement"
DECIDES = {
    ONE: "one of which decides",
    LAST: "the last of two decides",
    AGREEMENT: "two of which decide by whether they agree",
}
"""What decides, and how a description of the data says it."""


@dataclass(frozen=True)
class Documents:
    """How documents are put together."""

    text_column: str = field(default="text", metadata={"help": "column of the texts"})
    label_column: str = field(default="label", metadata={"help": "column of the class"})
    filler: str = field(
        default="", metadata={"help": "data set of texts for the other passages, beside the source or elsewhere"}
    )
    filler_column: str = field(default="text", metadata={"help": "column of those"})
    decides: str = field(
        default=ONE,
        metadata={"help": "one: the class of one text; last: of the last of two; agreement: whether two have the same"},
    )
    apart: int = field(default=1, metadata={"help": "texts from one of those two to the other, at least"})
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
        if self.decides not in DECIDES:
            raise unknown_name("documents: decides", self.decides, DECIDES)
        if self.decides != ONE and self.parts < 2:
            raise ConfigError(f"documents: parts: got {self.parts}, expected 2 or more, as two of them decide")
        if not 1 <= self.apart < max(self.parts, 2):
            raise ConfigError(
                f"documents: apart: got {self.apart}, expected 1 to {self.parts - 1} of {self.parts} parts"
            )
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
    """Put documents together -> rows with `text`, `label` and `places` (of the texts that decide, from 0).

    Args:
        config: how.
        texts: to draw from; none comes twice in a document.
        labels: their classes.
        count: how many documents.
        seed: of the draws.
        filler: texts for the other passages; those of fewer than `config.words` words are left out. None: `texts`.

    Raises:
        DataError: if there are fewer texts than a document has, or, where two decide, fewer than two classes or
            two texts of one.
    """
    if filler is not None:
        filler = [text for text in filler if len(text.split()) >= config.words]
    others = texts if filler is None else filler
    if len(others) < config.parts or not texts:
        what = "texts" if filler is None else f"other texts of at least {config.words} words"
        raise DataError(f"documents: got {len(others)} {what}, expected at least the {config.parts} of a document")
    if config.decides != ONE:
        _check_classes(labels)
    chance = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    heading, other = config.headings
    for _ in range(count):
        drawn = [int(one) for one in chance.choice(len(others), size=config.parts, replace=False)]
        label: int | str
        if config.decides == ONE:
            places = [int(chance.integers(config.parts))]
            chosen = [drawn[places[0]] if filler is None else int(chance.integers(len(texts)))]
            label = labels[chosen[0]]
        else:
            agree, places, chosen = _two(config, labels, chance)
            label = agree if config.decides == AGREEMENT else labels[chosen[1]]
        if filler is None:
            drawn = _exchanged(drawn, chosen, places)
        passages = [others[one] for one in drawn]
        for place, one in zip(places, chosen, strict=True):
            passages[place] = texts[one]
        parts = [
            f"{heading if n in places else other} {' '.join(text.split()[: config.words])}".strip()
            for n, text in enumerate(passages)
        ]
        rows.append({"text": "\n".join(parts), "label": label, "places": places})
    return rows


def _two(
    config: Documents, labels: Sequence[int | str], chance: np.random.Generator
) -> tuple[int, list[int], list[int]]:
    """Draw whether two texts agree, their places and the two."""
    first = second = int(chance.integers(len(labels)))
    agree = int(chance.integers(2))
    while second == first or (labels[second] == labels[first]) != bool(agree):
        second = int(chance.integers(len(labels)))
    apart = int(chance.integers(config.apart, config.parts))
    place = int(chance.integers(config.parts - apart))
    return agree, [place, place + apart], [first, second]


def _exchanged(drawn: list[int], chosen: list[int], places: list[int]) -> list[int]:
    """Put texts that decide at their places, by exchange with where they were drawn for."""
    drawn = list(drawn)
    for place, one in zip(places, chosen, strict=True):
        if one in drawn:
            drawn[drawn.index(one)] = drawn[place]
        drawn[place] = one
    return drawn


def _check_classes(labels: Sequence[int | str]) -> None:
    counts = Counter(labels)
    if len(counts) < 2 or min(counts.values()) < 2:
        found = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items(), key=str))
        raise DataError(f"documents: got texts of the classes {found}, expected two classes or more, each with two")
