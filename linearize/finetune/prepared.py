"""A task's data, ready for the trainer: rows, a collator, and how predictions become metrics."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linearize.checkpoint.fingerprint import data_digest, rows_digest
from linearize.errors import ConfigError, DataError
from linearize.finetune.config import DataOptions
from linearize.finetune.task import Task

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from linearize.finetune.metrics.by_position import PositionLoss

IGNORED = -100
"""The label that no loss is taken on, and the padding that transformers' trainer puts behind predictions."""

TOKEN_FIELDS = ("input_ids", "attention_mask", "token_type_ids")
"""Fields of a row of text that a model reads, one number per token."""

Row = dict[str, Any]
"""A row by the names of its fields: numbers, lists of them, arrays, an image."""
Predictions: TypeAlias = "np.ndarray | tuple[np.ndarray, ...]"
"""Outputs, or labels, of all rows as the trainer gathers them."""
Logits: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""What a model gives for a batch; further outputs may stand behind the logits."""


class RowSet(Dataset[Row]):
    """Rows by number."""

    def __len__(self) -> int:
        raise NotImplementedError


class Rows(RowSet):
    """Rows in memory.

    Args:
        rows: dictionaries of lists and numbers.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Row:
        return self.rows[place]


class Facts(TypedDict, total=False):
    """What a reader of metrics must know of the rows: see `row_facts`; windows and questions have some of their own."""

    rows: int
    max_length: int
    longest_row: int
    cut_share: float
    chunks: int
    questions: int
    split_share: float
    context: int
    stride: int
    words: int
    mask_share: float
    left_out_share: float


@dataclass(frozen=True)
class TaskData:
    """What a task's data set became.

    Attributes:
        task: the task, with the class names that were found.
        train: rows to train on.
        validation: rows to measure on.
        collate: rows -> batch of tensors.
        compute_metrics: (predictions, labels) as the trainer gathers them -> metrics by name.
        description: one line.
        reduce: (logits, labels) -> what is kept of the logits, on the device; None: all.
        facts: what a reader of the metrics must know, such as the stride of a perplexity.
        selection: rows held out of the training rows, to choose the kept state on; None: not held out yet.
        extra: rows without a label (`IGNORED`, or NaN for a number), pairs made anew or further texts, for a teacher
            to label; None: none.
        wrap: makes what is measured of the model, where that is not the model itself; such rows cannot be tuned on.
        options: what the rows were asked to be.
        by_unit: (predictions, labels) -> metrics by name of every unit [N], where metrics are their means and a unit (a
            question) may have several rows; None: a unit is a row, and metrics are of all rows together.
        of_means: means of `by_unit` -> metrics by name, if `by_unit` gives counts; None: those means are the metrics.
        by_position: predictions -> the loss by position in the row, of causal language models; None: has no meaning.
        chunkable: whether the texts to measure on can be read as chunks (`DataOptions.chunks`).
        chance: metrics by name that guessing reaches, where these follow from the task; None: found from the labels.
    """

    task: Task
    train: RowSet
    validation: RowSet
    collate: Callable[[list[Row]], dict[str, Tensor]]
    compute_metrics: Callable[[Predictions, Predictions], dict[str, float]]
    description: str
    reduce: Callable[[Logits, Tensor], Tensor] | None = None
    facts: Facts = field(default_factory=Facts)
    selection: RowSet | None = None
    extra: Rows | None = None
    wrap: Callable[[PreTrainedModel], nn.Module] | None = None
    options: DataOptions | None = None
    by_unit: Callable[[Predictions, Predictions], dict[str, np.ndarray]] | None = None
    of_means: Callable[[Mapping[str, float]], dict[str, float]] | None = None
    by_position: Callable[[Predictions], tuple[PositionLoss, ...]] | None = None
    chunkable: bool = False
    chance: Mapping[str, float] | None = None

    def digest(self) -> str:
        """Identify the rows, see `linearize.checkpoint.fingerprint.rows_digest`."""
        parts = (self.train, self.validation, self.selection, self.extra)
        return data_digest([None if rows is None else rows_digest(rows) for rows in parts])  # type: ignore[arg-type]

    @property
    def num_labels(self) -> int | None:
        """How many outputs a head needs; None where it is the vocabulary or a span."""
        if not self.task.head.per_label:
            return None
        if self.task.type.labels == "number":
            return 1
        return None if self.task.labels is None else len(self.task.labels)


def copy_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy that can pad, behind the tokens; one without a padding token pads with its end token.

    Raises:
        ConfigError: if it is no tokenizer or has neither.
    """
    from copy import deepcopy

    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        raise ConfigError(f"got {type(tokenizer).__name__} for text, expected a tokenizer; add one to the folder")
    made = deepcopy(tokenizer)
    made.model_max_length = int(1e30)
    # Labels of tokens are filled up behind them as well, and positions count from the first place.
    made.padding_side = "right"
    if made.pad_token_id is None:
        if made.eos_token_id is None:
            raise ConfigError("got a tokenizer without a padding and an end token; set its pad_token first")
        made.pad_token = made.eos_token
    return made


def pad(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Pad the token fields of rows to the longest: `input_ids`, `attention_mask`, `token_type_ids`, long [B, T]."""
    names = [name for name in TOKEN_FIELDS if name in rows[0]]
    batch: dict[str, list[list[int]]] = {name: [row[name] for row in rows] for name in names}
    return dict(tokenizer.pad(batch, return_tensors="pt", verbose=False))


def pad_labels(rows: Sequence[Row], width: int) -> Tensor:
    """Pad per-token labels to [B, T] with `IGNORED`."""
    return torch.tensor([list(row["labels"]) + [IGNORED] * (width - len(row["labels"])) for row in rows])


def pad_with_labels(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Pad the token fields of rows and their labels, one per token, to the longest row: long [B, T] each."""
    fields = pad(tokenizer, rows)
    return {**fields, "labels": pad_labels(rows, fields["input_ids"].shape[1])}


def stable_seed(seed: int, *parts: object) -> int:
    """Make a seed from numbers alone: nothing depends on what was drawn before, so a resumed run agrees."""
    value = seed
    for part in parts:
        value = zlib.crc32(np.ascontiguousarray(part, dtype=np.int64).tobytes(), value & 0xFFFFFFFF)
    return value


def text_facts(
    tokenizer: PreTrainedTokenizerBase,
    first: Sequence[str],
    second: Sequence[str | None],
    rows: Sequence[Row],
    options: DataOptions,
) -> Facts:
    """Return what a reader of the metrics must know of rows of texts: how many, how long, and how many were cut.

    Args:
        tokenizer: what the rows were made with.
        first: their texts.
        second: the second texts of pairs; None: no pairs.
        rows: the rows.
        options: what they were asked to be.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    # Only those that fill their row can have been cut, and are tokenised again, whole.
    full = [place for place, length in enumerate(lengths) if length >= options.max_length]
    whole = tokenise(tokenizer, [first[place] for place in full], [second[place] for place in full], None)
    for place, row in zip(full, whole, strict=True):
        lengths[place] = len(row["input_ids"])
    return row_facts(lengths, options)


def check_tokens(task: Task, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a text of zero tokens, of which nothing can be read.

    Raises:
        DataError: saying which one.
    """
    for place, row in enumerate(rows):
        if not has_tokens(row, tokenizer):
            raise DataError(
                f"task {task.name}: got a text without any token (number {place} of {len(rows)}, from 0; the "
                "tokenizer drops all its characters), expected text; remove the row"
            )


def has_tokens(row: Row, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a row has a token beside those that the tokenizer puts around every text."""
    found = row["input_ids"]
    return len(found) > tokenizer.num_special_tokens_to_add() or bool(set(found) - set(tokenizer.all_special_ids))


def row_facts(lengths: Sequence[int], options: DataOptions) -> Facts:
    """Return how many rows there are, how long they may be and are, and which share of them is cut.

    Args:
        lengths: tokens of each whole row.
        options: what the rows were asked to be.
    """
    longest = max(lengths, default=0)
    cut = sum(length > options.max_length for length in lengths)
    return {
        "rows": len(lengths),
        "max_length": min(options.max_length, longest) if options.auto_length else options.max_length,
        "longest_row": longest,
        "cut_share": round(cut / max(1, len(lengths)), 4),
    }


def tokenise(
    tokenizer: PreTrainedTokenizerBase, first: Sequence[str], second: Sequence[str | None], max_length: int | None
) -> list[Row]:
    """Tokenise texts or pairs into rows of at most `max_length` tokens; None: whole."""
    rows: list[Row] = []
    for begin in range(0, len(first), 1_000):
        pairs = second[begin : begin + 1_000]
        fields = tokenizer(
            list(first[begin : begin + 1_000]),
            list(pairs) if pairs[0] is not None else None,
            truncation=max_length is not None,
            max_length=max_length,
            return_attention_mask=True,
            verbose=False,
        )
        names = [name for name in TOKEN_FIELDS if name in fields]
        rows += [
            dict(zip(names, values, strict=True)) for values in zip(*(fields[name] for name in names), strict=True)
        ]
    return rows
