"""Open a task's data set: its splits, with rows to measure on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from linearize.core.errors import DataError
from linearize.core.parsing import user_path
from linearize.data.columns import column_kinds
from linearize.data.config import DataConfig
from linearize.data.hub import cause, load_hub
from linearize.data.load import make_part, open_records
from linearize.data.local import exists, looks_local, missing_split, open_local, splits_of
from linearize.data.records import Example, Records
from linearize.data.source import without_doubles
from linearize.training.stage_two.config import DataOptions

if TYPE_CHECKING:
    from datasets import Dataset

    from linearize.training.stage_two.tasks import Task

HELD_OUT = 0.1
"""Share of the training rows to measure on if a data set has no split for it."""
MOST_HELD_OUT = 1_000
NO_SPLIT = "held-out rows, as it has no validation split"
"""What the description says of rows to measure on that a seed chose among the training rows."""

Given: TypeAlias = "str | Mapping[str, Dataset]"
"""A data set by name or path, or tables (`datasets.Dataset`) by the name of their split."""


def located(task: Task, given: Given) -> Given:
    """Return the task's own folder if a folder of data sets is given; anything else unchanged.

    Raises:
        DataError: if a path does not exist, or the folder has no folder for the task.
    """
    if not isinstance(given, str):
        return given
    root = user_path(given)
    if not exists(root):
        if looks_local(given) or given.count("/") > 1:
            raise DataError(f"data: got {given!r}, which does not exist, expected a file or a folder; check the path")
        return given
    if not root.is_dir():
        return given
    for name in (*task.folders, task.name):
        if exists(root / name):
            return str(root / name)
    try:
        files = [file for file in root.iterdir() if file.is_file()] if task.folders else []
    except OSError as error:
        raise DataError(f"data: cannot read folder {root.name!r}: {cause(error)}; expected a readable one") from error
    if task.folders and all(file.suffix.lower() in (".md", "") for file in files):
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
        rows: [N] numbers of the rows.
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
    """Rows to train on and rows to measure on: two `View`s, or two `datasets.Dataset`s if raw."""

    train: Any
    validation: Any
    description: str


def open_splits(task: Task, given: Given, options: DataOptions, *, raw: bool = False) -> Splits:
    """Open the training and the validation split of a data set.

    Args:
        task: names the columns and the splits.
        given: data set.
        options: limits of both splits, and the seed for the choice of held-out rows if there is no split to measure on.
        raw: whether to return the tables unchanged, with all their columns.

    Returns:
        Both splits. Without a split to measure on, a tenth of the training rows (at most 1,000) is set aside for it.

    Raises:
        DataError: if the data or a column is missing, cannot be read, or is empty.
    """
    called = given if isinstance(given, str) else "tables"
    open_split: Any = raw_table if raw else partial(_view, task)
    alone = False
    if not options.trains:
        # Measuring needs no rows to train on, if tables or a folder have only a split to measure on.
        path = user_path(given) if isinstance(given, str) else None
        names = set(given) if path is None else set(splits_of(path)) if path.is_dir() else set()
        can_measure = bool(names & {*task.validation}) or (bool(names) and task.exact_validation)
        alone = can_measure and task.train not in names
    train: Any = None if alone else open_split(given, task.train)
    name = _validation_split(task, given)
    if name is None:
        order = np.random.default_rng(options.seed).permutation(len(train))
        count = min(MOST_HELD_OUT, max(1, round(HELD_OUT * len(train))))
        if len(train) < 2:
            raise DataError(f"{called}: got {len(train)} row, expected at least two, to train and to measure on")
        kept, held = np.sort(order[count:]), np.sort(order[:count])
        where = f"{count:,} {NO_SPLIT}"
        if not raw:
            # Tables may repeat rows on purpose, so they are counted, not dropped: the score is then too good.
            records: Records = train.records
            known, sizes = set(records.digests(held.tolist())), np.unique(records.sizes[held])
            doubles = len(kept) - len(without_doubles(records, kept, known, sizes))
            where += f" ({doubles:,} rows to train on have the same text or image as one of them)" if doubles else ""
        train, validation = train.select(kept), train.select(held)
    else:
        validation = open_split(given, name)
        where = f"{len(validation):,} rows of split {name}"
    most = options.validation_limit
    if most is not None and most < len(validation):
        validation = validation.select(_some(task, len(validation), most))
        where = f"{most:,} of {where}"
    train = validation if alone else train
    if not len(train) or not len(validation):
        raise DataError(f"{called}: got a split without rows, expected at least one; check the file or the split")
    if options.limit is not None and options.limit < len(train):
        train = train.select(_some(task, len(train), options.limit))
    skipped = sum({id(part.records): part.records.skipped for part in (train, validation) if not raw}.values())
    left_out = f"; {skipped:,} blank or unlabelled left out" if skipped else ""
    trained = "" if alone else f"{len(train):,} rows to train on, "
    return Splits(train, validation, f"{called}: {trained}measured on {where}{left_out}")


def _some(task: Task, rows: int, count: int) -> np.ndarray:
    """Choose rows [count]: the first ones of texts; evenly spread ones of images, which are often sorted."""
    if task.modality == "text":
        return np.arange(count)
    return np.linspace(0, rows - 1, count).round().astype(np.int64)


def raw_table(given: Given, split: str) -> Dataset:
    """Open one split as a `datasets.Dataset` with all its columns.

    Raises:
        DataError: if it cannot be found or read, or has files of different kinds.
    """
    if not isinstance(given, str):
        if split not in given:
            raise missing_split("tables", split, given)
        return given[split]
    path = user_path(given)
    if not exists(path) and not looks_local(given):
        return load_hub(given, split)
    tables: Sequence[Dataset] = open_local(path, split, "text")
    if len(tables) > 1:
        raise DataError(f"{given!r}: got files of {len(tables)} kinds, expected one kind; put them in separate folders")
    return tables[0]


def _view(task: Task, given: Given, split: str) -> View:
    """Open a split with the task's columns."""
    # The column of an image data set differs between Hub and folder; it is found by its type.
    columns = task.columns if task.modality == "text" else ()
    first, second = (*columns, None, None)[:2]
    config = DataConfig(split=split, text_column=first, text_pair_column=second)
    if isinstance(given, str):
        records, _ = open_records(given, config, task.modality, label=task.label)
    else:
        records, _ = make_part([raw_table(given, split)], config, task.modality, "table", label=task.label)
    if records.lists and task.several_kind is None:
        raise DataError(
            f"task {task.name}: got lists in label column {task.label!r}, expected one label per row; name another "
            "column (--label-column), or use task text-classification or image-classification"
        )
    return View(records, np.arange(len(records.sizes)))


def _validation_split(task: Task, given: Given) -> str | None:
    """Return the split to measure on; None if the data set has no split that the task names.

    Raises:
        DataError: if the user named the split and it is missing, listing the existing ones.
    """
    wanted = task.validation[0]
    path = user_path(given) if isinstance(given, str) else None
    if path is not None and not exists(path) and not looks_local(str(given)):
        for name in task.validation:
            try:
                load_hub(str(given), name)
                return name
            except DataError:
                # The training split was opened before, so the Hub answers: this split does not exist.
                if task.exact_validation:
                    raise
        return None
    names = sorted(given) if path is None else splits_of(path)
    chosen = next((name for name in task.validation if name in names), None)
    if chosen is None and task.exact_validation:
        if not names:
            raise DataError(
                f"{given!r}: got split {wanted!r}, but the data has no splits, expected no split name; "
                "leave it out, to measure on held-out rows"
            )
        raise missing_split("tables" if path is None else repr(path.name), wanted, names)
    return chosen


def need_columns(tables: Splits, names: Sequence[str], origin: str, kind: str | None = None) -> None:
    """Refuse raw tables that lack a column, or whose column holds something else.

    Raises:
        DataError: naming the existing columns.
    """
    for kinds in map(column_kinds, (tables.train, tables.validation)):
        for name in names:
            if name not in kinds:
                raise DataError(f"{origin}: got no column {name!r}, expected it among its columns: {', '.join(kinds)}")
            if kind not in (None, kinds[name]):
                raise DataError(f"{origin}: got {kinds[name]} in column {name!r}, expected {kind}; name another column")
