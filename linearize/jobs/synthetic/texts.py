"""The base class of the data sets that are made here; and texts cut and joined: articles, long documents, pairs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass
from typing import ClassVar

import numpy as np

from linearize.core.errors import ConfigError, DataError
from linearize.core.options import check, option
from linearize.core.parsing import user_path
from linearize.data.local import exists
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.splits import Splits, open_splits
from linearize.training.stage_two.tasks import task

Rows = Mapping[str, Iterable[Mapping[str, object]]]
"""Rows by the name of their split."""


class MadeSet:
    """A data set that is generated here; subclasses are dataclasses of its options.

    Attributes:
        called: its name, in recipes and messages.
        reads: the kind of source it is made from; empty if it needs no source.
        framed: whether its tokenizer begins rows with a special token.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    called: ClassVar[str]
    reads: ClassVar[str] = ""
    framed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self, self.called)

    @property
    def tokens(self) -> Sequence[str]:
        """Its tokens, which are separated by spaces in the texts; empty if any tokenizer will do."""
        return ()

    def make(self, source: str = "") -> Rows:
        """Return the rows; `source` is a Hub name, file or folder."""
        raise NotImplementedError


def corpus(source: str, column: str, seed: int) -> Splits:
    """Open the splits of a corpus, with their texts unchanged."""
    return open_splits(task("causal-lm", columns=(column,)), source, DataOptions(seed=seed), raw=True)


def texts_of(source: str, column: str, seed: int) -> dict[str, list[str | None]]:
    """Return a column of both splits of a corpus."""
    splits = corpus(source, column, seed)
    return {"train": splits.train[column], "validation": splits.validation[column]}


_TITLE = re.compile(r"\s*= [^=].*[^=] =\s*")


@dataclass(frozen=True)
class Articles(MadeSet):
    """Whole articles, from a corpus such as WikiText, which has lines under headings."""

    called = "articles"
    reads = "a corpus of lines under headings"

    text_column: str = option("text", "column of the lines")
    shortest: int = option(200, "minimum number of words per article", low=2)
    held: float | None = option(
        None, "share of all articles to measure on, instead of the data's own split", above=0, below=1
    )
    opening: int = option(0, "number of words, always the same ones, to put before each half of every article", low=0)
    seed: int = option(0, "seed for choosing the articles to measure on")

    def make(self, source: str = "") -> Rows:
        """Join the lines of both splits into articles -> rows with `text`.

        With `opening`, both halves of every article begin with the same words, like contracts, reports or mails of one
        company. The words are the first ones of the first training article, which is left out. Task `retrieval` cuts
        articles in the middle, where the words are repeated.

        Raises:
            DataError: if that article has too few words, or is the only one.
        """
        splits = self.joined(source)
        if self.opening:
            first, *train = splits["train"]
            words = first.split()
            if len(words) < self.opening or not train:
                raise DataError(
                    f"articles: got {len(splits['train'])} training articles, the first of {len(words)} words, "
                    f"expected another article and an opening of {self.opening} words; lower opening"
                )
            opening, splits["train"] = words[: self.opening], train
            for texts in splits.values():
                for place, words in enumerate(text.split() for text in texts):
                    middle = len(words) // 2
                    texts[place] = " ".join([*opening, *words[:middle], *opening, *words[middle:]])
        return {split: [{"text": text} for text in texts] for split, texts in splits.items()}

    def joined(self, source: str) -> dict[str, list[str]]:
        """Return the articles of both splits; with `held`, a share of all articles is the one to measure on.

        Raises:
            DataError: if one of the splits would be empty.
        """
        lines = texts_of(source, self.text_column, 0)
        splits = {split: articles(self, column) for split, column in lines.items()}
        if self.held is None:
            return splits
        everything = [text for texts in splits.values() for text in texts]
        order = np.random.default_rng(self.seed).permutation(len(everything))
        count = round(self.held * len(everything))
        if not 0 < count < len(everything):
            raise DataError(f"articles: got {len(everything)} articles, too few to hold out a share of {self.held}")
        held, kept = (np.sort(part) for part in (order[:count], order[count:]))
        return {"train": [everything[n] for n in kept], "validation": [everything[n] for n in held]}


def articles(config: Articles, lines: Iterable[str | None]) -> list[str]:
    """Join lines into articles. A line such as `= Title =` begins an article and is left out.

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
    texts = [text for text in map(" ".join, joined) if len(text.split()) >= config.shortest]
    if not texts:
        wanted = f"expected some of at least {config.shortest} words; lower shortest"
        raise DataError(f"articles: got {len(joined)} articles, {wanted}")
    return texts


TOPICS = (
    ("The ferry to {place} leaves from pier {number}.", "From which pier does the ferry to {place} leave?"),
    ("In {place} the night baker is called {name}.", "What is the night baker in {place} called?"),
    ("{name} keeps a tame heron at the mill of {place}.", "Who keeps a tame heron at the mill of {place}?"),
    ("The oldest clock in {place} stopped in the year {number}.", "When did the oldest clock in {place} stop?"),
    ("{name} won the cheese race at {place} twice.", "Who won the cheese race at {place} twice?"),
    ("The choir of {place} sings only in the dialect of {name}.", "In whose dialect does the choir of {place} sing?"),
    ("Visitors to {place} pay {number} coins at the south gate.", "How much do visitors to {place} pay at the gate?"),
    ("The lighthouse of {place} was painted green by {name}.", "Who painted the lighthouse of {place} green?"),
    ("The library of {place} lends umbrellas for {number} days.", "How long does {place} lend umbrellas?"),
    ("{name} buried a silver trumpet near {place}.", "Who buried a silver trumpet near {place}?"),
)  # fmt: skip
"""Facts for needles, with their questions."""
PLACES = [f"{first}{last}" for last in ("wick", "mere", "holm", "stead", "ford") for first in (
    "Alder", "Bram", "Corn", "Dun", "Elder", "Fen", "Gorse", "Hazel", "Iron", "Juniper")]  # fmt: skip
NAMES = [f"{first} {last}" for last in ("Orrel", "Tamsin", "Quist", "Vale", "Marsh") for first in (
    "Ada", "Boris", "Clara", "Dmitri", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas")]  # fmt: skip
DEPTHS = 10
"""Number of depths at which needles are hidden: 5 %, 15 % and so on of the document."""


@dataclass(frozen=True)
class Needles(Articles):
    """Long documents that hide one fact each, and questions that only one fact answers, as in LongEmbed.

    Passkeys differ only in the name, needles in topic and place. Source: https://arxiv.org/abs/2404.12096
    """

    called = "needles"

    words: int = option(1_500, "words per document, including the fact", low=50)
    documents: int = option(50, "number of documents to search", low=2, high=len(PLACES))
    passkey: bool = option(False, "hide passkeys of different people instead of facts about different topics")

    def make(self, source: str = "") -> Rows:
        """Hide facts in the articles -> rows with `question`, `text` and `depth` (0 to 9)."""
        return {split: needles(self, texts) for split, texts in self.joined(source).items()}


def needles(config: Needles, texts: Sequence[str]) -> list[dict[str, object]]:
    """Hide one fact in each document -> rows with `question`, `text` and `depth`; documents share no part of a text.

    Raises:
        DataError: if the texts have too few words for two documents.
    """
    hay = [word for text in texts for word in text.split()]
    count = min(config.documents, len(hay) // config.words)
    if count < 2:
        raise DataError(f"needles: got {len(hay)} words, expected enough for two documents; lower words")
    chance = np.random.default_rng(config.seed)
    numbers = chance.permutation(np.arange(1_000, 10_000))
    places, names = (chance.permutation(known) for known in (PLACES, NAMES))
    rows: list[dict[str, object]] = []
    for n in range(count):
        details = {"place": places[n], "name": names[n], "number": numbers[n]}
        passkey = "The passkey of {name} is {number}. Remember it.", "What is the passkey of {name}?"
        fact, question = (text.format(**details) for text in (passkey if config.passkey else TOPICS[n % len(TOPICS)]))
        # Every topic appears at every depth, if there are enough documents.
        depth = (n + n // len(TOPICS)) % DEPTHS
        size = config.words - len(fact.split())
        words = hay[n * config.words : n * config.words + size]
        place = round((depth + 0.5) / DEPTHS * size)
        text = " ".join([*words[:place], fact, *words[place:]])
        rows.append({"question": question, "text": text, "depth": depth})
    return rows


@dataclass(frozen=True)
class Documents(MadeSet):
    """Long documents, joined from texts, whose class depends on one or two passages anywhere in the document.

    Real documents often show their class at the beginning or in most of their parts. Then neither truncation nor
    averaging over chunks costs anything, and the documents say nothing about long inputs. Here all other passages are
    texts about something else (`filler`).

    If one text decides, averaged chunks can find the class: the other chunks are neutral, so the chunk with that text
    decides the mean. If the last of two texts decides and they are farther apart than the length of a chunk, no mean
    over chunks can find the class: no chunk shows whether it holds the last one.

    Raises:
        ConfigError: on construction, if a value is out of range, the filler is missing, or a text has no place.
    """

    called = "documents"
    reads = "a data set of texts with classes"

    text_column: str = option("text", "column of the texts")
    label_column: str = option("label", "column of the class")
    filler: str = option("", "data set of texts for the other passages: next to the source, or elsewhere")
    filler_column: str = option("text", "column of the filler texts")
    decides: str = option(
        "one", "one: the class of one text; last: the class of the last of two", choices=("one", "last")
    )
    apart: int = option(1, "minimum distance between the two texts", low=1)
    parts: int = option(6, "texts per document", low=1)
    words: int = option(200, "maximum number of words per text; longer texts are cut", low=1)
    train: int = option(2_000, "training documents", low=1)
    validation: int = option(1_000, "documents to measure on", low=1)
    seed: int = option(0, "seed of all random choices")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.filler:
            raise ConfigError("documents: got no filler, expected a data set of texts for the other passages; name one")
        if self.decides == "last" and self.parts < 2:
            raise ConfigError(f"documents: parts: got {self.parts}, expected 2 or more, as two of them decide")
        if self.apart >= max(self.parts, 2):
            most = f"{self.parts - 1} of {self.parts} parts"
            raise ConfigError(f"documents: apart: got {self.apart}, expected 1 to {most}")

    def make(self, source: str = "") -> Rows:
        """Join the texts of both splits into documents."""
        asked = task("text-classification", columns=(self.text_column,), label=self.label_column)
        splits = open_splits(asked, source, DataOptions(seed=self.seed), raw=True)
        sibling = user_path(source).parent / self.filler
        filler = corpus(str(sibling) if exists(sibling) else self.filler, self.filler_column, self.seed)
        rows = {}
        for split, count, seed in (("train", self.train, self.seed), ("validation", self.validation, self.seed + 1)):
            table, others = getattr(splits, split), getattr(filler, split)[self.filler_column]
            pairs = zip(table[self.text_column], table[self.label_column], strict=True)
            known = [(text, label) for text, label in pairs if text and label is not None]
            texts, labels = [text for text, _ in known], [label for _, label in known]
            rows[split] = documents(self, texts, labels, [text for text in others if text], count, seed)
        return rows


def documents(
    config: Documents, texts: Sequence[str], labels: Sequence[int | str], filler: Sequence[str], count: int, seed: int
) -> list[dict[str, object]]:
    """Make documents -> rows with `text`, `label` and `places` (the positions of the deciding texts, from 0).

    Args:
        config: the options.
        texts: the deciding texts.
        labels: their classes.
        filler: texts for the other passages; texts of fewer than `config.words` words are left out.
        count: number of documents.
        seed: seed of the random choices.

    Raises:
        DataError: if there are too few texts for a document, or, if two decide, too few classes or texts per class.
    """
    others = [text for text in filler if len(text.split()) >= config.words]
    if len(others) < config.parts or not texts:
        raise DataError(
            f"documents: got {len(others)} other texts of at least {config.words} words, expected at least the "
            f"{config.parts} of a document"
        )
    counts = Counter(labels)
    if config.decides == "last" and (len(counts) < 2 or min(counts.values()) < 2):
        got = ", ".join(f"{name}: {many}" for name, many in sorted(counts.items(), key=str))
        raise DataError(f"documents: got texts of the classes {got}, expected two classes or more with two texts each")
    chance = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        passages = [others[int(one)] for one in chance.choice(len(others), size=config.parts, replace=False)]
        if config.decides == "one":
            places, chosen = [int(chance.integers(config.parts))], [int(chance.integers(len(texts)))]
        else:
            # Two texts, which have the same class in half of the draws.
            first = second = int(chance.integers(len(labels)))
            agree = int(chance.integers(2))
            while second == first or (labels[second] == labels[first]) != bool(agree):
                second = int(chance.integers(len(labels)))
            apart = int(chance.integers(config.apart, config.parts))
            place = int(chance.integers(config.parts - apart))
            places, chosen = [place, place + apart], [first, second]
        for place, one in zip(places, chosen, strict=True):
            passages[place] = texts[one]
        text = "\n".join(" ".join(passage.split()[: config.words]) for passage in passages)
        rows.append({"text": text, "label": labels[chosen[-1]], "places": places})
    return rows


@dataclass(frozen=True)
class Halves(MadeSet):
    """Pairs made from any long texts: do two halves belong together? Halves of the same text do, others do not.

    Raises:
        ConfigError: on construction, if a value is out of range or `overlap` is not below `longest`.
    """

    called = "retrieval-halves"
    reads = "a data set of long texts"

    text_column: str = option("text", "column of the texts")
    longest: int = option(4_000, "maximum number of characters per half", low=2)
    shortest: int = option(0, "minimum number of characters per text; shorter texts are left out", low=0)
    overlap: int = option(0, "characters around the middle that both halves contain", low=0)
    seed: int = option(0, "seed of the order of the texts")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap >= self.longest:
            raise ConfigError(f"{self.called}: got overlap {self.overlap}, expected less than longest ({self.longest})")

    def make(self, source: str = "") -> Rows:
        """Cut the texts of both splits."""
        texts = texts_of(source, self.text_column, self.seed)
        return {split: halves(self, [text for text in column if text]) for split, column in texts.items()}


def halves(config: Halves, texts: list[str]) -> list[dict[str, object]]:
    """Cut texts in two -> rows with `text1`, `text2` and `label` (1: halves of the same text, 0: of different texts).

    Every half is in one row of each label, so no single text gives the label away. The halves of a text shorter than
    twice `longest` are equally long, which would show that they belong together; with `shortest` at twice `longest`,
    all halves are equally long. With `overlap`, both halves contain the middle of the text.

    Raises:
        DataError: if there are fewer than two texts of the required length.
    """
    texts = [text for text in texts if len(text) >= config.shortest]
    if len(texts) < 2:
        wanted = f" of {config.shortest} characters or more" if config.shortest else ""
        raise DataError(f"retrieval-halves: got {len(texts)} texts{wanted}, expected at least two for pairs")
    order = np.random.default_rng(config.seed).permutation(len(texts))
    starts = [(texts[i], max(0, len(texts[i]) // 2 - config.overlap // 2)) for i in order]
    cut = [(text[: begin + config.overlap], text[begin:]) for text, begin in starts]
    rows: list[dict[str, object]] = []
    for place, (first, second) in enumerate(cut):
        for other, label in ((second, 1), (cut[(place + 1) % len(cut)][1], 0)):
            rows.append({"text1": first[-config.longest :], "text2": other[: config.longest], "label": label})
    return rows
