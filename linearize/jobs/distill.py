"""Going on with stage one on a converted checkpoint: more steps, other data, longer rows."""

from __future__ import annotations

from linearize.checkpoint.inspect import weights_were_trained
from linearize.checkpoint.log import read_log
from linearize.errors import ConfigError
from linearize.jobs.command import command_of
from linearize.jobs.config import DistillJob
from linearize.jobs.context import SKIP, Context, add_command, first_device, make_room, open_data, reserved
from linearize.jobs.convert import ConvertResult, save_result
from linearize.jobs.events import Callback, Planned, ignore
from linearize.jobs.train import run_stage_one
from linearize.loading import load_converted
from linearize.modeling.plan import Plan


def distill_checkpoint(job: DistillJob, on_event: Callback = ignore) -> ConvertResult:
    """Go on with the distillation of a converted checkpoint and save the result, all or nothing.

    Raises:
        LinearizeError: one of its children, for everything the user can put right; nothing is written then.
    """
    with reserved(job):
        context, decided = open_distillation(job, on_event)
        make_room(context)
        run_stage_one(context, job.distill)
        context.provenance |= add_command(context.provenance, command_of("distill", job, travels=True))
        return save_result(context, decided)


def open_distillation(job: DistillJob, on_event: Callback) -> tuple[Context, Plan]:
    """Do what comes before the first step: the checkpoint is loaded, and the data is open."""
    earlier = read_log(job.model)
    loaded = load_converted(job.model, device=first_device(job))
    section = loaded.model.config.linearize
    context = Context(job, loaded, on_event, dict(section.get("provenance") or {}), earlier)
    decided = Plan.from_dict(section)
    on_event(Planned(decided))
    check_own_weights(context)
    open_data(context, job.distill_length, SKIP)
    return context, decided


def check_own_weights(context: Context) -> None:
    """Refuse a checkpoint whose own softmax is no longer the original's.

    Raises:
        ConfigError: if it was aligned.
    """
    model = context.job.model
    if weights_were_trained(context.provenance) and "finetuning" not in context.provenance:
        raise ConfigError(
            f"{model!r} was aligned with its original, so that its own softmax, which stage one imitates, is "
            f"no longer the original's; go on with: linearize align {model} --teacher ORIGINAL"
        )
