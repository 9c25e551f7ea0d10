"""The findings of a finished stage and the suggested next command; both follow from the stage's measured figures."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from linearize.checkpoint.loading import load_code
from linearize.checkpoint.provenance import Provenance
from linearize.conversion.positions import current_length
from linearize.core.options import effective, options_of
from linearize.fidelity.ablate import EXACT
from linearize.jobs.config import ConvertJob, StageOneJob
from linearize.jobs.events import Findings, Lengths, WorstLayer
from linearize.modeling.model import is_linearized, kernel_parameters
from linearize.modeling.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.jobs.stages import Context
    from linearize.jobs.task_config import TuneJob
    from linearize.training.stage_two.task_types.base import TaskData


def worst_layer(figures: Mapping[str, float], figure: str, plan: Plan) -> WorstLayer | None:
    """Return the module with the largest figure; None if there are fewer than two modules, or if all figures are 0.

    Args:
        figures: the figure of each attention layer, or of each block, by module name.
        figure: name of the figure.
        plan: the plan of the conversion.
    """
    if len(figures) < 2:
        return None
    module = max(figures, key=lambda name: figures[name])
    value, mean = figures[module], sum(figures.values()) / len(figures)
    if value < EXACT:
        return None
    # The plan's module names start at the base model, those of the figures at the whole model.
    parts = module.split(".")
    inner = tuple(f"{'.'.join(parts[start:])}." for start in range(len(parts)))
    index = next((layer.index for layer in plan.converted if f"{layer.module}.".startswith(inner)), None)
    return WorstLayer(module, index, figure, value, mean)


def growth(errors: Mapping[str, float]) -> dict[str, float]:
    """Return how much the hidden states' error grows in each block, as errors accumulate from block to block."""
    blocks = {name: error for name, error in errors.items() if name != "output"}
    return {
        name: error - before for (name, error), before in zip(blocks.items(), [0.0, *blocks.values()], strict=False)
    }


def lengths_of(seen: int | None, model: PreTrainedModel) -> Lengths | None:
    """Return the longest row seen next to the longest input of a model; None if one of the two is not known."""
    promised = current_length(model)
    return None if seen is None or promised is None else Lengths(min(seen, promised), promised)


def load_lines(model: PreTrainedModel, folder: object, *, embedder: bool = False) -> str:
    """Return one line of Python that loads a saved model; `embedder`: as a sentence embedder."""
    before = "import linearize; " if getattr(model.config, "linearize", None) else ""
    if embedder:
        return f"{before}from sentence_transformers import SentenceTransformer; SentenceTransformer({str(folder)!r})"
    return before + "; ".join(load_code(model, repr(str(folder))))


def after_training(context: Context) -> Findings:
    """Return the findings of a conversion, a continued stage one or an alignment."""
    done, aligned, model, plan = context.distillation, context.alignment, context.loaded.model, context.plan
    worst = None
    if done is not None:
        name, figure = "kl", "KL"
        if any(layer.kl is None for layer in done.after.layers):
            name, figure = "output_error", "relative error of the output"
        figures = {layer.module: float(getattr(layer, name)) for layer in done.after.layers}
        worst = worst_layer(figures, figure, plan)
    elif aligned is not None:
        worst = worst_layer(growth(aligned.after.layers), "growth of the hidden states' error", plan)
    load = load_lines(model, context.target, embedder=bool(context.loaded.embedder))
    why, command = next_command(context)
    return Findings(worst, lengths_of(context.longest_seen, model), load, command, why, context.merit)


def next_command(context: Context) -> tuple[str, str]:
    """Return the purpose of the suggested next command, and the command."""
    job, target = context.job, context.target
    data = data_options(job)
    if context.alignment is None and not Provenance(context.provenance).weights_were_trained:
        # Stage one imitates the checkpoint's own softmax, which is still the original's.
        untrained = context.distillation is None and kernel_parameters(context.loaded.model)
        if untrained and isinstance(job, StageOneJob):
            return "to train the kernels", line("distill", target, data | {"distill_length": job.distill_length})
        return "to bring the whole model closer", line("align", target, data)
    # `report` could look up the original's name in the checkpoint, but the record leaves its folder out.
    original = job.model if isinstance(job, ConvertJob) else getattr(job, "teacher", None)
    options = {"original": original, **{name: data.get(name) for name in ("dataset", "image_column", "device")}}
    if "text_column" in data:
        options["text_column"] = str(data["text_column"]).partition(",")[0]
    return "to look at every layer", line("report", target, options)


def after_tuning(model: PreTrainedModel, job: TuneJob, data: TaskData) -> Findings:
    """Return the findings of stage two."""
    from linearize.training.stage_two.splits import located
    from linearize.training.stage_two.tasks import TASKS

    target, task, seen = str(job.target()), job.task, None
    if task.modality == "text":
        rows = (data.validation[place] for place in range(len(data.validation)))
        seen = max((len(row["input_ids"]) for row in rows), default=None)
    if is_linearized(model):
        usual = TASKS[task.name]
        options: dict[str, object] = {
            "task": task.name,
            "columns": task.columns if task.columns != usual.columns else None,
            "label_column": task.label if task.label != usual.label else None,
            "labels": task.labels if task.labels != usual.labels else None,
            "split": task.validation[0] if task.exact_validation else None,
            "dataset": job.dataset,
            "max_length": job.data.max_length if task.modality == "text" else None,
            "stride": job.data.stride,
            "device": job.device if job.device != "auto" else None,
            "compare": job.teacher,
        }
        why, command = "to measure it", line("evaluate", target, options)
    else:
        options = {}
        # Stage one cannot read lists of messages.
        if not task.type.lists:
            columns = task.columns if task.modality == "text" else ()
            options = {"dataset": job.dataset and located(task, job.dataset), "text_column": columns or None}
        why, command = "to make it linear", line("convert", target, options)
    return Findings(None, lengths_of(seen, model), load_lines(model, target), command, why)


MANY_ROWS = 500
"""Rows whose figure is precise enough for most choices between states."""


def long_measuring(history: Iterable[Mapping[str, float]], seconds: float, rows: int) -> str | None:
    """Say that measuring took most of stage two, and what shortens it; None if it did not, or there are few rows."""
    measuring = sum(entry.get("eval_runtime", 0.0) for entry in history)
    if measuring <= seconds / 2 or rows <= MANY_ROWS:
        return None
    return (
        f"Measuring {rows:,} rows took {measuring:.0f} of {seconds:.0f} s; --validation-limit {MANY_ROWS} measures on "
        "fewer, --eval-every N less often"
    )


def line(verb: str, model: str, options: Mapping[str, object]) -> str:
    """Return a command line; options of None or False are left out, and pairs (name, weight) become name=weight."""
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list | tuple):
            words.append(",".join("=".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in value))
        elif value is not None and not isinstance(value, bool):
            words.append(str(value))
    return shlex.join(["linearize", verb, model, *words])


def data_options(job: object) -> dict[str, object]:
    """Return the options about data, device and seed that differ from their defaults."""
    known = options_of(type(job))
    return {
        name: value
        for name, value in effective(job).items()
        if (known[name].places[0][0] == "data" or name in ("device", "seed"))
        and value not in (known[name].default, None, [])
    }
