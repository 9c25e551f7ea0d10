"""Long documents, joined from the texts of a data set, whose class depends on one or two passages at any place.

Real documents often show their class at the beginning or in most of their parts. Then neither cutting them nor
averaging over chunks costs anything, and they teach nothing about long inputs. Here the other passages are texts about
something else (`filler`), or texts of random classes with another heading.

If one text decides, chunks can find it: the others say nothing, so their mean is what its chunk says. If two decide and
are farther apart than a chunk is long, no mean over chunks can find the class: every chunk sees at most one of them.
Whether their classes agree is independent of either class; and if the last one decides, no chunk knows whether it holds
the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linearize.core.errors import ConfigError, DataError
from linearize.core.options import check, option

ONE, LAST, AGREEMENT = "one", "last", "agreement"
DECIDES = {
    ONE: "one of which decides",
    LAST: "the last of two decides",
    AGREEMENT: "two of which decide by whether they agree",
}
"""What decides a document's class, and how descriptions of the data put it."""


@dataclass(frozen=True)
class Documents:
    """How documents are made."""

    text_column: str = option("text", "column of the texts")
    label_column: str = option("label", "column of the class")
    filler: str = option("", "data set of texts for the other passages: next to the source, or elsewhere")
    filler_column: str = option("text", "column of those")
    decides: str = option(
        ONE,
        "one: the class of one text; last: that of the last of two; agreement: whether two have the same",
        choices=DECIDES,
    )
    apart: int = option(1, "distance of the two texts that decide, at least", low=1)
    parts: int = option(6, "texts of a document", low=1)
    words: int = option(200, "words of a text, at most; longer ones are cut", low=1)
    train: int = option(2_000, "training documents", low=1)
    validation: int = option(1_000, "documents to measure on", low=1)
    heading: str | None = option(None, "heading of the text that decides (Verdict:, with a filler nothing)")
    other: str | None = option(None, "heading of the others (Report:, with a filler nothing)")
    seed: int = option(0, "of all draws")

    def __post_init__(self) -> None:
        check(self, "documents")
        if self.decides != ONE and self.parts < 2:
            raise ConfigError(f"documents: parts: got {self.parts}, expected 2 or more, as two of them decide")
        if self.apart >= max(self.parts, 2):
            raise ConfigError(
                f"documents: apart: got {self.apart}, expected 1 to {self.parts - 1} of {self.parts} parts"
            )
        if self.headings[0] == self.headings[1] and not self.filler:
            raise ConfigError(
                f"documents: got {self.headings[0]!r} before every text, expected another one before the others"
            )

    @property
    def headings(self) -> tuple[str, str]:
        """The heading of the text that decides, and that of the others."""
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
    """Make documents -> rows with `text`, `label` and `places` (of the texts that decide, from 0).

    Args:
        config: the options.
        texts: to draw from; a document has no text twice.
        labels: their classes.
        count: how many documents.
        seed: of the draws.
        filler: texts for the other passages; those of fewer than `config.words` words are left out. None: `texts`.

    Raises:
        DataError: if there are too few texts for a document, or, if two decide, too few classes or texts of a class.
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
    """Put the texts that decide at their places, exchanged with the texts drawn for these."""
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
