"""The main job from end to end: load, plan, extend, distil, align, save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.checkpoint.log import ALIGNMENT, STAGE_ONE, log_file, log_lines
from linearize.checkpoint.sentence import with_length
from linearize.distillation.batches import usual_length, within
from linearize.errors import ConfigError, TrainingError
from linearize.fidelity.heads import keep_heads
from linearize.jobs.command import command_of
from linearize.jobs.conclude import after_training
from linearize.jobs.config import AUTO, ConvertJob, StageOneJob
from linearize.jobs.context import SKIP, Context, first_device, longest_row, make_room, open_data, reserved, write
from linearize.jobs.events import Callback, Concluded, Planned, PositionsExtended, Saved, Started, ignore
from linearize.jobs.findings import Findings
from linearize.jobs.presets import check_preset
from linearize.jobs.search import CARRIER, check_search, choose_plan, record_of
from linearize.jobs.train import (
    align_behind_stage_one,
    alignment_record,
    data_names,
    distillation_record,
    run_stage_one,
    without_heads,
)
from linearize.loading import Loaded, load_model
from linearize.modeling.model import kernel_parameters
from linearize.modeling.plan import Plan
from linearize.options import name_of, on_disk, recorded
from linearize.registry import kernel_info, make_config
from linearize.surgery.apply import convert_model
from linearize.surgery.inputs import read_inputs
from linearize.surgery.plan import plan
from linearize.surgery.plan_file import apply_file, read_plan
from linearize.surgery.positions import current_length, extend_processor, tokens_of_image_size

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from linearize.alignment.loop import AlignResult
    from linearize.distillation.loop import DistillResult
    from linearize.surgery.positions import PositionReport


HEAD_BATCHES = 2
"""Held-out batches that heads are judged on."""


@dataclass
class ConvertResult:
    """What a conversion, or a further distillation, did."""

    output: Path
    plan: Plan
    distillation: DistillResult | None
    positions: PositionReport | None
    data: str | None
    parameters_added: int
    seconds: float
    alignment: AlignResult | None = None
    findings: Findings | None = None

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "output": str(self.output),
            "plan": self.plan.to_dict(),
            "positions": None if self.positions is None else asdict(self.positions),
            "data": self.data,
            "parameters_added": self.parameters_added,
            "distillation": None if self.distillation is None else distillation_record(self.distillation),
            "alignment": None if self.alignment is None else alignment_record(self.alignment),
            "seconds": self.seconds,
            "findings": None if self.findings is None else self.findings.to_dict(),
        }


def convert_checkpoint(job: ConvertJob, on_event: Callback = ignore) -> ConvertResult:
    """Convert a checkpoint and save the result, all or nothing.

    Args:
        job: what to do.
        on_event: called with what happens.

    Raises:
        LinearizeError: one of its children, for everything the user can put right; nothing is written then.
    """
    with reserved(job):
        context, decided = open_conversion(job, on_event)
        make_room(context)
        if job.kernel == AUTO:
            decided = search_and_put_in(context, decided)
        run_stage_one(context, job.distill)
        align_behind_stage_one(context, job.align)
        return save_result(context, decided)


def open_conversion(job: ConvertJob, on_event: Callback) -> tuple[Context, Plan]:
    """Do what comes before the first step: the model is loaded and its kernels put in, and the data is open.

    Where a search is to choose the kernels (`search_and_put_in`), the model is not converted yet.
    """
    check_kernel(job)
    loaded, decided, inputs = make_plan(job)
    context = Context(job, loaded, on_event, provenance=_made_from(job), example_inputs=inputs)
    length = job.distill_length or usual_length(loaded)
    if job.kernel == AUTO:
        # The search is over before positions are extended (`put_in_kernels`); longer rows are for what comes after it.
        shorter = length if job.max_length is None else within(loaded, length)
        open_data(context, shorter, f"a kernel other than {AUTO}, {SKIP}")
        return context, decided
    if job.plan is not None:
        file = read_plan(job.plan)
        decided = apply_file(loaded.model, decided, file, longest_input(job, loaded))
        context.provenance["plan"] = {"why": {str(number): why for number, why in file.why.items()}}
    on_event(Planned(decided))
    put_in_kernels(context, decided)
    if job.distill.steps or job.align.steps or job.softmax_heads_count:
        # Now that the model has its positions: rows may be as long as it takes.
        open_data(context, length, SKIP)
    if job.softmax_heads_count:
        on_event(Started("finding the heads that need softmax"))
        rows = context.source.holdout_batches()[:HEAD_BATCHES]
        decided = keep_heads(loaded.model, decided, job.softmax_heads_count, rows)
        on_event(Planned(decided))
    return context, decided


def search_and_put_in(context: Context, base: Plan) -> Plan:
    """Search the plan, carry it out, and begin with what the search has taught the kernels."""
    job = context.job
    assert isinstance(job, ConvertJob)
    result = choose_plan(context, job.search, base, longest_input(job, context.loaded))
    context.provenance["search"] = record_of(result)
    context.on_event(Planned(result.plan))
    put_in_kernels(context, result.plan)
    result.load_kernels(context.loaded.model)
    return result.plan


def check_kernel(job: ConvertJob) -> None:
    """Refuse an unknown kernel or argument before the first slow step.

    Raises:
        ConfigError: if there is one.
    """
    if job.plan is not None:
        read_plan(job.plan)
    elif job.kernel == AUTO:
        check_search(job)
    elif job.kernel is not None:
        make_config(kernel_info(job.kernel), job.kernel_args)


def make_plan(job: ConvertJob) -> tuple[Loaded, Plan, Mapping[str, Tensor] | None]:
    """Load the model and plan its conversion; nothing is changed or written.

    Returns:
        The model, the plan, and the inputs of trial runs where the job names a file of them.
    """
    loaded = load_model(job.model, task=job.task, device=first_device(job), revision=job.revision)
    takes = current_length(loaded.model)
    if job.max_length is not None and takes is not None and job.max_length < takes:
        raise ConfigError(
            f"max_length: got {job.max_length}, but {job.model!r} takes {takes:,} tokens already; choose a larger one, "
            "or leave --max-length out"
        )
    inputs = None if job.example_inputs is None else read_inputs(job.example_inputs, loaded.model)
    decided = plan_of(job, loaded.model, longest_input(job, loaded), inputs)
    check_preset(job.preset, job.model, [layer.shape.causal for layer in decided.layers if layer.index is not None])
    return loaded, decided, inputs


def plan_of(
    job: ConvertJob, model: PreTrainedModel, longest: int | None, inputs: Mapping[str, Tensor] | None = None
) -> Plan:
    """Plan the conversion of a loaded model for inputs of up to `longest` tokens; None: as many as it takes now."""
    return plan(
        model,
        # Something for every layer, until its kernel is chosen.
        CARRIER if job.kernel == AUTO or job.plan is not None else job.kernel,
        job.kernel_args,
        layers=job.layers,
        keep_softmax=job.keep_softmax,
        window=job.window,
        sinks=job.sinks,
        exact_keys=job.exact_keys,
        scale=job.scale,
        softmax_heads=job.keep_softmax_heads if job.softmax_heads_count is None else None,
        max_length=longest,
        seed=job.seed,
        local_as_full=job.local_as_full,
        example_inputs=inputs,
    )


def longest_input(job: ConvertJob, loaded: Loaded) -> int | None:
    """Return the tokens of the longest input that the result shall take; None: as many as the model takes now.

    Raises:
        ConfigError: if a size of images is given that is smaller than now or no multiple of the patches', or for a
            model that reads none.
    """
    if job.image_size is None:
        return job.max_length
    if loaded.modality != "image":
        raise ConfigError(
            f"image-size: got {job.image_size}, but {job.model!r} reads {loaded.modality}; give --max-length, in tokens"
        )
    return tokens_of_image_size(loaded.model, job.image_size)


def put_in_kernels(context: Context, decided: Plan) -> None:
    """Carry the plan out, with longer inputs where they were asked for."""
    job, loaded = context.job, context.loaded
    assert isinstance(job, ConvertJob)
    report = convert_model(
        loaded.model,
        decided,
        max_length=longest_input(job, loaded),
        positions=job.positions,
        example_inputs=context.example_inputs,
    )
    if report is not None:
        context.positions = report
        if loaded.processor is not None:
            loaded.processor = extend_processor(loaded.processor, report, loaded.model)
        context.on_event(PositionsExtended(report))
        if context.source is not None and job.distill_length is not None:
            # A search has read rows of the old length.
            open_data(context, job.distill_length, SKIP)
    loaded.embedder = with_length(loaded.embedder, job.max_length)


def _made_from(job: ConvertJob) -> dict[str, object]:
    # A folder's name alone must not be taken for a name on the Hub later.
    local = on_disk(job.model)
    found = {"base_model": name_of(job.model), "base_is_local": local, "max_length": job.max_length}
    found |= {} if job.image_size is None else {"image_size": job.image_size}
    return found | {"options": recorded(job), "commands": [command_of("convert", job, travels=True)]}


def save_result(context: Context, decided: Plan) -> ConvertResult:
    """Write the checkpoint with what was done to it.

    Raises:
        TrainingError: if the alignment had to stop; the checkpoint holds what was learned before.
    """
    job = context.job
    assert isinstance(job, StageOneJob)
    added = sum(p.numel() for p in kernel_parameters(context.loaded.model))
    description = None if context.source is None else context.source.description
    done, aligned = context.distillation, context.alignment
    result = ConvertResult(Path(context.target), decided, done, context.positions, description, added, 0.0, aligned)
    record = context.provenance
    if done is not None:
        record = record | _stage_one_record(job, done)
    if context.merit is not None:
        record = record | {"kernel_merit": asdict(context.merit)}
    if aligned is not None and isinstance(job, ConvertJob):
        record = record | {"alignment": alignment_record(aligned, config=job.align)}
    record = record | longest_row(context)
    lines = log_lines(STAGE_ONE, [] if done is None else done.history, context.earlier)
    write(context, record, log_file(ALIGNMENT, [] if aligned is None else aligned.history, lines))
    result.seconds = context.seconds
    context.on_event(Saved(result.output))
    if context.failure is not None:
        raise TrainingError(f"{context.failure}; {str(result.output)!r} holds that state") from context.failure
    result.findings = after_training(context, decided)
    context.on_event(Concluded(result.findings))
    return result


def _stage_one_record(job: StageOneJob, result: DistillResult) -> dict[str, object]:
    record = without_heads(distillation_record(result))
    if not isinstance(job, ConvertJob):
        # A conversion's own options stand beside this.
        record["options"] = recorded(job)
    return {
        "dataset": data_names(job.data),
        "batch_size": job.data.batch_size,
        "learning_rate": job.distill.learning_rate,
        "seed": job.seed,
        "distillation": record,
    }
