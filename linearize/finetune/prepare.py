"""Open a task's data set by the type of the task."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING

from linearize.errors import ConfigError, DataError
from linearize.finetune.extra_texts import texts_at
from linearize.finetune.prepared import DataOptions, TaskData
from linearize.finetune.tables import Given, local_folder
from linearize.finetune.task import Task

if TYPE_CHECKING:
    from linearize.types import Processor


def prepare(
    task: Task, processor: Processor, options: DataOptions | None = None, *, data: Given | None = None
) -> TaskData:
    """Open a task's data set and make it ready for training and measuring.

    Args:
        task: see `linearize.finetune.tasks.task`.
        processor: the model's tokenizer or image processor; it is not changed.
        options: lengths, limits and seeds.
        data: what to read instead of the task's own Hub data set: a Hub name, a file, a folder, a folder of data sets
            with one folder per task, or tables by the name of their split.

    Raises:
        DataError: if there is no data, or it does not fit the task.
        ConfigError: if the options do not fit the task.
    """
    options = options or DataOptions()
    check_unlabelled(task, options)
    given = task.dataset if data is None else data
    if given is None:
        raise DataError(f"task {task.name} has no data set of its own; name one (--dataset NAME_OR_PATH)")
    if given == "":
        raise DataError("data: got an empty data set name, expected a Hub name, a file or a folder")
    # The options keep the names as they were given: where the data lies may be another place for a continuation.
    texts = tuple((texts_at(name, given), share) for name, share in options.text_sources)
    rows = dataclasses.replace(options, extra_texts=texts) if texts else options
    given = located(task, given)
    module = importlib.import_module(task.type.module)
    return dataclasses.replace(module.prepare(task, given, processor, rows), options=options)


def check_unlabelled(task: Task, options: DataOptions) -> None:
    """Refuse rows without a label beside a task's own where its rows have no one label for a teacher to give.

    Raises:
        ConfigError: naming the option.
    """
    if options.unlabelled and not task.type.unlabelled:
        name = options.unlabelled[0]
        reads = "reads no pairs" if name == "extra_pairs" else "reads no texts with a class or a number each"
        raise ConfigError(f"data, {name}: got {getattr(options, name)!r}, but task {task.name} {reads}; drop it")


def located(task: Task, given: Given) -> Given:
    """Return the task's own folder where a folder of data sets is named; anything else as it is.

    Raises:
        DataError: if a path does not exist, or the folder lacks the task's.
    """
    return local_folder(task, given) if isinstance(given, str) and _is_local(given) else given


def _is_local(name: str) -> bool:
    from pathlib import Path

    from linearize.data.local import looks_local
    from linearize.data.walk import exists

    return looks_local(name) or exists(Path(name).expanduser())
