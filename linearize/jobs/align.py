"""`align`: bring a converted checkpoint as a whole close to its original."""

from __future__ import annotations

from typing import TYPE_CHECKING

from linearize.checkpoint.loading import load_converted, load_model, model_type
from linearize.checkpoint.log import read_log
from linearize.checkpoint.provenance import weights_were_trained
from linearize.conversion.positions import current_length
from linearize.core.errors import ConfigError
from linearize.jobs.config import AlignJob
from linearize.jobs.convert import ConvertResult, save_result
from linearize.jobs.events import Callback, ignore
from linearize.jobs.stages import Context, first_device, make_room, open_data, reserved, run_alignment
from linearize.modeling.plan import Plan
from linearize.training.alignment.pair import check_teacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def align_checkpoint(job: AlignJob, on_event: Callback = ignore) -> ConvertResult:
    """Align a converted checkpoint with its original and save the result, all or nothing.

    Raises:
        LinearizeError: one of its children, for everything the user can put right; nothing is written then.
    """
    with reserved(job):
        context, teacher = open_alignment(job, on_event)
        make_room(context)
        run_alignment(context, job.align, teacher)
        return save_result(context, Plan.from_dict(context.loaded.model.config.linearize))


def open_alignment(job: AlignJob, on_event: Callback) -> tuple[Context, PreTrainedModel | None]:
    """Load checkpoint and teacher and open the data: everything before the first step.

    Returns:
        The job, and the teacher; None if the checkpoint's own softmax is still the original's.

    Raises:
        ConfigError: if the checkpoint's weights were trained since and no teacher is named, or if it does not fit.
    """
    earlier = read_log(job.model)
    loaded = load_converted(job.model, device=first_device(job))
    provenance = dict(loaded.model.config.linearize.get("provenance") or {})
    context = Context(job, loaded, on_event, provenance, earlier)
    teacher = None
    if job.teacher is not None:
        teacher = _load_teacher(context, job.teacher)
    elif weights_were_trained(provenance):
        tuned = "finetuning" in provenance
        name = "TUNED-ORIGINAL" if tuned else provenance.get("base_model", "ORIGINAL")
        raise ConfigError(
            f"this checkpoint was {'tuned on a task' if tuned else 'aligned'}, so its own softmax is no longer the "
            f"original's; name the model to align it with: --teacher {name}"
        )
    open_data(context, job.length, "a model that reads text or images")
    length = context.source.options["max_length"]
    most = current_length(teacher) if teacher is not None and loaded.modality == "text" else None
    if most is not None and length > most:
        raise ConfigError(
            f"teacher: got rows of {length} tokens, but it takes at most {most}; lower --length, or leave --teacher "
            "out: the checkpoint's own softmax has its longer positions"
        )
    return context, teacher


def _load_teacher(context: Context, name: str) -> PreTrainedModel:
    if model_type(name) == "linearize":
        raise ConfigError(f"teacher: {name!r} is converted itself; give the original that it was made from")
    student, teacher = context.loaded, load_model(name)
    check_teacher(student.model, teacher.model)
    ours: dict[str, int] = getattr(student.processor, "get_vocab", dict)()
    theirs: dict[str, int] = getattr(teacher.processor, "get_vocab", dict)()
    if ours and theirs and ours != theirs:
        base = type(student.model).__name__.removeprefix("Linearized")
        raise ConfigError(
            f"teacher: {name!r} has a tokenizer of {len(theirs):,} pieces that differs from the checkpoint's "
            f"({len(ours):,} pieces); give the original of this {base}"
        )
    return teacher.model
