"""Tuning a checkpoint on a task."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.checkpoint.log import read_log
from linearize.checkpoint.output import check_room, check_target, claim
from linearize.checkpoint.save import size_of
from linearize.distillation.processes import is_main, own_device, under_fsdp, wait_for_all
from linearize.errors import CheckpointError, ConfigError, NotSavedError
from linearize.finetune.checkpoints import last_checkpoint
from linearize.finetune.checks import check_adapter, check_checkpointing, check_fsdp, check_trains
from linearize.finetune.lengths import fit_positions
from linearize.finetune.load import fit_tokenizer, load_for_task, load_processor
from linearize.finetune.prepare import prepare
from linearize.finetune.prepared import TaskData
from linearize.finetune.report_to import check_report_to
from linearize.finetune.save import save_model, tuning_files, tuning_record
from linearize.finetune.selection import hold_out
from linearize.finetune.teacher import load_teacher
from linearize.finetune.trainer import TuneResult, finetune
from linearize.finetune.work import check_work, remove_work
from linearize.jobs.command import command_of
from linearize.jobs.conclude import after_tuning
from linearize.jobs.context import add_command
from linearize.jobs.events import Callback, Concluded, DataOpened, Logged, Noted, Saved, StepDone, ignore
from linearize.jobs.findings import Findings
from linearize.jobs.task_config import TuneJob
from linearize.loading import move
from linearize.options import name_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.types import Processor


ADAPTER = "adapter"
"""The folder of kept low-rank updates in a checkpoint: beside its weights transformers would load them on top."""


def finetune_checkpoint(job: TuneJob, on_event: Callback = ignore) -> tuple[Path, TuneResult]:
    """Tune a checkpoint on a task and save the result, all or nothing.

    The trainer's own checkpoints lie beside the output, in `<output>.training`, until the result is saved: an
    interrupted run goes on from there with `resume`. The output may be the checkpoint itself, if linearize wrote it. Of
    several processes (torchrun, accelerate launch), which train together, one writes.

    Raises:
        LinearizeError: one of its children, for everything the user can put right.
    """
    target, sources = job.target(), sources_of(job)
    check_target(target, overwrite=job.overwrite, sources=sources)
    # Of several processes one writes; the others only train with it.
    claimed = claim(target, overwrite=job.overwrite, sources=sources) if is_main() else contextlib.nullcontext()
    with claimed:
        result, found = _finetune(job, target, on_event)
    on_event(Saved(target))
    on_event(Concluded(found))
    return target, result


def sources_of(job: TuneJob) -> list[str | None]:
    """Return what is read, and must not be written over; the checkpoint itself may be, if linearize wrote it."""
    target = job.target()
    in_place = os.path.exists(target) and os.path.exists(job.model) and os.path.samefile(target, job.model)
    texts = [name for name, _ in job.data.text_sources]
    return [None if in_place else job.model, job.dataset, job.teacher, *texts]


@dataclass(frozen=True)
class Opened:
    """What a tuning begins with.

    Attributes:
        work: the folder of the trainer's checkpoints.
        earlier: the log of the checkpoint.
        model: with the task's head, on its device.
        processor: tokenizer or image processor.
        data: the task's rows, some of the training rows held out.
        teacher: the tuned softmax model, or None.
    """

    work: Path
    earlier: list[dict[str, object]]
    model: PreTrainedModel
    processor: Processor
    data: TaskData
    teacher: PreTrainedModel | None


def open_tuning(job: TuneJob, on_event: Callback, change: Callable[[PreTrainedModel], object] | None = None) -> Opened:
    """Do what comes before the first step: validate everything, write nothing.

    Args:
        job: what to tune.
        on_event: called with what happens.
        change: called with the model before its length is checked (dry runs); None: it stays as it was loaded.
    """
    target = job.target()
    check_fsdp()
    device = own_device(job.device)
    check_adapter(job.tune, _adapter_of(job))
    check_report_to(job.tune.report_to)
    if job.data.unlabelled and job.teacher is None:
        name = job.data.unlabelled[0]
        raise ConfigError(
            f"{name}: got {getattr(job.data, name)!r}, but these rows have no label; name a teacher (--teacher)"
        )
    work = target.with_name(f"{target.name}.training")
    check_work(work, resume=job.resume, overwrite=job.overwrite)
    # Read first: a damaged log is refused before the first slow step, and the output may be the same folder.
    earlier = read_log(job.model)
    processor = load_processor(job.model, job.task.modality)
    data = prepare(job.task, processor, job.data, data=job.dataset)
    on_event(DataOpened(data.description))
    model = load_for_task(job.model, data, new_head=job.new_head, seed=job.tune.seed)
    if change is not None:
        change(model)
    # What is spread over the devices is handed out from the memory of the host.
    model = move(model, "cpu" if under_fsdp() else device)
    fit_tokenizer(model, processor)
    if (said := fit_positions(model, processor, job.task, job.data.max_length)) is not None:
        on_event(Noted(said))
    teacher = None
    if job.teacher is not None:
        teacher = load_teacher(job.teacher, data, model, processor, job.data.max_length)
    check_trains(data)
    check_checkpointing(model, job.tune.gradient_checkpointing)
    data = hold_out(data, job.tune.selection_rows, seed=job.tune.seed)
    return Opened(work, earlier, model, processor, data, teacher)


def _adapter_of(job: TuneJob) -> str | None:
    """Return the name of the model that kept low-rank updates belong to; None where none are kept.

    Raises:
        ConfigError: if that model would be replaced by the result.
    """
    if not job.keep_adapter:
        return None
    target = job.target()
    if os.path.exists(target) and os.path.exists(job.model) and os.path.samefile(target, job.model):
        raise ConfigError(
            f"keep_adapter: got the model itself as the output, {str(target)!r}, but the adapter belongs to the model "
            "as it is; choose another output"
        )
    return name_of(job.model)


def _finetune(job: TuneJob, target: Path, on_event: Callback) -> tuple[TuneResult, Findings]:
    opened = open_tuning(job, on_event)
    work, model, data = opened.work, opened.model, opened.data
    if is_main():
        check_room(target, size_of(model))
        if not job.resume:
            # Last: until here a mistyped name could still be found out.
            remove_work(work)
    result = finetune(
        model,
        data,
        job.tune,
        folder=work,
        resume=job.resume,
        on_log=lambda entry: on_event(Logged(entry)),
        on_step=lambda step: on_event(StepDone(step)),
        tensorboard=target.with_name(f"{target.name}.tensorboard"),
        teacher=opened.teacher,
        adapter_of=_adapter_of(job),
    )
    record = tuning_record(data, job.tune, result, job.teacher)
    if is_main():
        files: dict[str, str | bytes] = {**tuning_files(record, result, opened.earlier)}
        files |= {f"{ADAPTER}/{name}": content for name, content in (result.adapter or {}).items()}
        _save(job, opened, record, files)
    wait_for_all()
    return result, after_tuning(model, job, data, result)


def _save(job: TuneJob, opened: Opened, record: dict[str, object], files: dict[str, str | bytes]) -> None:
    """Write the result, and drop the trainer's checkpoints.

    Raises:
        NotSavedError: if it cannot be written; the trainer's checkpoints stay then.
    """
    made = getattr(opened.model.config, "linearize", None) or {}
    commands = add_command(made.get("provenance") or {}, command_of("finetune", job, travels=True))
    stage = {"finetuning": record, **commands}
    try:
        save_model(
            opened.model, job.target(), opened.processor, overwrite=job.overwrite, stage=stage, extra_files=files
        )
    except CheckpointError as error:
        if last_checkpoint(opened.work) is None:
            raise
        raise NotSavedError(str(error), str(opened.work)) from error
    with contextlib.suppress(CheckpointError, OSError):
        remove_work(opened.work)
