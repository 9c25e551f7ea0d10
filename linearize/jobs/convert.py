"""`convert` from end to end: load, plan, extend, distil, align, save; also `distill` and `align` alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from linearize.attention.parts import check_values
from linearize.checkpoint.loading import STREAM, Loaded, load_converted, load_model, model_type, with_length
from linearize.checkpoint.provenance import ALIGNMENT, STAGE_ONE, Provenance, log_file, log_lines, read_log
from linearize.conversion.attentions import Trial
from linearize.conversion.inputs import read_inputs
from linearize.conversion.layers import ConversionConfig
from linearize.conversion.plan import change_hybrids, convert_model, plan_and_trial
from linearize.conversion.plan_file import apply_file, check_plan_target, read_plan, write_plan
from linearize.conversion.positions import PositionReport, current_length, extend_processor, tokens_of_image_size
from linearize.core.errors import ConfigError, TrainingError
from linearize.core.options import name_of, recorded
from linearize.core.parsing import finite
from linearize.core.registry import Values, kernel_info, make_config
from linearize.fidelity.heads import POINTS, keep_heads, too_many_heads
from linearize.jobs import stages
from linearize.jobs.advice import after_training
from linearize.jobs.config import AlignJob, ConvertJob, DistillJob, StageOneJob
from linearize.jobs.events import Callback, Concluded, Findings, HeadsChosen, Noted, Planned, Saved, ignore
from linearize.jobs.presets import AUTO, check_preset, fitting, width_of
from linearize.jobs.stages import SKIP, Context
from linearize.modeling.model import kernel_parameters
from linearize.modeling.plan import Plan
from linearize.training.alignment.loop import AlignResult
from linearize.training.alignment.pair import check_teacher
from linearize.training.processes import check_alone, is_main, under_fsdp
from linearize.training.stage_one.loop import DistillResult, within

STAND_IN = "elu"
"""Placeholder kernel of every layer until a search or a plan file chooses one."""
HEAD_BATCHES = 2
"""Number of held-out batches for choosing the heads that keep softmax."""


@dataclass
class ConvertResult:
    """Result of a conversion, a continued stage one or an alignment.

    Attributes:
        output: the folder.
        plan: what became of every attention.
        distillation: stage one's result; None if it did not run.
        positions: how positions were extended; None if they were not.
        data: a description of the data; None if nothing was trained.
        parameters_added: number of learnable parameters in the kernels.
        seconds: duration.
        alignment: the alignment's result; None if it did not run.
        findings: what a stage prints at its end: the worst layer, the measured length, the next command.
    """

    output: Path
    plan: Plan
    distillation: DistillResult | None
    positions: PositionReport | None
    data: str | None
    parameters_added: int
    seconds: float
    alignment: AlignResult | None
    findings: Findings

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "output": str(self.output),
            "plan": self.plan.to_dict(),
            "positions": None if self.positions is None else asdict(self.positions),
            "data": self.data,
            "parameters_added": self.parameters_added,
            "distillation": None if self.distillation is None else stages.distillation_record(self.distillation),
            "alignment": None if self.alignment is None else stages.alignment_record(self.alignment),
            "seconds": self.seconds,
            "findings": asdict(self.findings),
        }


def convert_checkpoint(job: ConvertJob, on_event: Callback = ignore) -> ConvertResult:
    """Convert a checkpoint and save the result atomically.

    Args:
        job: the options.
        on_event: called with every event.

    Raises:
        TrainingError: if training failed; if that was the alignment, the result of stage one is saved nevertheless.
        LinearizeError: another subclass of it, for everything the user can correct; nothing is written then.
    """
    with stages.reserved(job):
        context = open_conversion(job, on_event)
        stages.make_room(context)
        if job.kernel == AUTO:
            from linearize.jobs.search import choose_plan

            result = choose_plan(context, longest_input(job, context.loaded))
            context.provenance["search"] = finite(result.to_dict())
            context.plan = result.plan
            on_event(Planned(result.plan))
            put_in_kernels(context)
            # Stage one starts from the kernels that the search trained.
            result.load_kernels(context.loaded.model)
            choose_heads(context)
            stages.keep_choices(context)
        with stages.finished_kept(context):
            stages.run_stage_one(context, job.distill)
            if context.source is not None and job.align.steps:
                try:
                    stages.run_alignment(context, job.align)
                except TrainingError as error:
                    # The result of stage one is saved nevertheless.
                    context.failure = error
        return save_result(context)


def distill_checkpoint(job: DistillJob, on_event: Callback = ignore) -> ConvertResult:
    """Continue stage one on a converted checkpoint and save the result atomically.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct; nothing is written then.
    """
    return _continue(job, on_event, lambda context: stages.run_stage_one(context, job.distill))


def align_checkpoint(job: AlignJob, on_event: Callback = ignore) -> ConvertResult:
    """Align a converted checkpoint with its original and save the result atomically.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct; nothing is written then.
    """
    return _continue(job, on_event, lambda context: stages.run_alignment(context, job.align))


def _continue(job: DistillJob | AlignJob, on_event: Callback, train: Callable[[Context], None]) -> ConvertResult:
    with stages.reserved(job):
        context = open_converted(job, on_event)
        stages.make_room(context)
        with stages.finished_kept(context):
            train(context)
        return save_result(context)


def open_converted(job: DistillJob | AlignJob, on_event: Callback) -> Context:
    """Load a converted checkpoint with its plan, provenance and log, and open the data: all before the first step.

    Raises:
        ConfigError: for stage one, if the checkpoint was aligned, as its own softmax is then no longer the original's;
            for the alignment, if its weights were trained and no teacher is named, or the teacher does not fit.
    """
    earlier = read_log(job.model)
    loaded = load_converted(job.model, device=stages.first_device(job), in_files=stages.copies(job))
    section = loaded.model.config.linearize
    provenance = dict(section.get("provenance") or {})
    if tuned := Provenance(provenance).part("finetuning").values:
        from linearize.training.stage_two.save import without_scores

        # The scores are those of the weights before this stage.
        provenance["finetuning"] = without_scores(tuned)
    context = Context(job, loaded, Plan.from_dict(section), on_event, provenance, earlier)
    if isinstance(job, AlignJob):
        open_teacher(context, job)
        return context
    on_event(Planned(context.plan))
    if Provenance(provenance).weights_were_trained and "finetuning" not in provenance:
        raise ConfigError(
            f"{job.model!r} was aligned with its original, so its own softmax, which stage one imitates, is no longer "
            f"the original's; continue with: linearize align {job.model} --teacher ORIGINAL"
        )
    stages.open_data(context, job.distill_length, SKIP)
    return context


def open_teacher(context: Context, job: AlignJob) -> None:
    """Load the teacher, if one is named, and open the data of an alignment."""
    from linearize.training.stage_two.load import check_processor

    loaded = context.loaded
    if job.teacher is not None:
        if model_type(job.teacher) == "linearize":
            raise ConfigError(f"teacher: {job.teacher!r} is itself converted; give the original that it was made from")
        original = load_model(job.teacher, in_files=stages.copies(job))
        context.teacher = original.model
        check_teacher(loaded.model, original.model)
        if hasattr(loaded.processor, "get_vocab") and hasattr(original.processor, "get_vocab"):
            check_processor(job.teacher, original.processor, loaded.processor)
    elif Provenance(context.provenance).weights_were_trained:
        tuned = "finetuning" in context.provenance
        name = "TUNED-ORIGINAL" if tuned else context.provenance.get("base_model", "ORIGINAL")
        raise ConfigError(
            f"this checkpoint was {'tuned on a task' if tuned else 'aligned'}, so its own softmax is no longer the "
            f"original's; name the model to align it with: --teacher {name}"
        )
    stages.open_data(context, job.length, "a model that reads text or images")
    length = context.source.options["max_length"]
    most = current_length(context.teacher) if context.teacher is not None and loaded.modality == "text" else None
    if most is not None and length > most:
        raise ConfigError(
            f"teacher: got rows of {length} tokens, but it takes at most {most}; lower --length, or leave --teacher "
            "out: the checkpoint's own softmax has the extended positions"
        )


def open_conversion(job: ConvertJob, on_event: Callback, *, trial: bool = False) -> Context:
    """Load the model, install the kernels and open the data: everything before the first step.

    With `--kernel auto` the model is not converted yet, and the plan is the starting point of the search.

    Args:
        job: the options.
        on_event: called with every event.
        trial: whether this is a dry run, which chooses the heads in a single step.
    """
    check_kernel(job)
    loaded, decided, conversion = make_plan(job)
    is_local = os.path.exists(job.model)
    made_from = {"base_model": name_of(job.model), "base_is_local": is_local, "max_length": job.max_length}
    if job.image_size is not None:
        made_from["image_size"] = job.image_size
    context = Context(
        job, loaded, decided, on_event, {**made_from, "options": recorded(job)}, conversion=conversion, trial=trial
    )
    length = job.distill_length or within(loaded)
    # Kernels and windows are chosen on rows that the model takes now; positions are extended later (`put_in_kernels`).
    shorter = length if job.max_length is None else within(loaded, length)
    if job.kernel == AUTO:
        stages.open_data(context, shorter, f"a kernel other than {AUTO}, {SKIP}")
        return context
    if job.plan is not None:
        file = read_plan(job.plan)
        context.plan = apply_file(loaded.model, decided, file, longest_input(job, loaded))
        context.provenance["plan"] = {"why": {str(number): why for number, why in file.why.items()}}
    if job.chooses_windows:
        from linearize.kernel_search.windows import choose_windows

        stages.open_data(context, shorter, "a number to --window")

        def windows() -> Values:
            plan, why, error, reference = choose_windows(loaded.model, context.source, context.plan, on_event)
            text = (
                f"Windows per layer: the last hidden state has an error of {error:.3f} before training; with the same "
                f"window in every layer, and at least as much state, it has {reference:.3f}"
            )
            reasons = {str(number): reason for number, reason in why.items()}
            return {"plan": plan.to_dict(), "why": reasons, "text": text}

        chosen = stages.choose(context, "window", job.window, windows)
        context.provenance["plan"] = {"why": chosen.get("why", {})}
        on_event(Noted(f"{chosen.get('text', 'Windows per layer: as chosen before')}."))
        context.plan = Plan.from_dict(chosen["plan"])
        if job.plan_out is not None and is_main():
            write_plan(
                job.plan_out, context.plan, {int(number): text for number, text in chosen.get("why", {}).items()}
            )
    on_event(Planned(context.plan))
    put_in_kernels(context)
    if context.source is None and (job.distill.steps or job.align.steps or job.chooses_heads):
        # The positions are extended now, so rows may be longer.
        stages.open_data(context, length, SKIP)
    choose_heads(context)
    return context


def choose_heads(context: Context) -> None:
    """If the job says how many heads keep softmax, choose the heads that need it most."""
    job = context.job
    assert isinstance(job, ConvertJob)
    if not job.chooses_heads:
        return
    count = job.softmax_heads(sum(layer.shape.heads for layer in context.plan.converted))

    def heads() -> Values:
        rows, long = context.source.holdout_batches()[:HEAD_BATCHES], next(context.source.train_batches())
        model, plan = context.loaded.model, context.plan
        points = 1 if context.trial else POINTS
        kept = keep_heads(model, plan, count, rows, context.on_event, trained_on=long, points=points)
        return {"plan": kept.to_dict()}

    # A resumed run has only the plan: the model does not keep its heads yet.
    kept = Plan.from_dict(stages.choose(context, "keep_softmax_heads", count, heads)["plan"])
    context.plan = change_hybrids(context.loaded.model, {layer.module: layer.hybrid for layer in kept.converted})
    context.on_event(HeadsChosen(context.plan))


def check_kernel(job: ConvertJob) -> None:
    """Check the kernel and its arguments before the model is loaded.

    Raises:
        ConfigError: if the kernel or an argument is unknown or not allowed.
    """
    if job.plan is not None:
        read_plan(job.plan)
    elif job.kernel == AUTO:
        from linearize.jobs.search import check_search

        check_search(job)
    elif job.kernel is not None:
        make_config(kernel_info(job.kernel), job.kernel_args)
    if not job.chooses_windows:
        return
    from linearize.kernel_search.windows import HANDLED

    check_values(job.additions.given, HANDLED, "window: auto")
    if under_fsdp():
        raise ConfigError(
            f"window: got {job.window} under FSDP, expected one device or DDP; convert with --plan FILE.yaml"
        )
    if job.plan_out is not None:
        check_plan_target(job.plan_out, overwrite=job.overwrite or stages.resumes(job))


def make_plan(
    job: ConvertJob, loaded: Loaded | None = None
) -> tuple[Loaded, Plan, tuple[ConversionConfig, Trial | None]]:
    """Load the model, unless it is given, and plan its conversion; nothing is changed or written.

    Returns:
        The model, the plan, and what `convert_model` needs besides them.

    Raises:
        ConfigError: if `max_length` is below what the model takes, no layer suits the preset, or as in `plan`.
        CheckpointError: if the model cannot be loaded.
        UnsupportedModelError: if no attention can be converted.
    """
    if job.stream_blocks:
        check_alone(STREAM)
    if loaded is None:
        device = stages.first_device(job)
        loaded = load_model(
            job.model,
            task=job.task,
            device=device,
            revision=job.revision,
            stream=job.stream_blocks,
            # Heads are chosen with gradients of the whole model.
            in_files=stages.copies(job) and not job.chooses_heads,
        )
    takes = current_length(loaded.model)
    if job.max_length is not None and takes is not None and job.max_length < takes:
        raise ConfigError(
            f"max_length: got {job.max_length}, but {job.model!r} already takes {takes:,} tokens; choose a larger "
            "value, or leave --max-length out"
        )
    inputs = None if job.example_inputs is None else read_inputs(job.example_inputs, loaded.model)
    longest = longest_input(job, loaded)
    config = ConversionConfig(
        STAND_IN if job.kernel == AUTO or job.plan is not None else job.kernel,
        job.kernel_args,
        layers=job.layers,
        keep_softmax=job.keep_softmax,
        **fitting(job.preset, job.additions.given, longest or takes),
        window=width_of(job.window),
        softmax_heads=None if job.chooses_heads else job.keep_softmax_heads,
        max_length=longest,
        positions=job.positions,
        seed=job.seed,
        local_as_full=job.local_as_full,
        example_inputs=inputs,
    )
    decided, trial = plan_and_trial(loaded.model, config)
    check_preset(job.preset, job.model, [layer.shape.causal for layer in decided.layers if layer.index is not None])
    if job.chooses_heads:
        heads = sum(layer.shape.heads for layer in decided.converted)
        if (count := job.softmax_heads(heads)) > heads:
            raise too_many_heads(count, heads)
    # A search may move the model to another device.
    return loaded, decided, (config, None if job.kernel == AUTO else trial)


def longest_input(job: ConvertJob, loaded: Loaded) -> int | None:
    """Return the tokens of the longest input that the result must take; None: the model's current limit.

    Raises:
        ConfigError: if an image size is given for a model that reads no images, is smaller than the current one, or is
            not a multiple of the patch size.
    """
    if job.image_size is None:
        return job.max_length
    if loaded.modality != "image":
        raise ConfigError(
            f"image-size: got {job.image_size}, but {job.model!r} reads {loaded.modality}; give --max-length, in tokens"
        )
    return tokens_of_image_size(loaded.model, job.image_size)


def put_in_kernels(context: Context) -> None:
    """Carry out the plan, and extend the positions if longer inputs were requested."""
    job, loaded = context.job, context.loaded
    assert isinstance(job, ConvertJob) and context.conversion is not None
    report = convert_model(loaded.model, context.plan, *context.conversion)
    if report is not None:
        context.positions = report
        if loaded.processor is not None:
            loaded.processor = extend_processor(loaded.processor, report, loaded.model)
        context.on_event(Noted(f"Inputs: {report.note}"))
        if context.source is not None and job.distill_length is not None:
            # A search read rows of the old length.
            stages.open_data(context, job.distill_length, SKIP)
    loaded.embedder = with_length(loaded.embedder, job.max_length)


def save_result(context: Context) -> ConvertResult:
    """Write the checkpoint with a record of how it was made.

    Raises:
        TrainingError: if the alignment failed; the checkpoint then holds the state before the failure.
    """
    job, done, aligned, record = context.job, context.distillation, context.alignment, context.provenance
    data = None if context.source is None else context.source.description
    if done is not None and isinstance(job, StageOneJob):
        distillation = stages.without_heads(stages.distillation_record(done))
        if not isinstance(job, ConvertJob):
            # The options of a conversion are recorded separately.
            distillation["options"] = recorded(job)
        record |= {
            "dataset": stages.data_names(job.data),
            "batch_size": job.data.batch_size,
            "learning_rate": job.distill.learning_rate,
            "seed": job.seed,
            "distillation": distillation,
        }
    if context.merit is not None:
        record["kernel_merit"] = asdict(context.merit)
    if aligned is not None and isinstance(job, ConvertJob | AlignJob):
        record["alignment"] = stages.alignment_record(aligned, job.align)
        if isinstance(job, AlignJob):
            sources = {"teacher": job.teacher and name_of(job.teacher), "dataset": stages.data_names(job.data)}
            record["alignment"] |= {name: source for name, source in sources.items() if source}
            record["alignment"]["options"] = recorded(job)
    lines = context.earlier if done is None else log_lines(STAGE_ONE, done.history, context.earlier)
    stages.write(context, log_file(ALIGNMENT, [] if aligned is None else aligned.history, lines))
    output = Path(context.target)
    context.on_event(Saved(output))
    if context.failure is not None:
        raise TrainingError(f"{context.failure}; {str(output)!r} holds that state") from context.failure
    added = sum(p.numel() for p in kernel_parameters(context.loaded.model))
    seconds, findings = time.perf_counter() - context.start, after_training(context)
    context.on_event(Concluded(findings))
    return ConvertResult(output, context.plan, done, context.positions, data, added, seconds, aligned, findings)
