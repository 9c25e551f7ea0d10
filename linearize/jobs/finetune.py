"""`finetune`: tune a checkpoint on a task."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from linearize.checkpoint.loading import load_processor, move
from linearize.checkpoint.provenance import add_command, read_log
from linearize.core.errors import CheckpointError, ConfigError, NotSavedError
from linearize.core.options import name_of
from linearize.jobs.advice import after_tuning, long_measuring
from linearize.jobs.events import Callback, Concluded, DataOpened, Logged, Noted, Saved, StepDone, ignore
from linearize.jobs.stages import check_space, note_exact_rows, reserved
from linearize.jobs.task_config import TuneJob
from linearize.modeling.model import is_linearized
from linearize.modeling.plan import Plan
from linearize.training.processes import is_main, own_device, under_fsdp, wait_for_all
from linearize.training.stage_two import save as saving
from linearize.training.stage_two.load import fit_positions, load_for_task, load_teacher, other_classes
from linearize.training.stage_two.prepare import hold_out, prepare
from linearize.training.stage_two.task_types.base import TaskData
from linearize.training.stage_two.trainer import TuneResult, check_options, check_trainable, finetune
from linearize.training.trackers import check_report_to

ADAPTER = "adapter"
"""Subfolder for low-rank updates; if they were next to the weights, transformers would apply them a second time."""


class Tuned(NamedTuple):
    """The folder that a tuning wrote, and its result."""

    output: Path
    result: TuneResult


def finetune_checkpoint(job: TuneJob, on_event: Callback = ignore) -> Tuned:
    """Tune a checkpoint on a task and save the result atomically.

    The trainer's own checkpoints stay in `<output>.training` until the result is saved; with `resume` an interrupted
    run continues from there. The output may be the checkpoint itself, if linearize wrote it. Several processes
    (torchrun, accelerate launch) train together, and one of them writes.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    target = job.target()
    # Entries of this process's log: of the run before a resume, the time is not counted either.
    logged: list[dict[str, float]] = []

    def on_log(entry: dict[str, float]) -> None:
        logged.append(entry)
        on_event(Logged(entry))

    with reserved(job):
        model, data, teacher, earlier = open_tuning(job, on_event)
        work = work_folder(job)
        check_space(model, target, trained=True)
        if is_main() and not job.resume:
            # Last, after all checks.
            saving.remove_work(work)
        result = finetune(
            model,
            data,
            job.tune,
            folder=work,
            resume=job.resume,
            on_log=on_log,
            on_step=lambda step: on_event(StepDone(step)),
            tensorboard=target.with_name(f"{target.name}.tensorboard"),
            teacher=teacher,
            adapter_of=_adapter_of(job),
        )
        if is_main():
            record = saving.tuning_record(data, job.tune, result, job.teacher)
            files: dict[str, str | bytes] = {**saving.tuning_files(record, result, earlier)}
            files |= {f"{ADAPTER}/{name}": content for name, content in (result.adapter or {}).items()}
            section = getattr(model.config, "linearize", None) or {}
            stage = {"finetuning": record, **add_command(section.get("provenance") or {})}
            processor = data.type.processor
            try:
                saving.save_model(model, target, processor, overwrite=job.overwrite, stage=stage, extra_files=files)
            except CheckpointError as error:
                # The trainer's checkpoints are kept.
                if saving.last_checkpoint(work) is None:
                    raise
                raise NotSavedError(str(error), str(work)) from error
            with contextlib.suppress(CheckpointError, OSError):
                saving.remove_work(work)
        wait_for_all()
        # Before the findings, which read all rows that measured it.
        on_event(Saved(target))
        if (text := long_measuring(logged, result.seconds, len(data.validation))) is not None:
            on_event(Noted(f"{text}."))
        findings = after_tuning(model, job, data)
    on_event(Concluded(findings))
    return Tuned(target, result)


def work_folder(job: TuneJob) -> Path:
    """Return the folder of the trainer's checkpoints."""
    return job.target().with_name(f"{job.target().name}.training")


def open_tuning(
    job: TuneJob, on_event: Callback
) -> tuple[PreTrainedModel, TaskData, PreTrainedModel | None, list[dict[str, object]]]:
    """Prepare a tuning up to its first step: check the options, open the data, load the models; write nothing.

    Returns:
        The model with the task's head, on its device; the task's rows and their processor, with some of the training
        rows held out; the tuned softmax model as the teacher, or None; and the checkpoint's log.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    data_options = job.data
    check_options(job.tune, _adapter_of(job))
    # Under FSDP the model stays in its files or on the host, and the trainer shards a copy.
    device = "cpu" if under_fsdp() else own_device(job.device)
    check_report_to(job.tune.report_to)
    if data_options.extra_pairs and job.teacher is None:
        raise ConfigError(
            f"extra_pairs: got {data_options.extra_pairs!r}, but new pairs have no label; name a teacher (--teacher)"
        )
    saving.check_work(work_folder(job), resume=job.resume, overwrite=job.overwrite)
    # A damaged log is refused before the first slow step; the output may be the same folder.
    earlier = read_log(job.model)
    processor, head = load_processor(job.model, job.task.modality), None if job.new_head else job.model
    data = prepare(job.task, processor, data_options, data=job.dataset, head_of=head)
    on_event(DataOpened(data.description))
    seed, sharded = job.tune.seed, under_fsdp()
    model = move(load_for_task(job.model, data, new_head=job.new_head, seed=seed, in_files=sharded), device)
    fitted = fit_positions(model, data.type.processor, job.task, data_options.max_length)
    for note in (fitted, None if job.new_head else other_classes(job.model, data)):
        if note is not None:
            on_event(Noted(note))
    if job.task.modality == "text" and is_linearized(model):
        note_exact_rows(
            on_event, Plan.from_dict(model.config.linearize), data_options.max_length, "give a larger --max-length"
        )
    teacher = None if job.teacher is None else load_teacher(job.teacher, data, model)
    check_trainable(model, data, job.tune)
    data = hold_out(data, job.tune.selection_rows, seed=job.tune.seed)
    return model, data, teacher, earlier


def _adapter_of(job: TuneJob) -> str | None:
    """Return the name of the model that the saved low-rank updates belong to; None if they are not saved.

    Raises:
        ConfigError: if the result would replace that model.
    """
    if not job.keep_adapter:
        return None
    if job.in_place:
        raise ConfigError(
            f"keep_adapter: got the model itself as the output, {str(job.target())!r}, but the adapter belongs to the "
            "unchanged model; choose another output"
        )
    return name_of(job.model)
