"""What a user may say about the data: one frozen dataclass, with its help texts beside the fields."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from linearize.errors import ConfigError

Mixture = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class DataConfig:
    """Where the examples come from and how they become batches.

    Raises:
        ConfigError: On construction, if a value is out of range or two options exclude each other.
    """

    dataset: str | Mixture | None = field(
        default=None,
        metadata={
            "help": "Hub name, Hub name:config, local file or folder; several as 'a.jsonl=0.7,b.txt=0.3'. "
            "Without it: a stated Hub data set, or built-in data where the Hub is out of reach."
        },
    )
    split: str = field(
        default="train",
        metadata={"help": "Split to read from a Hub data set or a folder; a single local file is read whole."},
    )
    text_column: str | None = field(
        default=None,
        metadata={"help": "Column of the text, or a pair's two as A,B; found by name when not given."},
    )
    text_pair_column: str | None = field(
        default=None, metadata={"help": "Column of the second text, for models that read pairs."}
    )
    image_column: str | None = field(
        default=None, metadata={"help": "Column of the image; found by its type when not given."}
    )
    label_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of the label, which batches then carry; "
            "for image folders any name makes the class folders the labels."
        },
    )
    extra_pairs: float = field(
        default=0.0, metadata={"help": "Texts of pairs paired anew, per training pair; half of them share words."}
    )
    max_length: int = field(default=128, metadata={"help": "Tokens per row; longer texts are cut."})
    batch_size: int = field(default=32, metadata={"help": "Examples per batch and process."})
    seed: int = field(default=0, metadata={"help": "Seed of the held-out choice, the order and the built-in crops."})
    holdout: int = field(
        default=64,
        metadata={"help": "Examples set aside first, to measure on; never trained on, nor are their doubles."},
    )
    packing: bool = field(
        default=False, metadata={"help": "Join texts into rows of exactly max_length tokens (causal language models)."}
    )
    bucketing: bool = field(default=False, metadata={"help": "Put texts of similar length in one batch, to pad less."})
    streaming: bool = field(
        default=False, metadata={"help": "Read while training instead of loading first; for very large sets."}
    )
    limit: int | None = field(
        default=None, metadata={"help": "Train on at most this many examples; the held-out ones come on top."}
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", _as_dataset(self.dataset))
        self._part_columns()
        for name, least in (("max_length", 1), ("batch_size", 1), ("seed", 0), ("holdout", 0)):
            _check_int(name, getattr(self, name), least)
        if self.limit is not None:
            _check_int("limit", self.limit, 1)
        for name in ("packing", "bucketing", "streaming"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"data: got {name} {getattr(self, name)!r}, expected true or false.")
        for name in ("text_column", "text_pair_column", "image_column", "label_column"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"data: got {name} {value!r}, expected a column name; leave it out to have none.")
        if not isinstance(self.split, str) or not self.split:
            raise ConfigError(f"data: got split {self.split!r}, expected a name such as 'train'.")
        for name in ("text_pair_column", "label_column"):
            if self.packing and getattr(self, name):
                raise ConfigError(f"data: got packing together with {name}, expected one of them; drop packing.")
        self._check_pairs()

    def _part_columns(self) -> None:
        """Read `A,B` as the columns of a pair."""
        if not isinstance(self.text_column, str) or "," not in self.text_column:
            return
        columns = [name.strip() for name in self.text_column.split(",")]
        if len(columns) != 2 or not all(columns) or self.text_pair_column is not None:
            raise ConfigError(f"data: got text_column {self.text_column!r}, expected one name, or two with a comma.")
        object.__setattr__(self, "text_column", columns[0])
        object.__setattr__(self, "text_pair_column", columns[1])

    def _check_pairs(self) -> None:
        extra = self.extra_pairs
        if isinstance(extra, bool) or not isinstance(extra, int | float) or not 0 <= extra <= 100:
            raise ConfigError(f"data: got extra_pairs {extra!r}, expected a number from 0 to 100.")
        for name in ("packing", "streaming", "label_column"):
            if extra and getattr(self, name):
                raise ConfigError(f"data: got extra_pairs together with {name}, expected one of them; drop one.")

    @property
    def finds_pairs(self) -> bool:
        """Whether the two columns of a pair are looked for: no column is named, and texts are not packed."""
        return self.text_column is None and self.text_pair_column is None and not self.packing

    @property
    def sources(self) -> Mixture:
        """The data sets with their weights; one of weight 1 for a plain name, none for the built-in data."""
        if self.dataset is None:
            return ()
        return ((self.dataset, 1.0),) if isinstance(self.dataset, str) else self.dataset


def parse_mixture(text: str) -> str | Mixture:
    """Read ``"name"`` or ``"name=weight,name=weight"``.

    Args:
        text: What was given on a command line or in a recipe. A path that exists is taken as it stands, whatever
            characters it holds. Names with commas between them and no weights weigh the same.

    Returns:
        The name itself, or the pairs of name and weight.

    Raises:
        ConfigError: If a name is empty or a weight is missing or not a positive number.
    """
    if not text.strip():
        raise ConfigError("data: got an empty dataset, expected a Hub name, a file or a folder; leave it out for none.")
    if ("," not in text and "=" not in text) or os.path.exists(text):
        return text
    parts = [part.strip() for part in text.split(",")]
    weighted = "=" in text
    pairs = []
    for part in parts:
        name, equals, weight = part.rpartition("=") if weighted else (part, "=", "1")
        if not equals:
            raise ConfigError(f"data: got {part!r} without a weight in dataset {text!r}, expected name=weight.")
        pairs.append((name.strip(), _weight(name, weight)))
    return tuple(pairs)


def _as_dataset(value: Any) -> str | Mixture | None:
    """Bring a string, a mapping or a list of pairs (as YAML has them) to the field's own type."""
    if value is None:
        return None
    if isinstance(value, str | os.PathLike):
        # Also what parse_mixture returns is checked below: "=0.5" has an empty name.
        value = parse_mixture(os.fspath(value))
        if isinstance(value, str):
            return value
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    shaped = isinstance(pairs, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    )
    if not shaped or not pairs:
        raise ConfigError(f"data: got dataset {value!r}, expected a name or pairs of name and weight.")
    if not all(isinstance(name, str) and name for name, _ in pairs):
        raise ConfigError(f"data: got dataset {value!r}, expected a name beside every weight.")
    return tuple((name, _weight(name, weight)) for name, weight in pairs)


def _weight(name: str, value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ConfigError(f"data: got weight {value!r} for data set {name!r}, expected a number above 0.")
    return weight


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"data: got {name} {value!r}, expected a whole number of at least {least}.")
