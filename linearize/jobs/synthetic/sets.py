"""The data sets that are made here, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from linearize.core.errors import DataError, UnknownNameError, unknown_name
from linearize.core.options import make as make_config
from linearize.jobs.synthetic import MadeSet
from linearize.jobs.synthetic.sequences import AssociativeRecall, ListOps, Pathfinder, Pixels
from linearize.jobs.synthetic.texts import Articles, Documents, Halves, Released

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

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
    return Made(tables, maker.tokenizer(), f"{description}: {counts}")


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
