"""The folder of an unfinished `longdoc` run, `OUTPUT.work`: the steps that are done, and what it was started with."""

from __future__ import annotations

import re
from pathlib import Path

from linearize.checkpoint.fingerprint import fingerprint
from linearize.checkpoint.ownership import remove_parts
from linearize.distillation.state import StateFolder
from linearize.errors import CheckpointError, interrupted_run
from linearize.finetune.prepared import TaskData
from linearize.finetune.work import STARTED, check_started, remove_work
from linearize.finetune.work import begin as write_started
from linearize.jobs.longdoc_config import LongdocJob
from linearize.options import name_of, recorded

ORIGINAL, CONVERTED, ALIGNED, LINEAR = "original", "converted", "aligned", "linear"
"""Folders of the steps: the tuned original, the conversion, aligned, and tuned."""
_STEP = f"({ORIGINAL}|{CONVERTED}|{ALIGNED}|{LINEAR})"
PARTS = rf"\.?started\.json|{_STEP}(\.training|\.stage1|\.align)?|\.(new|old|lock)-{_STEP}.*"
CALLED = "a longdoc run of linearize"
FREE = ("save_every", "memory")
"""Options that may differ between a run and its continuation."""


def work_folder(target: Path) -> Path:
    """Return the work folder of an output."""
    return target.with_name(f"{target.name}.work")


def begin(job: LongdocJob, data: TaskData) -> Path:
    """Make the work folder, or go on with the one that is there.

    Raises:
        ConfigError: if there is one and neither `resume` nor `overwrite` is asked for, or the run was started with
            other options or other data.
        CheckpointError: if the folder holds something else.
    """
    work = work_folder(job.target())
    options = {name: value for name, value in recorded(job).items() if name not in FREE}
    options |= {"task": job.task.name, "label column": job.task.label}
    started = fingerprint(data=data, options=options)
    if work.exists() and not job.resume and not job.overwrite:
        raise interrupted_run(work)
    if not job.resume:
        remove(job, work, check_only=True)
    if job.resume and (work / STARTED).exists():
        check_started(work, started)
        return work
    remove(job, work)
    write_started(work, started)
    return work


def texts_file(job: LongdocJob, work: Path) -> Path:
    """Return the file of the training texts."""
    return work / f"{Path(name_of(job.dataset)).name.partition('.')[0]}.jsonl"


def remove(job: LongdocJob, work: Path, *, check_only: bool = False) -> None:
    """Remove the work folder of a run that is saved, or that is begun anew.

    Raises:
        CheckpointError: if it holds something else; nothing is removed then.
    """
    parts = re.compile(rf"{PARTS}|{re.escape(texts_file(job, work).name)}")
    remove_parts(work, parts, CALLED, record=STARTED, unmarked=_is_unfinished, check_only=check_only)


def _is_unfinished(step: Path) -> bool:
    """Tell whether a folder beside a step's output holds the states of that step, and nothing else."""
    try:
        if step.suffix == ".training":
            remove_work(step, check_only=True)
        else:
            StateFolder(step, 1).check_free(overwrite=True)
    except CheckpointError:
        return False
    return bool(step.suffix)
