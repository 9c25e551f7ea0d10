"""Bringing a converted checkpoint as a whole close to its original."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.alignment.pair import check_teacher
from linearize.checkpoint.inspect import weights_were_trained
from linearize.checkpoint.log import ALIGNMENT, log_file, read_log
from linearize.errors import ConfigError
from linearize.jobs.command import command_of
from linearize.jobs.conclude import after_training
from linearize.jobs.config import AlignJob
from linearize.jobs.context import (
    Context,
    add_command,
    first_device,
    longest_row,
    make_room,
    open_data,
    reserved,
    write,
)
from linearize.jobs.events import Callback, Concluded, Saved, ignore
from linearize.jobs.findings import Findings
from linearize.jobs.train import alignment_record, run_alignment
from linearize.loading import load_converted, load_model, model_type
from linearize.modeling.plan import Plan
from linearize.options import recorded
from linearize.surgery.positions import current_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.alignment.loop import AlignResult


@dataclass
class AlignmentSaved:
    """What `linearize align` did.

    Attributes:
        output: the folder.
        data: one line about the data.
        alignment: see `linearize.alignment.loop.AlignResult`.
        seconds: duration of everything.
        findings: what it has found, and what to do next.
    """

    output: Path
    data: str
    alignment: AlignResult
    seconds: float
    findings: Findings

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "output": str(self.output),
            "data": self.data,
            "alignment": alignment_record(self.alignment),
            "seconds": self.seconds,
            "findings": self.findings.to_dict(),
        }


def align_checkpoint(job: AlignJob, on_event: Callback = ignore) -> AlignmentSaved:
    """Align a converted checkpoint with its original and save the result, all or nothing.

    Raises:
        LinearizeError: one of its children, for everything the user can put right; nothing is written then.
    """
    with reserved(job):
        context, teacher = open_alignment(job, on_event)
        make_room(context)
        run_alignment(context, job.align, teacher)
        return save_aligned(context, job)


def open_alignment(job: AlignJob, on_event: Callback) -> tuple[Context, PreTrainedModel | None]:
    """Do what comes before the first step: checkpoint and teacher are loaded, and the data is open."""
    earlier = read_log(job.model)
    loaded = load_converted(job.model, device=first_device(job))
    provenance = dict(loaded.model.config.linearize.get("provenance") or {})
    context = Context(job, loaded, on_event, provenance, earlier)
    teacher = load_teacher(context, job)
    open_data(context, job.length, "a model that reads text or images")
    if teacher is not None:
        check_rows(teacher, context.source.options["max_length"], loaded.modality)
    return context, teacher


def save_aligned(context: Context, job: AlignJob) -> AlignmentSaved:
    """Write the checkpoint with what was done to it."""
    result = context.alignment
    assert result is not None
    record = alignment_record(result, teacher=job.teacher, data=job.data, config=job.align)
    record["options"] = recorded(job)
    made = add_command(context.provenance, command_of("align", job, travels=True)) | longest_row(context)
    write(
        context,
        {**context.provenance, **made, "alignment": record},
        log_file(ALIGNMENT, result.history, context.earlier),
    )
    found = after_training(context, Plan.from_dict(context.loaded.model.config.linearize))
    saved = AlignmentSaved(Path(context.target), context.source.description, result, context.seconds, found)
    context.on_event(Saved(saved.output))
    context.on_event(Concluded(found))
    return saved


def load_teacher(context: Context, job: AlignJob) -> PreTrainedModel | None:
    """Load the original; None where the checkpoint's own softmax still is the original's.

    Raises:
        ConfigError: if the checkpoint's weights were changed since and no teacher is given, or it does not fit.
    """
    loaded = context.loaded
    if job.teacher is None:
        check_own_softmax(context.provenance)
        return None
    if model_type(job.teacher) == "linearize":
        raise ConfigError(f"teacher: {job.teacher!r} is converted itself; give the original that it was made from")
    base = type(loaded.model).__name__.removeprefix("Linearized")
    teacher = load_model(job.teacher)
    check_teacher(loaded.model, teacher.model)
    mine: dict[str, int] = getattr(loaded.processor, "get_vocab", dict)()
    its: dict[str, int] = getattr(teacher.processor, "get_vocab", dict)()
    if mine and its and mine != its:
        raise ConfigError(
            f"teacher: {job.teacher!r} has a tokenizer of {len(its):,} pieces that differs from the checkpoint's "
            f"({len(mine):,} pieces); give the original of this {base}"
        )
    return teacher.model


def check_own_softmax(provenance: dict[str, object]) -> None:
    """Refuse to take a checkpoint's own weights for its original's where they were trained since.

    Raises:
        ConfigError: saying which stage changed them.
    """
    stage = None
    if weights_were_trained(provenance):
        stage = "tuned on a task" if "finetuning" in provenance else "aligned"
    if stage is not None:
        given = "TUNED-ORIGINAL" if "finetuning" in provenance else provenance.get("base_model", "ORIGINAL")
        raise ConfigError(
            f"this checkpoint was {stage}, so that its own softmax is no longer the original's; "
            f"say what it is to be aligned with: --teacher {given}"
        )


def check_rows(teacher: PreTrainedModel, length: int, modality: str) -> None:
    """Refuse rows that are longer than the teacher takes.

    Raises:
        ConfigError: if they are.
    """
    most = current_length(teacher) if modality == "text" else None
    if most is not None and length > most:
        raise ConfigError(
            f"teacher: got rows of {length} tokens, but it takes at most {most}; lower --length, or leave --teacher "
            "out: the checkpoint's own softmax has its longer positions"
        )
