"""What each job says when it is over: its findings, and the command that follows from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from linearize.checkpoint.inspect import weights_were_trained
from linearize.jobs import findings
from linearize.jobs.command import command_of, data_options, given_options, line
from linearize.jobs.config import AlignJob, ConvertJob, DistillJob, StageOneJob
from linearize.jobs.context import Context
from linearize.jobs.findings import Findings, Lengths
from linearize.jobs.task_config import EvaluateJob, TuneJob
from linearize.jobs.trend import Trend
from linearize.modeling.model import is_linearized
from linearize.modeling.plan import Plan
from linearize.options import options_of
from linearize.report.options import ReportOptions
from linearize.surgery.positions import current_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.finetune.prepared import TaskData
    from linearize.finetune.trainer import TuneResult

STAGE_ONE, ALIGNMENT, STAGE_TWO = "stage one", "alignment", "stage two"
SAMPLE = 256
"""Queries per row that the loss of long rows is taken on, where that is proposed."""

Step = tuple[str, str]
"""Why a command comes next, and the command."""


def after_training(context: Context, plan: Plan) -> Findings:
    """Say what a conversion, a further stage one or an alignment has found, and what comes next."""
    job, done, aligned = context.job, context.distillation, context.alignment
    trends: dict[str, Trend] = {}
    if done is not None and done.history and isinstance(job, StageOneJob):
        trends[STAGE_ONE] = findings.stage_one_trend(done, job.distill.steps)
    if aligned is not None and aligned.history:
        trends[ALIGNMENT] = findings.alignment_trend(aligned)
    worst = None
    if done is not None:
        worst = findings.worst_of_layers(done.after, plan)
    elif aligned is not None:
        worst = findings.worst_of_blocks(aligned.after, plan)
    lengths = findings.lengths_of(context.longest_seen, current_length(context.loaded.model))
    load = findings.load_lines(context.loaded.model, context.target, embedder=bool(context.loaded.embedder))
    why, command = _next(context, trends, lengths)
    return Findings(trends, worst, lengths, load, command, why, context.merit)


def _next(context: Context, trends: dict[str, Trend], lengths: Lengths | None) -> Step:
    job = context.job
    found: Step | None = None
    if context.alignment is not None:
        found = _lower_rates(context) or _align_on(context, trends)
        if found is None and isinstance(job, ConvertJob):
            found = _convert_on(context, job, trends, lengths)
    elif not weights_were_trained(context.provenance):
        found = _distill_on(context, trends, lengths) or ("to bring the whole model close", _align(context, {}))
    return found or _look(context)


def _align(context: Context, options: dict[str, object]) -> str:
    given = {name: value for name, value in data_options(context.job).items() if name in options_of(AlignJob)}
    return line("align", AlignJob, {"model": context.target, **given, **options})


def _original(context: Context) -> str:
    """Name the model that the checkpoint was made from."""
    job = context.job
    given = job.model if isinstance(job, ConvertJob) else getattr(job, "teacher", None)
    return str(given or context.provenance.get("base_model") or "ORIGINAL")


def _align_again(context: Context, options: dict[str, object]) -> str:
    """Align what was aligned just now: with its original, unless its own softmax still is the original's."""
    job = context.job
    assert isinstance(job, AlignJob | ConvertJob)
    length = job.length if isinstance(job, AlignJob) else job.distill_length
    own = job.align.train == "kernels" and not weights_were_trained(context.provenance)
    if own:
        return _align(context, {"length": length, "teacher": getattr(job, "teacher", None), **options})
    if context.positions is not None and length is not None:
        # The original takes no more than it did.
        length = min(length, context.positions.old_length)
    return _align(context, {"length": length, "teacher": _original(context), **options})


def _lower_rates(context: Context) -> Step | None:
    """Where the alignment found nothing better than its start: the same at half the rates."""
    result, job = context.alignment, context.job
    if result is None or not result.history or result.best_step:
        return None
    assert isinstance(job, AlignJob | ConvertJob)
    rates = {name: getattr(job.align, name) / 2 for name in ("learning_rate", "kernel_learning_rate")}
    return "as nothing better was found, at half the rates", _align_again(context, rates)


def _align_on(context: Context, trends: dict[str, Trend]) -> Step | None:
    found = trends.get(ALIGNMENT)
    if found is None or found.verdict != "falling":
        return None
    return "as it still falls", _align_again(context, {"steps": found.more})


def _distill_on(context: Context, trends: dict[str, Trend], lengths: Lengths | None) -> Step | None:
    """Go on with stage one: where it was not begun, still falls, or has not seen the lengths that were asked for."""
    job = context.job
    assert isinstance(job, StageOneJob)
    given = {"model": context.target, **data_options(job), "distill_length": job.distill_length}
    if context.distillation is None:
        return "to teach the kernels", line("distill", DistillJob, given)
    found = trends.get(STAGE_ONE)
    if found is not None and found.verdict == "falling":
        return "as it still falls", line("distill", DistillJob, given | {"distill_steps": found.more})
    if context.positions is not None and lengths is not None and _has_longer_rows(context, lengths):
        return "for longer rows", line("distill", DistillJob, given | _long_rows(lengths))
    return None


def _has_longer_rows(context: Context, lengths: Lengths) -> bool:
    """Tell whether there may be longer rows, which the model takes: the longest one seen was as long as allowed."""
    cut = None if context.source is None else context.source.options["max_length"]
    return lengths.seen < lengths.promised and cut is not None and lengths.seen >= cut


def _convert_on(context: Context, job: ConvertJob, trends: dict[str, Trend], lengths: Lengths | None) -> Step | None:
    """Convert anew, as the weights of an aligned checkpoint are no longer those that stage one imitates."""
    found = trends.get(STAGE_ONE)
    if found is not None and found.verdict == "falling":
        steps = {"distill_steps": found.steps + found.more, "overwrite": True}
        return "as stage one still falls", command_of("convert", job, steps)
    if job.max_length is not None and lengths is not None and _has_longer_rows(context, lengths):
        return "for longer rows", command_of("convert", job, _long_rows(lengths) | {"overwrite": True})
    return None


def _long_rows(lengths: Lengths) -> dict[str, object]:
    return {"distill_length": lengths.promised, "query_sample": SAMPLE, "batch_size": 1}


def _look(context: Context) -> Step:
    data = data_options(context.job)
    options: dict[str, object] = {"checkpoint": context.target, "original": _original(context)}
    options |= {name: data[name] for name in ("dataset", "image_column", "device") if name in data}
    if "text_column" in data:
        options["text_column"] = str(data["text_column"]).partition(",")[0]
    return "to look at every layer", line("report", ReportOptions, options)


def after_tuning(model: PreTrainedModel, job: TuneJob, data: TaskData, result: TuneResult) -> Findings:
    """Say what stage two has found, and what comes next.

    Args:
        model: the tuned model.
        job: what was asked for.
        data: the task's rows.
        result: a `linearize.finetune.trainer.TuneResult`.
    """
    target = str(job.target())
    found = findings.stage_two_trend(result.history, result.steps, result.best_step)
    seen = None
    if job.task.modality == "text":
        lengths = [len(row["input_ids"]) for row in (data.validation[i] for i in range(len(data.validation)))]
        seen = max(lengths, default=None)
    lengths_found = findings.lengths_of(seen, current_length(model))
    why, command = _after_stage_two(model, job, found, target)
    load = findings.load_lines(model, target)
    return Findings({STAGE_TWO: found}, None, lengths_found, load, command, why)


def _after_stage_two(model: PreTrainedModel, job: TuneJob, found: Trend, target: str) -> Step:
    if found.verdict == "falling":
        steps = {"steps": found.steps + found.more, "overwrite": True}
        return "as it still falls", command_of("finetune", job, steps, leave_out=("epochs",))
    if found.verdict == "start":
        rates = {"learning_rate": job.tune.learning_rate / 2, "overwrite": True}
        return "as nothing better was found, at half the rate", command_of("finetune", job, rates)
    given = given_options(job)
    if not is_linearized(model):
        options = {"model": target, "dataset": given.get("dataset"), "text_column": ",".join(job.task.columns) or None}
        return "to make it linear", line("convert", ConvertJob, options)
    same = ("task", "columns", "label_column", "labels", "split", "dataset", "max_length", "stride", "device")
    options = {name: given[name] for name in same if name in given}
    return "to measure it", line("evaluate", EvaluateJob, {"model": target, **options, "compare": job.teacher})
