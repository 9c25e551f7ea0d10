"""Rows of a task's data: their fields, tokens, padding, and facts about them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linearize.core.heads import Row as Row
from linearize.core.heads import RowSet as RowSet
from linearize.core.registry import Values
from linearize.data.encode import TOKEN_FIELDS
from linearize.training.stage_two.config import DataOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label that losses ignore, and transformers' padding of predictions."""
Facts = Values
"""Facts about the rows that are needed to read the metrics (`row_facts`); windows and questions add others."""
Predictions: TypeAlias = "np.ndarray | tuple[np.ndarray, ...]"
"""Outputs, or labels, of all rows as the trainer gathers them."""
Logits: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""A model's logits for a batch, alone or followed by other outputs."""


class Outputs(Protocol):
    """A model's outputs: its loss if it was given labels, and the logits of its head."""

    loss: Tensor
    logits: Tensor


def as_dataset(rows: RowSet) -> Dataset[Row]:
    """Return rows as transformers' types ask for them; its code takes any rows by number."""
    return cast("Dataset[Row]", rows)


class Chosen:
    """Some rows of a data set.

    Args:
        rows: the data set.
        places: which of its rows, in order.
        still: whether random changes of a row (an image's crop, a masked model's masks) are turned off.
    """

    def __init__(self, rows: RowSet, places: Sequence[int], *, still: bool = False) -> None:
        self.rows, self.places, self.still = rows, [int(place) for place in places], still

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: int) -> Row:
        row = self.rows[self.places[place]]
        if not self.still:
            return row
        return {name: {"augment": False, "fixed": True}.get(name, value) for name, value in row.items()}


def by_length(rows: RowSet) -> list[int] | None:
    """Return the places of rows of text from the longest to the shortest, so that a batch has little padding.

    None for other rows.
    """
    if not isinstance(rows, list) or not rows or "input_ids" not in rows[0]:
        return None
    lengths = [max(len(row[name]) for name in row if name.endswith("input_ids")) for row in rows]
    return sorted(range(len(rows)), key=lambda place: -lengths[place])


def pad(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Pad the token fields of rows to the longest: `input_ids`, `attention_mask`, `token_type_ids`, long [B, T]."""
    names = [name for name in TOKEN_FIELDS if name in rows[0]]
    batch: dict[str, list[list[int]]] = {name: [row[name] for row in rows] for name in names}
    return dict(tokenizer.pad(batch, return_tensors="pt", verbose=False))


def pad_with_labels(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Pad the token fields of rows and their labels, one per token, to the longest row: long [B, T] each."""
    fields = pad(tokenizer, rows)
    width = fields["input_ids"].shape[1]
    labels = [[*row["labels"], *[IGNORED] * (width - len(row["labels"]))] for row in rows]
    return {**fields, "labels": torch.tensor(labels)}


def stable_seed(seed: int, *parts: object) -> int:
    """Return a seed that depends on numbers alone, and not on earlier draws, so that a resumed run draws the same."""
    value = seed
    for part in parts:
        value = zlib.crc32(np.ascontiguousarray(part, dtype=np.int64).tobytes(), value & 0xFFFFFFFF)
    return value


def row_facts(lengths: Sequence[int], options: DataOptions) -> Facts:
    """Return how many rows there are, how long they may be and are, and what share of them is cut.

    Args:
        lengths: tokens of each whole row.
        options: options of the rows.
    """
    longest = max(lengths, default=0)
    cut = sum(length > options.max_length for length in lengths)
    return {
        "rows": len(lengths),
        "max_length": min(options.max_length, longest) if options.auto_length else options.max_length,
        "longest_row": longest,
        "cut_share": round(cut / max(1, len(lengths)), 4),
    }
