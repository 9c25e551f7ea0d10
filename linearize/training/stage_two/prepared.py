"""A task's data, ready for the trainer: rows, facts about them, and rows held out for selection."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from linearize.checkpoint.fingerprint import data_digest, rows_digest
from linearize.core.errors import DataError
from linearize.data.encode import check_room
from linearize.training.stage_two.config import DataOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from linearize.training.stage_two.task_types.base import TaskType
    from linearize.training.stage_two.tasks import Task


IGNORED = -100
"""The label that losses ignore, and transformers' padding of predictions."""
TOKEN_FIELDS = ("input_ids", "attention_mask", "token_type_ids")
"""Fields of a row of text that a model reads, one number per token."""
SHARE, FEWEST, MOST, LARGEST_SHARE = 0.05, 32, 500, 0.2
"""Share of the training rows that is held out; at least 32 of them, at most 500, and never over a fifth."""
_STREAM = 0x5E1E
"""Separates the choice of held-out rows from other random numbers of the same seed."""

Row = dict[str, Any]
"""A row, by field name: numbers, lists of them, arrays, an image."""
Facts = dict[str, Any]
"""Facts about the rows that are needed to read the metrics (`row_facts`); windows and questions add others."""
Predictions: TypeAlias = "np.ndarray | tuple[np.ndarray, ...]"
"""Outputs, or labels, of all rows as the trainer gathers them."""
Logits: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""A model's logits for a batch, alone or followed by other outputs."""


class RowSet(Protocol):
    """Rows by number: a list of them, or an object that makes them."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, place: int, /) -> Row:
        """Return one row."""


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


@dataclass(frozen=True)
class TaskData:
    """A task's data set as rows.

    Attributes:
        type: the task's type, with what it read: the class names, the tokenizer.
        train: rows to train on.
        validation: rows to measure on.
        description: one line.
        facts: facts needed to read the metrics, such as the stride of a perplexity.
        selection: rows held out of the training rows, to choose the state to keep; None if not yet held out.
        extra: rows without a label (`IGNORED`, or NaN for a number) for a teacher to label: new pairs of the texts.
        options: the user's options for the rows.
        chunkable: whether the texts to measure on can be read as chunks (`DataOptions.chunks`).
    """

    type: TaskType
    train: RowSet
    validation: RowSet
    description: str
    facts: Facts = field(default_factory=dict)
    selection: RowSet | None = None
    extra: list[Row] | None = None
    options: DataOptions = field(default_factory=DataOptions)
    chunkable: bool = False

    @property
    def task(self) -> Task:
        """The task, with the class names that were found."""
        return self.type.task

    @property
    def collate(self) -> Callable[[list[Row]], dict[str, Tensor]]:
        """The function from rows to a batch of tensors."""
        return self.type.collate

    @property
    def num_labels(self) -> int | None:
        """How many outputs a head needs; None if it is the vocabulary or a span."""
        if not self.task.head.per_label:
            return None
        if self.type.numeric:
            return 1
        return None if self.task.labels is None else len(self.task.labels)

    def digest(self) -> str:
        """Return the hash of the rows, which tells whether a resumed run has the same ones."""
        parts = (self.train, self.validation, self.selection, self.extra)
        return data_digest([None if rows is None else rows_digest(rows) for rows in parts])  # type: ignore[arg-type]


def selection_size(rows: int, asked: int | None = None) -> int:
    """Return how many of `rows` training rows are held out: `asked`, or by `SHARE` and its bounds."""
    if asked is not None:
        return asked
    return max(1, min(MOST, max(round(SHARE * rows), min(FEWEST, int(LARGEST_SHARE * rows)))))


def hold_out(data: TaskData, rows: int | None = None, *, seed: int = 0) -> TaskData:
    """Move some training rows to `data.selection`, to choose the state to keep.

    The validation rows are reported, so nothing may be chosen on them. The same seed holds out the same rows, for a
    teacher and for its student. Rows of one question stay together, and rows without a label that share a text with a
    held-out row are left out.

    Args:
        data: a task's rows. Data that already has a selection is returned unchanged.
        rows: how many; None for 5 % of the training rows, 32 to 500 of them, but never over a fifth; 0 for none.
        seed: seed of the choice.

    Raises:
        DataError: if no row would be left to train on.
    """
    if data.selection is not None or rows == 0:
        return data
    total = len(data.train)
    count = selection_size(total, rows)
    if count >= total:
        raise DataError(
            f"{data.description}: got {total} rows to train on and {count} to choose the kept state on, expected more "
            "rows than that; lower selection_rows (0: choose on the validation rows)"
        )
    order = np.random.default_rng([seed, _STREAM]).permutation(total)
    held = {int(place) for place in order[:count]}
    if isinstance(data.train, list) and "owner" in data.train[0]:
        # A long text makes several rows of one question.
        owners = [row["owner"] for row in data.train]
        questions = {owners[place] for place in held}
        held = {place for place in range(total) if owners[place] in questions}
    kept = [place for place in range(total) if place not in held]
    if not kept:
        raise DataError(f"{data.description}: all rows belong to one question; add rows, or set selection_rows to 0")
    extra = None if data.extra is None else [row for row in data.extra if not held.intersection(row["sources"])]
    return replace(
        data, train=Chosen(data.train, kept), selection=Chosen(data.train, sorted(held), still=True), extra=extra
    )


def tokenise(
    tokenizer: PreTrainedTokenizerBase,
    first: Sequence[str],
    second: Sequence[str] | None = None,
    max_length: int | None = None,
) -> list[Row]:
    """Tokenise texts or pairs into rows of at most `max_length` tokens; None keeps them whole."""
    return [row for _, row in coded(tokenizer, first, second, max_length)]


def coded(
    tokenizer: PreTrainedTokenizerBase,
    first: Sequence[str],
    second: Sequence[str] | None,
    max_length: int | None,
    **options: Any,
) -> Iterator[tuple[int, Row]]:
    """Yield the rows of `tokenise`, each with the number of its text; `options` go to the tokenizer.

    Raises:
        ConfigError: if the special tokens alone are more than `max_length`.
    """
    if max_length is not None:
        check_room(tokenizer, max_length, second is not None)
    for begin in range(0, len(first), 1_000):
        fields = tokenizer(
            list(first[begin : begin + 1_000]),
            None if second is None else list(second[begin : begin + 1_000]),
            truncation=max_length is not None,
            max_length=max_length,
            return_attention_mask=True,
            verbose=False,
            **options,
        )
        names = [name for name in TOKEN_FIELDS if name in fields]
        owners = fields.get("overflow_to_sample_mapping") or range(len(fields["input_ids"]))
        for place, owner in enumerate(owners):
            yield begin + owner, {name: fields[name][place] for name in names}


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


def check_tokens(task: Task, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a text without tokens.

    Raises:
        DataError: naming its place.
    """
    around, special = tokenizer.num_special_tokens_to_add(), set(tokenizer.all_special_ids)
    for place, row in enumerate(rows):
        if len(row["input_ids"]) <= around and special.issuperset(row["input_ids"]):
            raise DataError(
                f"task {task.name}: got a text without any token (number {place} of {len(rows)}, from 0; the "
                "tokenizer drops all its characters), expected text; remove the row"
            )


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
