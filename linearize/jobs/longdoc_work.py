"""The folder of an unfinished `longdoc` run, `OUTPUT.work`: the steps that are done, and what it was started with."""

from __future__ import annotations

import re
from pathlib import Path

from linearize.checkpoint.fingerprint import fingerprint
from linearize.checkpoint.ownership import remove_parts
from linearize.errors import interrupted_run
from linearize.finetune.prepared import TaskData
from linearize.finetune.work import STARTED, check_started
from linearize.finetune.work import begin as write_started
from linearize.jobs.longdoc_config import LongdocJob
from linearize.options import recorded

ORIGINAL, CONVERTED, ALIGNED, LINEAR = "original", "converted", "aligned", "linear"
"""Folders of the steps: the tuned original, the conversion, aligned, and tuned."""
_STEP = f"({ORIGINAL}|{CONVERTED}|{ALIGNED}|{LINEAR})"
PARTS = re.compile(rf"\.?started\.json|[^/]*\.jsonl|{_STEP}(\.training|\.stage1|\.align)?|\.(new|old|lock)-{_STEP}.*")
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
    remove_parts(work, PARTS, CALLED, check_only=True)
    if job.resume and (work / STARTED).exists():
        check_started(work, started)
        return work
    remove(work)
    write_started(work, started)
    return work


def remove(work: Path) -> None:
    """Remove the work folder of a run that is saved, or that is begun anew.

    Raises:
        CheckpointError: if it holds something else; nothing is removed then.
    """
    remove_parts(work, PARTS, CALLED)
