"""A task's data as rows: its splits, rows to measure on and to choose on, and what a reader must know of them."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from linearize.checkpoint.fingerprint import data_digest, rows_digest
from linearize.core.errors import ConfigError, DataError
from linearize.data.columns import class_names, column_kinds, uniform
from linearize.data.config import DataConfig
from linearize.data.feeds import StreamPart
from linearize.data.hub import cause, load_hub
from linearize.data.images import ImageTable
from linearize.data.load import open_local, open_records
from linearize.data.local import exists, looks_local
from linearize.data.records import Example, Records, TextRecords
from linearize.training.stage_two.config import DataOptions

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from linearize.core.heads import Processor
    from linearize.training.stage_two.task_types.base import TaskType
    from linearize.training.stage_two.tasks import Task

IGNORED = -100
"""The label that no loss is taken on, and transformers' padding of predictions."""
TOKEN_FIELDS = ("input_ids", "attention_mask", "token_type_ids")
"""Fields of a row of text that a model reads, one number per token."""
SHARE, FEWEST, MOST, LARGEST_SHARE = 0.05, 32, 500, 0.2
"""Share of the training rows that is held out; at least 32 of them, at most 500, and never over a fifth."""
_STREAM = 0x5E1E
"""Separates the choice of held-out rows from other random numbers of the same seed."""

Row = dict[str, Any]
"""A row by the names of its fields: numbers, lists of them, arrays, an image."""
Facts = dict[str, Any]
"""What a reader of metrics must know of the rows by name, see `row_facts`; windows and questions add others."""
Predictions: TypeAlias = "np.ndarray | tuple[np.ndarray, ...]"
"""Outputs, or labels, of all rows as the trainer gathers them."""
Logits: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""A model's logits for a batch, alone or followed by other outputs."""


class RowSet(Protocol):
    """Rows by number: a list of them, or an object that makes them."""

    def __len__(self) -> int:
        """Return how many there are."""

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


@dataclass(frozen=True)
class TaskData:
    """A task's data set as rows.

    Attributes:
        type: of the task, with what it read: the class names, the tokenizer.
        train: rows to train on.
        validation: rows to measure on.
        description: one line.
        facts: what a reader of the metrics must know, such as the stride of a perplexity.
        selection: rows held out of the training rows, to choose the kept state on; None: not held out yet.
        extra: rows without a label (`IGNORED`, or NaN for a number) for a teacher to label: new pairs of the texts.
        options: the user's options of the rows.
        chunkable: whether the texts to measure on can be read as chunks (`DataOptions.chunks`).
    """

    type: TaskType
    train: RowSet
    validation: RowSet
    description: str
    facts: Facts = field(default_factory=dict)
    selection: RowSet | None = None
    extra: list[Row] | None = None
    options: DataOptions | None = None
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
        """Return the hash of the rows, by which a resumed run recognises them."""
        parts = (self.train, self.validation, self.selection, self.extra)
        return data_digest([None if rows is None else rows_digest(rows) for rows in parts])  # type: ignore[arg-type]


def selection_size(rows: int, asked: int | None = None) -> int:
    """Return how many of `rows` training rows are held out: `asked`, or by `SHARE` and its bounds."""
    if asked is not None:
        return asked
    return max(1, min(MOST, max(round(SHARE * rows), min(FEWEST, int(LARGEST_SHARE * rows)))))


def hold_out(data: TaskData, rows: int | None = None, *, seed: int = 0) -> TaskData:
    """Move some training rows to `data.selection`, to choose the kept state on.

    The validation rows are reported, so nothing may be chosen on them. The same seed holds out the same rows, for a
    teacher and for its student. Rows of one question stay together, and rows without a label that share a text with a
    held-out row are left out.

    Args:
        data: a task's rows. Data that has a selection already is returned unchanged.
        rows: how many; None: 5 % of the training rows, 32 to 500 of them, but never over a fifth; 0: none.
        seed: of the choice.

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
    extra = data.extra
    if extra is not None:
        extra = [row for row in extra if not held.intersection(row["sources"])]
    return replace(
        data, train=Chosen(data.train, kept), selection=Chosen(data.train, sorted(held), still=True), extra=extra
    )


def copy_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy that pads after the tokens, with its end token if it has no padding token.

    Raises:
        ConfigError: if it is no tokenizer or has neither token.
    """
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        raise ConfigError(f"got {type(tokenizer).__name__} for text, expected a tokenizer; add one to the folder")
    copied = copy.deepcopy(tokenizer)
    copied.model_max_length = int(1e30)
    # Labels of tokens are padded on the right as well, and positions count from the first place.
    copied.padding_side = "right"
    if copied.pad_token_id is None:
        if copied.eos_token_id is None:
            raise ConfigError("got a tokenizer without a padding and an end token; set its pad_token first")
        copied.pad_token = copied.eos_token
    return copied


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


def text_facts(
    tokenizer: PreTrainedTokenizerBase,
    first: Sequence[str],
    second: Sequence[str | None],
    rows: Sequence[Row],
    options: DataOptions,
) -> Facts:
    """Return how many rows of text there are, how long they are, and which share of them was cut.

    Args:
        tokenizer: what the rows were made with.
        first: their texts.
        second: the second texts of pairs; None: no pairs.
        rows: the rows.
        options: their options.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    # Only rows that are full can have been cut; they are tokenised again, whole.
    full = [place for place, length in enumerate(lengths) if length >= options.max_length]
    whole = tokenise(tokenizer, [first[place] for place in full], [second[place] for place in full], None)
    for place, row in zip(full, whole, strict=True):
        lengths[place] = len(row["input_ids"])
    return row_facts(lengths, options)


def row_facts(lengths: Sequence[int], options: DataOptions) -> Facts:
    """Return how many rows there are, how long they may be and are, and which share of them is cut.

    Args:
        lengths: tokens of each whole row.
        options: of the rows.
    """
    longest = max(lengths, default=0)
    cut = sum(length > options.max_length for length in lengths)
    return {
        "rows": len(lengths),
        "max_length": min(options.max_length, longest) if options.auto_length else options.max_length,
        "longest_row": longest,
        "cut_share": round(cut / max(1, len(lengths)), 4),
    }


HELD_OUT = 0.1
"""Share of the training rows to measure on if a data set has no split for it."""
MOST_HELD_OUT = 1_000
_NO_SPLIT = "no-such-split"

Given: TypeAlias = "str | Mapping[str, Dataset]"
"""A data set by name or path, or tables (`datasets.Dataset`) by the name of their split."""


def prepare(
    task: Task, processor: Processor, options: DataOptions | None = None, *, data: Given | None = None
) -> TaskData:
    """Open a task's data set and make its rows, to train on and to measure on.

    Args:
        task: what to read, from `linearize.training.stage_two.tasks.task`.
        processor: the model's tokenizer or image processor; it is not changed.
        options: lengths, limits and seeds.
        data: what to read instead of the task's Hub data set: a Hub name, a file, a folder, a folder of data sets with
            one folder per task, or tables by the name of their split.

    Raises:
        DataError: if there is no data, or it does not fit the task.
        ConfigError: if the options do not fit the task.
    """
    options = options or DataOptions()
    check_extra_pairs(task, options)
    given = task.dataset if data is None else data
    if given is None:
        raise DataError(f"task {task.name} has no data set; name one (--dataset NAME_OR_PATH)")
    if given == "":
        raise DataError("data: got an empty data set name, expected a Hub name, a file or a folder")
    return dataclasses.replace(task.type(task, processor, options).prepare(located(task, given)), options=options)


def check_extra_pairs(task: Task, options: DataOptions) -> None:
    """Refuse new pairs if the task's rows do not have one label each for a teacher to give.

    Raises:
        ConfigError: naming the option.
    """
    if options.extra_pairs and not task.type.row_labels:
        raise ConfigError(
            f"data, extra_pairs: got {options.extra_pairs!r}, but task {task.name} reads no pairs; drop it"
        )


def located(task: Task, given: Given) -> Given:
    """Return the task's own folder if a folder of data sets is given; anything else unchanged.

    Raises:
        DataError: if a path does not exist, or the folder lacks the task's.
    """
    if not isinstance(given, str):
        return given
    root = Path(given).expanduser()
    if not exists(root):
        if looks_local(given):
            raise DataError(f"data: got {given!r}, which does not exist, expected a file or a folder; check the path")
        return given
    if not root.is_dir():
        return given
    for name in (*task.folders, task.name):
        if exists(root / name):
            return str(root / name)
    if task.folders and not _holds_data(root):
        raise DataError(
            f"data: {given!r} has no folder {task.folders[0]!r} for task {task.name}, expected one with files such as "
            "train.jsonl.gz and validation.jsonl.gz; add it or leave the task out"
        )
    return given


@dataclass(frozen=True)
class View:
    """Some rows of records, in order.

    Attributes:
        records: the data set.
        rows: [N] their numbers.
    """

    records: Records
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, places: Sequence[int]) -> list[Example]:
        """Return the examples at these places."""
        return self.records.fetch([int(self.rows[place]) for place in places])

    def select(self, places: np.ndarray) -> View:
        """Return the view of the rows at these places."""
        return View(self.records, self.rows[places])


class Splits(NamedTuple):
    """What to train on and what to measure on: two `View`s, or two `datasets.Dataset`s if raw."""

    train: Any
    validation: Any
    description: str


def open_splits(
    task: Task, given: Given, *, limit: int | None, seed: int, raw: bool = False, most: int | None = None
) -> Splits:
    """Open the training and the validation split of a data set.

    Args:
        task: names the columns and the splits.
        given: data set.
        limit: only so many training rows.
        seed: of the choice of held-out rows if there is no split to measure on.
        raw: whether to return the tables unchanged, with all their columns.
        most: only so many rows to measure on.

    Returns:
        Both splits. Of a data set without splits, a tenth of the rows (at most 1,000) is set aside to measure on.

    Raises:
        DataError: if the data or a column is missing, cannot be read, or is empty.
    """
    called = given if isinstance(given, str) else "tables"
    open_split: Any = raw_table if raw else lambda given, split: _view(task, given, split)
    train = open_split(given, task.train)
    name = _validation_split(task, given)
    if name is None:
        order = np.random.default_rng(seed).permutation(len(train))
        count = min(MOST_HELD_OUT, max(1, round(HELD_OUT * len(train))))
        if len(train) < 2:
            raise DataError(f"{called}: got {len(train)} row, expected at least two, to train and to measure on")
        kept, held = np.sort(order[count:]), np.sort(order[:count])
        train, validation = train.select(kept), train.select(held)
        where = f"{count:,} held-out rows, as it has no validation split"
    else:
        validation = open_split(given, name)
        where = f"{len(validation):,} rows of split {name}"
    if most is not None and most < len(validation):
        validation = validation.select(_some(task, len(validation), most))
        where = f"{most:,} of {where}"
    if limit is not None and limit < len(train):
        train = train.select(_some(task, len(train), limit))
    skipped = sum({id(part.records): part.records.skipped for part in (train, validation) if not raw}.values())
    left_out = f"; {skipped:,} blank or unlabelled left out" if skipped else ""
    return Splits(train, validation, f"{called}: {len(train):,} rows to train on, measured on {where}{left_out}")


def _some(task: Task, rows: int, count: int) -> np.ndarray:
    """Choose rows [count]: the first ones of texts; of images evenly, as they are often sorted by class."""
    if task.modality == "text":
        return np.arange(count)
    return np.linspace(0, rows - 1, count).round().astype(np.int64)


def _holds_data(root: Path) -> bool:
    try:
        return any(file.is_file() and file.suffix.lower() not in (".md", "") for file in root.iterdir())
    except OSError as error:
        raise DataError(
            f"data: cannot read folder {root.name!r}: {cause(error)}; expected one that may be read; check it"
        ) from error


def raw_table(given: Given, split: str) -> Dataset:
    """Open one split as a `datasets.Dataset` with all its columns.

    Raises:
        DataError: if it cannot be found or read, or has files of different kinds.
    """
    if not isinstance(given, str):
        if split not in given:
            raise DataError(f"tables: got splits {', '.join(sorted(given))}, expected {split!r} among them")
        return given[split]
    path = Path(given).expanduser()
    if not exists(path) and not looks_local(given):
        return load_hub(given, split, False)
    tables: Sequence[Dataset] = open_local(path, split, "text", False)
    if len(tables) > 1:
        raise DataError(f"{given!r}: got files of {len(tables)} kinds, expected one kind; put them in separate folders")
    return tables[0]


def _view(task: Task, given: Given, split: str) -> View:
    """Open a split with the task's columns."""
    first, second = (*task.columns, None, None)[:2]
    if task.modality == "image":
        # The column of an image data set differs between Hub and folder; it is found by its type.
        first = second = None
    if isinstance(given, str):
        config = DataConfig(split=split, text_column=first, text_pair_column=second, label_column=task.label)
        data = open_records(given, config, task.modality).data
        # It is not streamed: the config does not ask for that.
        assert not isinstance(data, StreamPart)
    else:
        config = DataConfig(split=task.train, text_column=first, text_pair_column=second, label_column=task.label)
        table = uniform(raw_table(given, split), config, task.modality, "table")
        names = class_names(table, "table")
        data = TextRecords(table, names) if task.modality == "text" else ImageTable(table, names)
    return View(data, np.arange(len(data.sizes)))


def _validation_split(task: Task, given: Given) -> str | None:
    """Return the split to measure on; None if the data set has none of the task's, or no splits at all.

    Raises:
        DataError: if the user named the split and it is missing, listing the existing ones.
    """
    wanted = task.validation[0]
    if not isinstance(given, str):
        found = next((name for name in task.validation if name in given), None)
        if found is None and task.exact_validation:
            raise DataError(f"tables: got split {wanted!r}, expected one of: {', '.join(sorted(given))}")
        return found
    path = Path(given).expanduser()
    if not exists(path) and not looks_local(given):
        for name in task.validation:
            try:
                load_hub(given, name, False)
                return name
            except DataError:
                # The training split was opened before, so the Hub answers: this split does not exist.
                if task.exact_validation:
                    raise
        return None
    if not (path.is_dir() or path.suffix == ".zip") or _opens(path, _NO_SPLIT, task):
        if task.exact_validation:
            raise DataError(
                f"{given!r}: got split {wanted!r}, but the data has no splits, expected none to be named; "
                "leave it out, to measure on held-out rows"
            )
        return None
    found = next((name for name in task.validation if _opens(path, name, task)), None)
    if found is None and task.exact_validation:
        # Opened for its message, which lists the existing splits.
        open_local(path, wanted, task.modality, False)
    return found


def _opens(path: Path, split: str, task: Task) -> bool:
    try:
        open_local(path, split, task.modality, False)
    except DataError as error:
        if "got split" in str(error):
            return False
        raise
    return True


def need_columns(table: Dataset, names: Sequence[str], origin: str, kind: str | None = None) -> None:
    """Refuse a raw table that lacks a column, or whose column does not hold what it should.

    Raises:
        DataError: naming the existing columns.
    """
    kinds = column_kinds(table, origin)
    missing = [name for name in names if name not in kinds]
    if missing:
        raise DataError(f"{origin}: got no column {missing[0]!r}, expected it among its columns: {', '.join(kinds)}")
    odd = [name for name in names if kind is not None and kinds[name] != kind]
    if odd:
        raise DataError(
            f"{origin}: got {kinds[odd[0]]} in column {odd[0]!r}, expected {kind}; repair it or name another"
        )
