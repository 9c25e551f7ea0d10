"""Data options, and weighted mixtures of data sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from linearize.core.errors import ConfigError
from linearize.core.options import check, convert, option

Mixture = tuple[tuple[str, float], ...]

STREAMED = 32_768
"""Rows that are read from a data set with `streaming`; stage one sees 32,000 by default."""
HOLDOUT = 64
"""Examples held out by default, if there are at least four times as many."""


@dataclass(frozen=True)
class DataConfig:
    """Where the examples come from and how they become batches.

    Raises:
        ConfigError: On construction, if a value is out of range or two options exclude each other.
    """

    dataset: str | Mixture | None = option(
        None,
        "Hub data set (name or name:config), local file or folder; a mixture with weights: a.jsonl=0.7,b.txt=0.3; "
        "by default WikiText-2 or CIFAR-10 from the Hub, and built-in sample data when offline",
        metavar="NAME_OR_PATH",
    )
    split: str = option("train", "split to read from a Hub data set or a folder; a single local file is read whole")
    text_column: str | None = option(
        None,
        "text column, or the two columns of a pair; found automatically if it is unambiguous",
        metavar="C[,D]",
        second="text_pair_column",
    )
    text_pair_column: str | None = option(None, "column of the second text, for models that read pairs")
    image_column: str | None = option(None, "column of the image; found by its type when not given", metavar="C")
    max_length: int = option(128, "tokens per row; longer texts are cut", low=1)
    batch_size: int = option(32, "rows per batch and process", low=1)
    seed: int = option(0, "seed of the held-out choice, the order and the built-in crops", low=0)
    holdout: int | None = option(
        None,
        "held-out examples to measure on (texts, even with packing), removed with their duplicates from training",
        low=0,
        shown="64, at most a quarter of them",
    )
    packing: bool = option(False, "join short texts into rows of full length (causal language models)", negatable=True)
    streaming: bool = option(False, f"read only the first {STREAMED:,} rows, for sets too large to load")

    def __post_init__(self) -> None:
        if self.dataset is not None:
            object.__setattr__(self, "dataset", parse_mixture(self.dataset))
        if isinstance(self.text_column, str) and "," in self.text_column:
            columns = [name.strip() for name in self.text_column.split(",")]
            if len(columns) != 2 or not all(columns) or self.text_pair_column is not None:
                raise ConfigError(f"data: got text_column {self.text_column!r}, expected one name, or two with a comma")
            object.__setattr__(self, "text_column", columns[0])
            object.__setattr__(self, "text_pair_column", columns[1])
        check(self, "data")
        for name in ("split", "text_column", "text_pair_column", "image_column"):
            if getattr(self, name) == "":
                raise ConfigError(f"data, {name}: got an empty string, expected a name; leave it out")
        if self.packing and self.text_pair_column:
            raise ConfigError("data: got packing together with text_pair_column, expected one of them; drop packing.")

    @property
    def finds_pairs(self) -> bool:
        """Whether the two columns of a pair are searched for: no column is named, and texts are not packed."""
        return self.text_column is None and self.text_pair_column is None and not self.packing

    def held_out(self, examples: int | None) -> int:
        """Return how many of `examples` (None if unknown) are held out."""
        if self.holdout is not None:
            return self.holdout
        return HOLDOUT if examples is None else max(1, min(HOLDOUT, examples // 4))

    @property
    def rows_read(self) -> int | None:
        """How many rows are read from the start of a data set; None for all."""
        return STREAMED if self.streaming else None

    @property
    def sources(self) -> Mixture:
        """The data sets with their weights; one of weight 1 for a plain name, none for the built-in data."""
        if self.dataset is None:
            return ()
        return ((self.dataset, 1.0),) if isinstance(self.dataset, str) else self.dataset


def parse_mixture(value: object) -> str | Mixture:
    """Read ``"name"`` or ``"name=weight,name=weight"``, or weights as a mapping or a list of pairs.

    Args:
        value: The option as typed or in a recipe. An existing path is a name, whatever characters it has. Names
            separated by commas, without weights, get equal weights.

    Returns:
        The name itself, or the pairs of name and weight.

    Raises:
        ConfigError: If a name is empty or a weight is missing or not a positive number.
    """
    if isinstance(value, str | os.PathLike):
        text, parts = os.fspath(value), []
        if not text.strip():
            raise ConfigError("data: got an empty dataset, expected a Hub name, a file or a folder; or leave it out.")
        if ("," not in text and "=" not in text) or os.path.exists(text):
            return text
        for part in text.split(","):
            name, equals, weight = part.rpartition("=") if "=" in text else (part, "=", "1")
            if not equals:
                raise ConfigError(f"data: got {part!r} without a weight in dataset {text!r}, expected name=weight.")
            parts.append((name.strip(), weight))
        value = parts
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    mixture: Mixture = convert(Mixture, pairs, "data: dataset")
    if not mixture or not all(name and weight > 0 for name, weight in mixture):
        raise ConfigError(f"data: got dataset {pairs!r}, expected a name, or names with weights above 0.")
    return mixture
