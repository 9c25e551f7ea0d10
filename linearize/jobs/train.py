"""The steps that train: stage one, and the alignment behind it or alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from linearize.alignment.config import AlignConfig
from linearize.alignment.loop import align
from linearize.checkpoint.sentence import pools_first
from linearize.data.config import DataConfig
from linearize.distillation.config import DistillConfig
from linearize.distillation.loop import distill
from linearize.distillation.processes import is_main, several, under_fsdp
from linearize.errors import TrainingError
from linearize.fidelity.ablate import kernel_merit
from linearize.jobs.context import Context
from linearize.jobs.events import Aligned, Distilled, Noted, StepDone
from linearize.jobs.search_config import SearchJob
from linearize.options import name_of
from linearize.trackers import reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.alignment.loop import AlignResult, AlignStep
    from linearize.distillation.loop import DistillResult, StepReport
    from linearize.trackers import Report


def run_stage_one(context: Context, config: DistillConfig) -> None:
    """Teach the kernels to imitate softmax, if there is data and a step to do."""
    if context.source is None or not config.steps:
        return
    with reporter(_report_to(context), context.board) as write:
        context.distillation = distill(context.loaded.model, context.source, config, on_step=_on_step(context, write))
    context.on_event(Distilled(context.distillation))
    if not several():
        context.merit = kernel_merit(context.loaded.model, context.source.holdout_batches())


def run_alignment(context: Context, config: AlignConfig, teacher: PreTrainedModel | None = None) -> None:
    """Bring the whole model close to a teacher; None: its own softmax."""
    if pools_first(context.loaded.embedder):
        config = replace(config, pooling="first")
    with reporter(_report_to(context), context.board, "alignment") as write:
        context.alignment = align(
            context.loaded.model, context.source, config, teacher=teacher, on_step=_on_step(context, write)
        )
    context.on_event(Aligned(context.alignment))


def align_behind_stage_one(context: Context, config: AlignConfig) -> None:
    """Align a model that stage one has just taught, if there is data and a step to do.

    What stage one has learned is not thrown away when the alignment leaves the numbers: the error is kept for later.
    """
    if context.source is None or not config.steps:
        return
    if under_fsdp():
        text = "The alignment is skipped: it does not run under FSDP. Later, on one device: linearize align"
        context.on_event(Noted(text))
        return
    try:
        run_alignment(context, config)
    except TrainingError as error:
        context.failure = error


def _report_to(context: Context) -> str:
    assert not isinstance(context.job, SearchJob)
    return context.job.report_to if is_main() else "none"


def _on_step(context: Context, write: Callable[[Report], None]) -> Callable[[StepReport | AlignStep], None]:
    def on_step(report: StepReport | AlignStep) -> None:
        write(report)
        context.on_event(StepDone(report))

    return on_step


def distillation_record(result: DistillResult) -> dict[str, Any]:
    """Return what stage one did as plain data."""
    return {
        "steps": result.steps,
        "best_step": result.best_step,
        "held_out_loss": result.held_out,
        "stopped": result.stopped,
        "seconds": result.seconds,
        "before": result.before.to_dict(),
        "after": result.after.to_dict(),
    }


def without_heads(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of stage one without the figures of every head, for the checkpoint's own config."""
    brief = dict(record)
    for side in ("before", "after"):
        layers = [{k: v for k, v in layer.items() if k != "heads"} for layer in record[side]["layers"]]
        brief[side] = {"mean": record[side]["mean"], "layers": layers}
    return brief


def alignment_record(
    result: AlignResult,
    *,
    teacher: str | None = None,
    data: DataConfig | None = None,
    config: AlignConfig | None = None,
) -> dict[str, object]:
    """Return what a checkpoint says about its alignment."""
    found: dict[str, object] = {
        "steps": result.steps,
        "best_step": result.best_step,
        "stopped": result.stopped,
        "seconds": result.seconds,
        "before": result.before.to_dict(),
        "after": result.after.to_dict(),
    }
    if teacher is not None:
        found["teacher"] = name_of(teacher)
    if data is not None and data.dataset is not None:
        found["dataset"] = data_names(data)
    if config is not None:
        kept = ("train", "blockwise", "learning_rate", "kernel_learning_rate", "seed")
        found |= {name: getattr(config, name) for name in kept}
    return found


def data_names(data: DataConfig) -> str | None:
    """Name the data sets of a config; None for the built-in data."""
    names = [name_of(name) for name, _ in data.sources]
    return ", ".join(names) if names else None
