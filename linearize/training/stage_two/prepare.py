"""Make a task's rows: to train on, to measure on, and to choose the state to keep."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np

from linearize.core.errors import ConfigError, DataError
from linearize.core.heads import Processor
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.load import task_of_head
from linearize.training.stage_two.rows import Chosen
from linearize.training.stage_two.splits import Given, located
from linearize.training.stage_two.task_types.base import TaskData, TaskType
from linearize.training.stage_two.tasks import Task

SHARE, FEWEST, MOST, LARGEST_SHARE = 0.05, 32, 500, 0.2
"""Share of the training rows that is held out; at least 32 of them, at most 500, and never over a fifth."""
_STREAM = 0x5E1E
"""Separates the choice of held-out rows from other random numbers of the same seed."""


def prepare(
    task: Task,
    processor: Processor,
    options: DataOptions | None = None,
    *,
    data: Given | None = None,
    head_of: str | None = None,
) -> TaskData:
    """Open a task's data set and make its rows, to train on and to measure on.

    Args:
        task: the task, from `linearize.training.stage_two.tasks.task`.
        processor: the model's tokenizer or image processor; it is not changed.
        options: lengths, limits and seeds.
        data: data to read instead of the task's Hub data set: a Hub name, a file, a folder, a folder of data sets with
            one folder per task, or tables by the name of their split.
        head_of: checkpoint whose trained head decides whether rows have several labels; by default the data decides,
            which then has lists of them.

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
    task = task if head_of is None else task_of_head(head_of, task)
    reads = cast("type[TaskType]", task.type)
    return reads(task, processor, options).prepare(located(task, given))


def check_extra_pairs(task: Task, options: DataOptions) -> None:
    """Refuse new pairs for a task whose rows do not each have one label that a teacher can give.

    Raises:
        ConfigError: naming the option.
    """
    if options.extra_pairs and not task.type.row_labels:
        raise ConfigError(f"data, extra_pairs: got {options.extra_pairs}, but task {task.name} reads no pairs; drop it")


def selection_size(rows: int) -> int:
    """Return how many of `rows` training rows are held out unless the user says so: by `SHARE` and its bounds."""
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
    count = selection_size(total) if rows is None else rows
    if count >= total:
        raise DataError(
            f"{data.description}: got {total} rows to train on and {count} to choose the kept state on, expected more "
            "rows than that; lower selection_rows (0: choose on the validation rows)"
        )
    order = np.random.default_rng([seed, _STREAM]).permutation(total)
    held = set(order[:count].tolist())
    if isinstance(data.train, list) and "owner" in data.train[0]:
        # A long text makes several rows of one question.
        owners = np.array([row["owner"] for row in data.train])
        held = set()
        for place in order:
            if len(held) >= count:
                break
            held.update(np.flatnonzero(owners == owners[place]).tolist())
    kept = [place for place in range(total) if place not in held]
    if not kept:
        raise DataError(f"{data.description}: all rows belong to one question; add rows, or set selection_rows to 0")
    extra = None if data.extra is None else [row for row in data.extra if not held.intersection(row["sources"])]
    return dataclasses.replace(
        data, train=Chosen(data.train, kept), selection=Chosen(data.train, sorted(held), still=True), extra=extra
    )
