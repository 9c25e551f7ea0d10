"""The data sets that are generated here, by name; and token sequences, drawn at random or read, as rows of text."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from linearize.core.errors import ConfigError, DataError, UnknownNameError, unknown_name
from linearize.core.options import make as make_config
from linearize.core.options import option
from linearize.jobs.synthetic.texts import Articles, Documents, Halves, MadeSet, Needles, Rows
from linearize.jobs.synthetic.tokenizers import fixed_tokenizer
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.splits import View, open_splits
from linearize.training.stage_two.tasks import task

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase


OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
OPERATOR_SHARE = 0.25
MOST_DRAWS = 200_000
"""Draws in a row that give no new list, after which there is hardly another one."""
TOKENS = (*OPERATORS, END, *(str(digit) for digit in range(10)))


@dataclass(frozen=True)
class ListOps(MadeSet):
    """Nested lists of digits under MAX, MIN, MEDIAN and SUM MOD 10; the answer is a digit.

    Grammar of Nangia & Bowman (2018, https://arxiv.org/abs/1804.06028) with the sizes of Long Range Arena
    (https://arxiv.org/abs/2011.04006): above the deepest level a node is an operator with probability 1/4, otherwise a
    digit; an operator has 2 to `most_arguments` arguments; sequences of 500 to 2,000 tokens are kept. The round
    brackets of the binary tree are left out, as in Long Range Arena's input pipeline.

    Raises:
        ConfigError: on construction, for a value out of range, or if no list has the asked length.
    """

    called = "listops"
    tokens = TOKENS

    train: int = option(96_000, "training rows", low=1)
    validation: int = option(2_000, "validation rows", low=1)
    shortest: int = option(500, "minimum number of tokens per row", low=1)
    longest: int = option(2_000, "maximum number of tokens per row", low=1)
    depth: int = option(10, "maximum depth of nesting", low=2)
    most_arguments: int = option(10, "maximum number of arguments per operator", low=2)
    seed: int = option(0, "seed of all rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise ConfigError(f"listops: got shortest {self.shortest}, expected at most longest ({self.longest})")
        most = 1
        for _ in range(1, self.depth):
            # An operator, its arguments and the end.
            most = 2 + self.most_arguments * most
        if most < self.shortest:
            raise ConfigError(f"listops: no list of depth {self.depth} has {self.shortest} tokens; lower shortest")

    def make(self, source: str = "") -> Rows:
        """Draw both splits, with no row in common: `text` (tokens separated by spaces) and `label` (0 to 9).

        Raises:
            DataError: if there are too few different lists of these lengths.
        """
        chance, drawn, failed = random.Random(self.seed), dict[str, int](), 0
        while len(drawn) < self.train + self.validation:
            tokens: list[str] = []
            before = len(drawn)
            with contextlib.suppress(TooLongError):
                value = draw(chance, self, tokens, 1)
                if len(tokens) >= self.shortest:
                    drawn.setdefault(" ".join(tokens), value)
            failed = 0 if len(drawn) > before else failed + 1
            if failed == MOST_DRAWS:
                raise DataError(
                    f"listops: got {before} different lists of {self.shortest} to {self.longest} tokens, then "
                    f"{MOST_DRAWS:,} draws without another, expected {self.train + self.validation:,}; ask for fewer "
                    "rows, or for more lengths"
                )
        rows = [{"text": text, "label": label} for text, label in drawn.items()]
        return {"train": rows[self.validation :], "validation": rows[: self.validation]}


class TooLongError(Exception):
    """The random list has too many tokens."""


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

    The task of Hedgehog's table 4 and figure 5 (https://arxiv.org/abs/2402.04347, appendix B): a vocabulary of 40
    tokens, half keys and half values, and rows of 128 tokens, so that a key appears three times on average. Each row
    has its own mapping. The defaults are the paper's where it gives them. Training uses the answers of all keys seen
    before; only the last answer is measured.

    Raises:
        ConfigError: on construction, for a value out of range, or an odd length or vocabulary.
    """

    called = "associative-recall"
    framed = False

    train: int = option(20_000, "training rows", low=1)
    validation: int = option(500, "validation rows", low=1)
    vocabulary_size: int = option(40, "size of the vocabulary: half keys, half values", low=4, name="vocabulary")
    length: int = option(128, "tokens per row, including the answer", low=4)
    seed: int = option(0, "seed of all rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        size, length = self.vocabulary_size, self.length
        if size % 2 or length % 2:
            raise ConfigError(f"associative-recall: got vocabulary {size} and length {length}, expected even numbers")

    def make(self, source: str = "") -> Rows:
        """Draw both splits; only the last answer is measured."""
        return {
            "train": recall_rows(self, self.train, 2 * self.seed),
            "validation": recall_rows(self, self.validation, 2 * self.seed + 1, last=True),
        }

    @property
    def tokens(self) -> Sequence[str]:
        """The keys, then the values."""
        numbers = range(self.vocabulary_size // 2)
        return [*(f"k{n}" for n in numbers), *(f"v{n}" for n in numbers)]


def recall_rows(config: AssociativeRecall, count: int, seed: int, *, last: bool = False) -> list[dict[str, object]]:
    """Draw rows with `text`, which ends in an answer, and the `positions` of all answers, or of the last one."""
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


@dataclass(frozen=True)
class Pixels(MadeSet):
    """Images as rows of grey values, one token per pixel: Long Range Arena's image task."""

    called = "pixels"
    reads = "an image data set"
    tokens = GREY

    side: int = option(32, "images are scaled to side x side pixels", low=1)
    label_column: str = option("label", "column of the class")

    def make(self, source: str = "") -> Rows:
        """Return the images of both splits as grey values."""
        splits = open_splits(task("image-classification", label=self.label_column), source, DataOptions())
        names = splits.train.records.names or ()

        def rows(view: View) -> Iterable[dict[str, object]]:
            for place in range(len(view)):
                example = view.fetch([place])[0]
                # Reading leaves out rows without a label, and refuses lists.
                assert example.label is not None and not isinstance(example.label, tuple)
                number = names.index(example.label) if isinstance(example.label, str) else int(example.label)
                yield {"text": pixel_text(example.value, self.side), "label": number}

        return {"train": rows(splits.train), "validation": rows(splits.validation)}


def pixel_text(image: Image, side: int) -> str:
    """Return a PIL image as `side * side` grey values, row by row."""
    grey = image.convert("L")
    if grey.size != (side, side):
        grey = grey.resize((side, side))
    return " ".join(map(str, np.asarray(grey).reshape(-1).tolist()))


MADE: tuple[type[MadeSet], ...] = (ListOps, AssociativeRecall, Pixels, Articles, Documents, Needles, Halves)
SETS = {made.called: made for made in MADE}


def make(
    name: str, options: Mapping[str, object] | None = None, source: str | None = None
) -> tuple[dict[str, Dataset], PreTrainedTokenizerBase | None]:
    """Generate a data set.

    Args:
        name: a key of `SETS`.
        options: its options.
        source: Hub name, file or folder that it is made from, if it needs a source.

    Returns:
        The tables by split, and a tokenizer for the vocabulary (None if any will do).

    Raises:
        UnknownNameError: for an unknown name or option.
        ConfigError: for a value of the wrong type.
        DataError: if it needs a source that is not given or cannot be read.
    """
    from datasets import Dataset

    maker = make_options(name, options or {})
    if maker.reads and source is None:
        raise DataError(f"{name} is made from {maker.reads}; name it (data=PATH)")
    tables = {split: Dataset.from_list(list(part)) for split, part in maker.make(source or "").items()}
    return tables, fixed_tokenizer(maker.tokens, framed=maker.framed) if maker.tokens else None


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
