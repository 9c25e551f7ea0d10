"""Data sets that are made or reshaped here, by name: sequences of tokens as rows of text, and texts cut and joined."""

from __future__ import annotations

import csv
import io
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from linearize.core.errors import ConfigError, DataError, UnknownNameError, unknown_name
from linearize.core.options import check, option
from linearize.core.options import make as make_config
from linearize.core.parsing import read_text
from linearize.data.images import decode
from linearize.data.local import place_of
from linearize.jobs.synthetic.tokenizers import fixed_tokenizer
from linearize.training.stage_two.prepare import Splits, View, open_splits
from linearize.training.stage_two.tasks import task

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

Rows = Mapping[str, Iterable[Mapping[str, object]]]
"""Rows by the name of their split."""


class MadeSet:
    """A data set that is made here; a subclass is a dataclass of its options.

    Attributes:
        called: its name in messages.
        reads: what it is made from; empty if it needs no source.
        framed: whether its tokenizer begins rows with a special token.
    """

    called: ClassVar[str]
    reads: ClassVar[str] = ""
    framed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self, self.called)

    def make(self, source: str | None = None) -> tuple[Rows, str]:
        """Return the rows and one line about them; `source` is a Hub name, file or folder."""
        raise NotImplementedError

    def vocabulary(self) -> Sequence[str]:
        """Return its tokens, between blanks in the texts; none if any tokenizer will do."""
        return ()


OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
OPERATOR_SHARE = 0.25
TOKENS = (*OPERATORS, END, *(str(digit) for digit in range(10)))


@dataclass(frozen=True)
class ListOps(MadeSet):
    """Nested lists of digits under MAX, MIN, MEDIAN and SUM MOD 10; the answer is a digit.

    Grammar of Nangia & Bowman (2018, https://arxiv.org/abs/1804.06028) with the sizes of Long Range Arena
    (https://arxiv.org/abs/2011.04006): a node is an operator with probability 1/4 below the deepest level, else a
    digit; an operator has 2 to `most_arguments` arguments; sequences of 500 to 2,000 tokens are kept. Round brackets of
    the binary tree are left out, as in Long Range Arena's input pipeline.
    """

    called = "listops"

    train: int = option(96_000, "training rows")
    validation: int = option(2_000, "validation rows")
    shortest: int = option(500, "tokens of a row, at least", low=1)
    longest: int = option(2_000, "tokens of a row, at most", low=1)
    depth: int = option(10, "deepest nesting", low=2)
    most_arguments: int = option(10, "arguments of an operator, at most", low=2)
    seed: int = option(0, "of all rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise ConfigError(f"listops: got shortest {self.shortest}, expected at most longest ({self.longest})")
        if self.most_arguments**self.depth < self.shortest:
            raise ConfigError(f"listops: no list of depth {self.depth} has {self.shortest} tokens; lower shortest")

    def make(self, source: str | None = None) -> tuple[Rows, str]:
        """Draw both splits, which have no row in common: `text` (tokens between blanks) and `label` (0 to 9)."""
        chance, drawn = random.Random(self.seed), dict[str, int]()
        while len(drawn) < self.train + self.validation:
            tokens: list[str] = []
            try:
                value = draw(chance, self, tokens, 1)
            except TooLongError:
                continue
            if len(tokens) >= self.shortest:
                drawn.setdefault(" ".join(tokens), value)
        rows = [{"text": text, "label": label} for text, label in drawn.items()]
        splits = {"train": rows[self.validation :], "validation": rows[: self.validation]}
        return splits, f"ListOps of {self.shortest} to {self.longest} tokens, seed {self.seed}"

    def vocabulary(self) -> Sequence[str]:
        """Return operators and digits."""
        return TOKENS


class TooLongError(Exception):
    """The list being drawn has too many tokens."""


def draw(chance: random.Random, config: ListOps, tokens: list[str], level: int) -> int:
    """Append a random list to `tokens` and return its value.

    Raises:
        TooLongError: as soon as there are more tokens than `config.longest`.
    """
    if level >= config.depth or chance.random() > OPERATOR_SHARE:
        digit = chance.randrange(10)
        tokens.append(str(digit))
        return digit
    name = chance.choice(list(OPERATORS))
    tokens.append(name)
    values = []
    for _ in range(chance.randint(2, config.most_arguments)):
        values.append(draw(chance, config, tokens, level + 1))
        if len(tokens) >= config.longest:
            raise TooLongError
    tokens.append(END)
    return OPERATORS[name](values)


@dataclass(frozen=True)
class AssociativeRecall(MadeSet):
    """Rows of key-value pairs that end in a key seen before; the next token is that key's value.

    The task of Hedgehog's table 4 and figure 5 (https://arxiv.org/abs/2402.04347, appendix B): 40 tokens, half of them
    keys and half values, 128 tokens long, so that a key comes up three times on average. Each row has another mapping.
    The defaults are the paper's where it gives them. All answers of seen keys are trained on; the last is measured.
    """

    called = "associative recall"
    framed = False

    train: int = option(20_000, "training rows")
    validation: int = option(500, "validation rows")
    vocabulary_size: int = option(40, "tokens: keys and values, half each", low=4, name="vocabulary")
    length: int = option(128, "tokens of a row, including the answer", low=4)
    seed: int = option(0, "of all rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocabulary_size % 2 or self.length % 2:
            raise ConfigError(
                f"associative recall: got vocabulary {self.vocabulary_size} and length {self.length}, expected even "
                "numbers"
            )

    def make(self, source: str | None = None) -> tuple[Rows, str]:
        """Draw both splits; only the last answer is measured."""
        rows = {
            "train": recall_rows(self, self.train, 2 * self.seed),
            "validation": recall_rows(self, self.validation, 2 * self.seed + 1, last=True),
        }
        return rows, f"associative recall, {self.vocabulary_size} tokens, length {self.length}, seed {self.seed}"

    def vocabulary(self) -> Sequence[str]:
        """Return keys, then values."""
        numbers = range(self.vocabulary_size // 2)
        return [*(f"k{n}" for n in numbers), *(f"v{n}" for n in numbers)]


def recall_rows(config: AssociativeRecall, count: int, seed: int, *, last: bool = False) -> list[dict[str, object]]:
    """Draw rows with `text` (the answer is its last token) and `positions` of answers: of all, or of the last one."""
    chance = random.Random(seed)
    half = config.vocabulary_size // 2
    made: list[dict[str, object]] = []
    for _ in range(count):
        values = [chance.randrange(half) for _ in range(half)]
        keys = [chance.choice(range(half)) for _ in range(config.length // 2 - 1)]
        keys.append(chance.choice(keys))
        text = " ".join(f"k{key} v{values[key]}" for key in keys)
        positions = [2 * place + 1 for place, key in enumerate(keys) if key in keys[:place]]
        made.append({"text": text, "positions": positions[-1:] if last else positions})
    return made


GREY = tuple(str(value) for value in range(256))
"""The vocabulary of pixels: grey values as words."""
FEWEST_FIELDS = 4


@dataclass(frozen=True)
class Pixels(MadeSet):
    """Images as rows of grey values, one token per pixel: Long Range Arena's image task."""

    called = "pixels"
    reads = "an image data set"

    side: int = option(32, "images are scaled to side x side pixels", low=1)
    label_column: str = option("label", "column of the class")

    def make(self, source: str | None = None) -> tuple[Rows, str]:
        """Write the images of both splits as grey values."""
        splits = open_splits(task("image-classification", label=self.label_column), str(source), limit=None, seed=0)
        names = splits.train.records.names or ()

        def rows(view: View) -> Iterable[dict[str, object]]:
            for place in range(len(view)):
                example = view.fetch([place])[0]
                # Reading leaves rows without a label out.
                assert example.label is not None
                number = names.index(example.label) if isinstance(example.label, str) else int(example.label)
                yield {"text": pixel_text(example.value, self.side), "label": number}

        return {"train": rows(splits.train), "validation": rows(splits.validation)}, f"pixels of {splits.description}"

    def vocabulary(self) -> Sequence[str]:
        """Return grey values."""
        return GREY


@dataclass(frozen=True)
class Pathfinder(MadeSet):
    """Pathfinder (https://arxiv.org/abs/1805.08315) as Long Range Arena released it.

    A folder such as `pathfinder32/curv_contour_length_14` with `metadata/N.npy`, which are lines of text (folder, file,
    number, label ...), and the images that they name.
    """

    called = "pathfinder"
    reads = "Pathfinder's released files"

    side: int = option(32, "images are scaled to side x side pixels", low=1)
    validation: float = option(0.1, "share of the images to measure on", above=0, below=1)
    seed: int = option(0, "of the choice of images to measure on")

    def make(self, source: str | None = None) -> tuple[Rows, str]:
        """Read the images -> rows with `text` and `label` (1: the two dots are joined), in two splits.

        Raises:
            DataError: if there are no such files, or an image is missing or damaged.
        """
        root, entries = Path(str(source)).expanduser(), []
        for file in sorted((root / "metadata").glob("*.npy")):
            try:
                lines = read_text(file).splitlines()
            except (OSError, ValueError) as error:
                raise DataError(f"pathfinder: cannot read {file.name!r} ({error}); copy the files again") from error
            entries += [_entry(line, file) for line in lines if line.strip()]
        if not entries:
            raise DataError(
                f"pathfinder: got no metadata/*.npy in {source!r}; expected the released files, such as those of "
                "pathfinder32/curv_contour_length_14"
            )
        order = np.random.default_rng(self.seed).permutation(len(entries))
        count = max(1, round(self.validation * len(entries)))
        read = [_read(root, *entry, self.side) for entry in entries]
        parts = {"validation": order[:count], "train": order[count:]}
        return {name: [read[i] for i in sorted(part)] for name, part in parts.items()}, self.reads

    def vocabulary(self) -> Sequence[str]:
        """Return grey values."""
        return GREY


def pixel_text(image: Image, side: int) -> str:
    """Write a PIL image as `side * side` grey values, line by line."""
    grey = image.convert("L")
    if grey.size != (side, side):
        grey = grey.resize((side, side))
    return " ".join(map(str, np.asarray(grey).reshape(-1).tolist()))


def _entry(line: str, file: Path) -> tuple[str, int]:
    fields = line.split()
    if len(fields) < FEWEST_FIELDS or fields[3] not in ("0", "1"):
        raise DataError(f"pathfinder: got {line!r} in {file.name}, expected folder, file, number and label (0 or 1)")
    return f"{fields[0]}/{fields[1]}", int(fields[3])


def _read(root: Path, name: str, label: int, side: int) -> dict[str, object]:
    try:
        data = (root / name).read_bytes()
    except OSError as error:
        raise DataError(f"pathfinder: cannot read image {name!r} ({error.strerror}); copy the files again") from error
    return {"text": pixel_text(decode(data, name), side), "label": label}


def corpus(source: str | None, column: str, seed: int) -> Splits:
    """Open the splits of a corpus unchanged."""
    return open_splits(task("causal-lm", columns=(column,)), str(source), limit=None, seed=seed, raw=True)


_TITLE = re.compile(r"\s*= [^=].*[^=] =\s*")


@dataclass(frozen=True)
class Articles(MadeSet):
    """Whole articles, from a corpus of lines under headings such as WikiText."""

    called = "articles"
    reads = "a corpus of lines under headings"

    text_column: str = option("text", "column of the lines")
    shortest: int = option(200, "words of an article, at least", low=2)
    held: float | None = option(
        None, "share of all articles to measure on, instead of the data's own split", above=0, below=1
    )
    opening: int = option(0, "words of another article, always the same, before each half of every article", low=0)
    seed: int = option(0, "of the choice of those to measure on")

    def make(self, source: str | None = None) -> tuple[Rows, str]:
        """Join the lines of both splits into articles -> rows with `text`."""
        splits = corpus(source, self.text_column, 0)
        lines = {"train": splits.train[self.text_column], "validation": splits.validation[self.text_column]}
        joined = resplit(self, {split: articles(self, column) for split, column in lines.items()})
        alike = f", both halves beginning with the same {self.opening} words" if self.opening else ""
        return open_alike(self, joined), f"articles of {self.shortest} words or more{alike}"


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


DECIDES = {"one": "one of which decides", "last": "the last of two decides"}
"""What decides a document's class, and how descriptions of the data put it."""


@dataclass(frozen=True)
class Documents(MadeSet):
    """Long documents, joined from texts, whose class depends on one or two passages at any place.

    Real documents often show their class at the beginning or in most of their parts. Then neither cutting them nor
    averaging over chunks costs anything, and they teach nothing about long inputs. Here the other passages are texts
    about something else (`filler`).

    If one text decides, chunks can find it: the others say nothing, so their mean is what its chunk says. If the last
    of two decides and they are farther apart than a chunk is long, no mean over chunks can find the class: no chunk
    knows whether it holds the last one.
    """

    called = "documents"
    reads = "a data set of texts with classes"

    text_column: str = option("text", "column of the texts")
    label_column: str = option("label", "column of the class")
    filler: str = option("", "data set of texts for the other passages: next to the source, or elsewhere")
    filler_column: str = option("text", "column of those")
    decides: str = option("one", "one: the class of one text; last: that of the last of two", choices=DECIDES)
    apart: int = option(1, "distance of the two texts, at least", low=1)
    parts: int = option(6, "texts of a document", low=1)
    words: int = option(200, "words of a text, at most; longer ones are cut", low=1)
    train: int = option(2_000, "training documents", low=1)
    validation: int = option(1_000, "documents to measure on", low=1)
    seed: int = option(0, "of all draws")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.filler:
            raise ConfigError("documents: got no filler, expected a data set of texts for the other passages; name one")
        if self.decides == "last" and self.parts < 2:
            raise ConfigError(f"documents: parts: got {self.parts}, expected 2 or more, as two of them decide")
        if self.apart >= max(self.parts, 2):
            raise ConfigError(
                f"documents: apart: got {self.apart}, expected 1 to {self.parts - 1} of {self.parts} parts"
            )

    def make(self, source: str | None = None) -> tuple[Rows, str]:
        """Join the texts of both splits into documents."""
        asked = task("text-classification", columns=(self.text_column,), label=self.label_column)
        splits = open_splits(asked, str(source), limit=None, seed=self.seed, raw=True)
        place = place_of(self.filler, str(Path(str(source)).parent), called="documents: filler")
        filler = corpus(place, self.filler_column, self.seed)
        rows = {}
        for split, count, seed in (("train", self.train, self.seed), ("validation", self.validation, self.seed + 1)):
            table, others = getattr(splits, split), getattr(filler, split)[self.filler_column]
            rows[split] = documents(self, table[self.text_column], table[self.label_column], others, count, seed)
        decides = f"documents of {self.parts} texts, {DECIDES[self.decides]}"
        return rows, f"{decides}, of {splits.description}, the others of {filler.description}"


def documents(
    config: Documents, texts: Sequence[str], labels: Sequence[int | str], filler: Sequence[str], count: int, seed: int
) -> list[dict[str, object]]:
    """Make documents -> rows with `text`, `label` and `places` (of the texts that decide, from 0).

    Args:
        config: the options.
        texts: texts that decide.
        labels: their classes.
        filler: texts for the other passages; those of fewer than `config.words` words are left out.
        count: how many documents.
        seed: of the draws.

    Raises:
        DataError: if there are too few texts for a document, or, if two decide, too few classes or texts of a class.
    """
    others = [text for text in filler if len(text.split()) >= config.words]
    if len(others) < config.parts or not texts:
        raise DataError(
            f"documents: got {len(others)} other texts of at least {config.words} words, expected at least the "
            f"{config.parts} of a document"
        )
    if config.decides == "last":
        _check_classes(labels)
    chance = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        passages = [others[int(one)] for one in chance.choice(len(others), size=config.parts, replace=False)]
        if config.decides == "one":
            places, chosen = [int(chance.integers(config.parts))], [int(chance.integers(len(texts)))]
        else:
            places, chosen = _two(config, labels, chance)
        for place, one in zip(places, chosen, strict=True):
            passages[place] = texts[one]
        text = "\n".join(" ".join(passage.split()[: config.words]) for passage in passages)
        rows.append({"text": text, "label": labels[chosen[-1]], "places": places})
    return rows


def _two(config: Documents, labels: Sequence[int | str], chance: np.random.Generator) -> tuple[list[int], list[int]]:
    """Draw the places of two texts and the two, of which as many have one class as not."""
    first = second = int(chance.integers(len(labels)))
    agree = int(chance.integers(2))
    while second == first or (labels[second] == labels[first]) != bool(agree):
        second = int(chance.integers(len(labels)))
    apart = int(chance.integers(config.apart, config.parts))
    place = int(chance.integers(config.parts - apart))
    return [place, place + apart], [first, second]


def _check_classes(labels: Sequence[int | str]) -> None:
    counts = Counter(labels)
    if len(counts) < 2 or min(counts.values()) < 2:
        found = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items(), key=str))
        raise DataError(f"documents: got texts of the classes {found}, expected two classes or more, each with two")


RELEASED = {"train": "new_aan_pairs.train.tsv", "validation": "new_aan_pairs.eval.tsv"}
FIELDS = 5


@dataclass(frozen=True)
class Halves(MadeSet):
    """Pairs made from any long texts: do two halves belong together? Those of one text do, those of two do not."""

    called = "retrieval"
    reads = "a data set of long texts"

    text_column: str = option("text", "column of the texts")
    longest: int = option(4_000, "characters of a half, at most", low=2)
    shortest: int = option(0, "characters of a text, at least; shorter ones are left out", low=0)
    overlap: int = option(0, "characters around the middle that both halves have", low=0)
    seed: int = option(0, "of the order of the texts")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap >= self.longest:
            raise ConfigError(f"retrieval: got overlap {self.overlap}, expected less than longest ({self.longest})")

    def make(self, source: str | None = None) -> tuple[Rows, str]:
        """Cut the texts of both splits."""
        splits = corpus(source, self.text_column, self.seed)
        texts = {"train": splits.train[self.text_column], "validation": splits.validation[self.text_column]}
        rows = {split: halves(self, [text for text in column if text]) for split, column in texts.items()}
        return rows, f"halves of the texts of {splits.description}"


@dataclass(frozen=True)
class Released(MadeSet):
    """Long Range Arena's retrieval: do two papers of the ACL Anthology Network belong together?

    Its files `new_aan_pairs.{train,eval,test}.tsv` have no header and the columns label, id, id, text, text.
    """

    called = "retrieval"
    reads = "Long Range Arena's released files"

    def make(self, source: str | None = None) -> tuple[Rows, str]:
        """Read the pairs.

        Raises:
            DataError: if a file is missing or has other columns.
        """
        rows = {}
        for split, name in RELEASED.items():
            path = Path(str(source)).expanduser() / name
            if not path.is_file():
                raise DataError(f"retrieval: got no {name} in {source!r}; expected {self.reads} there")
            try:
                lines = io.StringIO(read_text(path), newline="")
                rows[split] = [_pair(row, name) for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]
            except (OSError, ValueError, csv.Error) as error:
                raise DataError(f"retrieval: cannot read {name!r} ({error}); copy the files again") from error
        return rows, "Long Range Arena's released pairs of papers"


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


def _pair(row: list[str], name: str) -> dict[str, object]:
    if len(row) != FIELDS or row[0] not in ("0", "1", "0.0", "1.0"):
        raise DataError(f"retrieval: got {len(row)} columns in a row of {name}, expected label, id, id, text, text")
    return {"text1": row[3], "text2": row[4], "label": int(float(row[0]))}


SETS: dict[str, type[MadeSet]] = {
    "listops": ListOps,
    "associative-recall": AssociativeRecall,
    "pixels": Pixels,
    "pathfinder": Pathfinder,
    "articles": Articles,
    "documents": Documents,
    "retrieval": Released,
    "retrieval-halves": Halves,
}


@dataclass(frozen=True)
class Made:
    """A data set made here.

    Attributes:
        tables: `datasets.Dataset` by the name of the split.
        tokenizer: for its vocabulary; None if any tokenizer will do.
        description: one line.
    """

    tables: dict[str, Dataset]
    tokenizer: PreTrainedTokenizerBase | None
    description: str


def make(name: str, options: Mapping[str, object] | None = None, source: str | None = None) -> Made:
    """Make a data set.

    Args:
        name: a key of `SETS`.
        options: its options.
        source: what it is made from, if it needs a source.

    Raises:
        UnknownNameError: for an unknown name or option.
        ConfigError: for a value of the wrong type.
        DataError: if it needs a source that is not given or cannot be read.
    """
    from datasets import Dataset

    maker = make_options(name, options or {})
    if maker.reads and source is None:
        raise DataError(f"{name} is made from {maker.reads}; name it (data=PATH)")
    rows, description = maker.make(source)
    tables = {split: Dataset.from_list(list(part)) for split, part in rows.items()}
    counts = ", ".join(f"{len(table):,} {split} rows" for split, table in tables.items())
    tokens = maker.vocabulary()
    tokenizer = fixed_tokenizer(tokens, framed=maker.framed) if tokens else None
    return Made(tables, tokenizer, f"{description}: {counts}")


def make_options(name: str, options: Mapping[str, object]) -> MadeSet:
    """Check a set's options and return them as its dataclass.

    Raises:
        UnknownNameError: for an unknown set or option.
        ConfigError: for a value that is not allowed.
    """
    if name not in SETS:
        raise unknown_name("made data set", name, SETS)
    try:
        return make_config(SETS[name], options)
    except UnknownNameError as error:
        raise UnknownNameError(f"{name}: {error}") from error
