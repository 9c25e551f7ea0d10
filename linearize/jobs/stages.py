"""Steps shared by the jobs that train kernels: output, data and states, stage one, the alignment, and saving."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from linearize.attention.parts import exact_tokens
from linearize.checkpoint.fingerprint import MODEL_WEIGHTS, check_same, fingerprint, weights_digest
from linearize.checkpoint.loading import Loaded, move, pooling, quiet
from linearize.checkpoint.output import check_room, check_target, claim
from linearize.checkpoint.provenance import add_command
from linearize.checkpoint.save import save, size_of
from linearize.core.errors import CheckpointError, TrainingError
from linearize.core.options import name_of
from linearize.core.parsing import user_path
from linearize.core.registry import Values, kernel_info
from linearize.data.config import DataConfig
from linearize.fidelity.ablate import KernelMerit, kernel_merit
from linearize.jobs.config import AlignJob, ConvertJob, StageOneJob, TrainingJob
from linearize.jobs.events import Aligned, Callback, DataOpened, Distilled, Noted, Started, StepDone
from linearize.modeling.offload import CHANGES
from linearize.modeling.plan import Plan
from linearize.modeling.portable import why_not
from linearize.training.alignment.config import AlignConfig
from linearize.training.alignment.loop import AlignResult, AlignStep, align
from linearize.training.processes import check_launcher, is_main, machines_used, several, under_fsdp, wait_for_all
from linearize.training.run import fade_beyond, longest_row
from linearize.training.sharding import check_settings, check_tied
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.loop import DistillResult, StepReport, batches_for, distill, within
from linearize.training.stage_one.quantized import check_quantized
from linearize.training.states import RunState, StateFolder, keep_states
from linearize.training.trackers import check_report_to, reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.conversion.attentions import Trial
    from linearize.conversion.layers import ConversionConfig
    from linearize.conversion.positions import PositionReport
    from linearize.jobs.task_config import TuneJob
    from linearize.kernel_search.result import SearchResult

SKIP = "--distill-steps 0 --align-steps 0"
"""Options with which a conversion needs no data."""


@dataclass
class Context:
    """A running job; its steps fill it in.

    Attributes:
        job: the options.
        loaded: the model with its processor.
        plan: the plan of its conversion.
        on_event: called with every event.
        provenance: the checkpoint's record of how it was made.
        earlier: the log of the checkpoint that the job started from.
        source: the data; None if nothing is trained.
        longest_seen: tokens of the longest held-out row; None if there is no training text.
        positions: how positions were extended, or None.
        teacher: the model to align with; None if it is the checkpoint's own softmax.
        conversion: options of the conversion, and the trial runs of the original if it was not moved since.
        searched: result of the search for a plan, or None.
        distillation: result of stage one, or None.
        alignment: result of the alignment, or None.
        choices: what a run with states chose before the first step, as plain data (see `choose`).
        choosing: seconds that each of these choices took.
        trial: whether this is a dry run, which chooses with less computation.
        merit: the benefit of the kernels over their windows alone after stage one, or None.
        failure: why the alignment failed, if the result of stage one is saved nevertheless.
        start: when the job began.
    """

    job: TrainingJob
    loaded: Loaded
    plan: Plan
    on_event: Callback
    provenance: Values = field(default_factory=dict)
    earlier: list[dict[str, object]] = field(default_factory=list)
    source: Any = None
    longest_seen: int | None = None
    positions: PositionReport | None = None
    teacher: PreTrainedModel | None = None
    conversion: tuple[ConversionConfig, Trial | None] | None = None
    searched: SearchResult | None = None
    distillation: DistillResult | None = None
    alignment: AlignResult | None = None
    choices: dict[str, Values] = field(default_factory=dict)
    choosing: dict[str, float] = field(default_factory=dict)
    trial: bool = False
    merit: KernelMerit | None = None
    failure: TrainingError | None = None
    start: float = field(default_factory=time.perf_counter)

    @property
    def target(self) -> str:
        """The output folder, without a slash at its end."""
        return str(self.job.target()).rstrip("/")


@contextlib.contextmanager
def reserved(job: StageOneJob | AlignJob | TuneJob) -> Iterator[None]:
    """Check the output, the state folders and the trackers, and lock the output; only the main process writes."""
    target, sources = job.target(), job.sources()
    resume = job.stage.resume if isinstance(job, TrainingJob) else job.resume
    replaces = job.overwrite or getattr(job, "in_place", False)
    if resume and not replaces and (user_path(target) / "config.json").is_file():
        raise CheckpointError(
            f"output {str(target)!r} holds a finished model, so there is nothing to resume; to run again, choose "
            "another folder or pass --overwrite"
        )
    check_target(target, overwrite=job.overwrite, sources=sources)
    with claim(target, overwrite=job.overwrite, sources=sources) if is_main() else contextlib.nullcontext():
        if isinstance(job, TrainingJob):
            check_start(job)
        yield


def states_of(job: TrainingJob) -> list[StateFolder]:
    """Return the state folders; empty if the job keeps no states."""
    folders = [getattr(job, stage).folder for stage in job.endings]
    return [StateFolder(folder, job.stage.keep) for folder in folders if folder is not None]


def resumes(job: TrainingJob) -> bool:
    """Tell whether the job continues an interrupted run: with --resume, if that run left states or choices."""
    return job.stage.resume and any(states.folder.exists() for states in states_of(job))


def check_start(job: StageOneJob | AlignJob) -> None:
    """Check that a job can start: no states of an interrupted run are in its way, and its trackers are installed.

    Raises:
        ConfigError: as in `check_states`, `check_launcher`, `check_settings` and `check_quantized`, or for a tracker
            that is unknown or not installed.
        CheckpointError: as in `check_states`.
    """
    check_states(job)
    check_report_to(job.report_to)
    check_launcher("stage one" if isinstance(job, StageOneJob) else "alignment")
    if aligns(job) and under_fsdp():
        check_settings("alignment", job.align.precision)
    if isinstance(job, StageOneJob) and job.distill.quantize_frozen is not None:
        check_quantized(job.model)


def check_states(job: TrainingJob) -> None:
    """Refuse, in the main process, to start a run where an interrupted one left its states.

    Raises:
        ConfigError: if there are states and the job neither resumes nor overwrites.
        CheckpointError: if a state folder holds something else.
    """
    for folder in states_of(job) if is_main() and not job.stage.resume else []:
        folder.check_free(overwrite=job.overwrite)


def choose(context: Context, what: str, asked: object, now: Callable[[], Values]) -> Values:
    """Return the choice for a part of the plan; a resumed run keeps the choice that it made before.

    A choice takes minutes, and another machine or number of threads can change it by rounding.

    Args:
        context: the job; its data are open.
        what: the part's name.
        asked: the option for it.
        now: makes the choice and returns it as plain data.

    Raises:
        ConfigError: if the resumed run was started with another plan, option or other data.
    """
    job, source = context.job, context.source

    def choice() -> Values:
        start = time.perf_counter()
        chosen = now()
        context.choosing[what] = time.perf_counter() - start
        return chosen

    if not job.keeps_states:
        return choice()
    options = {what: asked, **{f"data {name}": value for name, value in source.options.items()}}
    identity = fingerprint(data=source, options={**options, "plan": context.plan.to_dict()})
    identity[MODEL_WEIGHTS] = weights_digest(context.loaded.model, kernel=False)
    kept = states_of(job)[0].choices().get(what) if job.stage.resume else None
    # As with a file that cannot be read, a choice that is not whole is made again.
    if not isinstance(kept, dict) or not isinstance(kept.get("fingerprint"), dict) or "plan" not in kept:
        kept = {**choice(), "fingerprint": identity}
    else:
        # Earlier versions did not record the weights.
        known = kept["fingerprint"]
        check_same(known, {name: value for name, value in identity.items() if name in known or name != MODEL_WEIGHTS})
    context.choices[what] = kept
    return kept


def make_room(context: Context) -> None:
    """Check the free disk space, remove old states and write the choices: the last step before training.

    Raises:
        ConfigError: if FSDP cannot shard the model that should be aligned.
    """
    if under_fsdp() and aligns(context.job):
        check_tied(context.loaded.model)
    check_space(context.loaded.model, context.target, trained=aligns(context.job))
    if is_main():
        clear_states(context.job)
    keep_choices(context)


def check_space(model: PreTrainedModel, target: str | Path, *, trained: bool) -> None:
    """Check, in the main process, that the disk has room for the result; new values of weights in files go there too.

    Args:
        model: the model that will be saved.
        target: the output folder.
        trained: whether the model's own weights change.

    Raises:
        CheckpointError: if there is not enough room.
    """
    vars(model)[CHANGES] = Path(target).parent
    if is_main():
        check_room(target, size_of(model, trained=trained))


def keep_choices(context: Context) -> None:
    """Write what was chosen into the first state folder, in the main process."""
    if context.choices and is_main():
        states_of(context.job)[0].save_choices(context.choices)


def clear_states(job: TrainingJob) -> None:
    """Remove the states of an earlier run, in the main process, unless the job resumes it."""
    for folder in states_of(job) if is_main() and not job.stage.resume else []:
        folder.remove()


def drop_states(job: TrainingJob) -> None:
    """Remove the states of a finished run, in the main process."""
    for folder in states_of(job) if is_main() else []:
        # A folder that holds something else, or that cannot be removed, is kept.
        with contextlib.suppress(CheckpointError, OSError):
            folder.remove()


def first_device(job: TrainingJob) -> str:
    """Return the device to load a model on; with several processes, each loads it into host memory."""
    return "cpu" if several() and job.device == "auto" else job.device


def copies(job: TrainingJob) -> bool:
    """Tell whether only copies of the model run, which read its weights from their files."""
    return under_fsdp() or (isinstance(job, StageOneJob) and job.distill.quantize_frozen is not None)


def aligns(job: TrainingJob) -> TypeGuard[ConvertJob | AlignJob]:
    """Tell whether a job has an alignment."""
    return isinstance(job, ConvertJob | AlignJob) and job.align.steps > 0


def open_data(context: Context, length: int | None, skip: str) -> None:
    """Open the data, and send notes if rows are cut, or too short to train kernels or to choose the best state.

    Args:
        context: the job; its `source` and `longest_seen` are set.
        length: tokens per row, as in `batches_for`.
        skip: the option that avoids reading data, as in `batches_for`.
    """
    if length is not None and (most := within(context.loaded, length)) < length:
        text = f"Rows are cut to {most:,} tokens, the most the model takes (got {length:,}); convert with --max-length"
        context.on_event(Noted(text))
    context.source = batches_for(context.loaded, context.job.data, length, skip)
    context.on_event(DataOpened(context.source.description))
    most = context.source.options["max_length"]
    if context.loaded.modality == "text":
        context.longest_seen = longest_row(context.source.holdout_batches())
    seen = context.longest_seen
    if seen is None:
        return
    full = context.source.row_length
    if context.source.options["packing"] and full > seen:
        text = f"Held-out rows have up to {seen:,} tokens, training rows {most:,}; hold out more texts (--holdout)"
        context.on_event(Noted(f"{text}, as the best state is chosen on them"))
    seen = max(seen, full)
    longer = f"give a larger --{context.job.row_length.replace('_', '-')}" if seen >= most else "train on longer texts"
    note_exact_rows(context.on_event, context.plan, seen, longer)


def note_exact_rows(on_event: Callback, plan: Plan, tokens: int, advice: str) -> None:
    """Send a note with advice if attention is exact in all converted layers for rows of `tokens` tokens."""
    if (text := exact_rows(plan, tokens)) is not None:
        on_event(Noted(f"{text}, so kernels learn nothing; {advice}"))


def exact_rows(plan: Plan, tokens: int) -> str | None:
    """Say that attention is exact in all converted layers for rows of `tokens` tokens; None if it is not."""
    for layer in plan.converted:
        if tokens > exact_tokens(layer.hybrid, layer.shape.causal):
            return None
    return f"Rows of up to {tokens:,} tokens fit into the window, where attention is exact" if plan.converted else None


def run_stage_one(context: Context, config: DistillConfig) -> None:
    """Train the kernels to imitate softmax, if there are data, steps and a kernel."""
    if all(kernel_info(layer.kernel).needs_window for layer in context.plan.converted):
        context.on_event(Noted("Stage one is left out: without a kernel there is nothing to train"))
        return
    if context.source is None:
        return
    if not config.steps:
        # A search, or a choice of heads, has read these rows.
        fade_beyond(context.loaded.model, context.source)
        return
    with _reporter(context, "stage_one") as on_step:
        context.distillation = distill(context.loaded.model, context.source, config, on_step=on_step)
    context.on_event(Distilled(context.distillation))
    if not several():
        context.merit = kernel_merit(context.loaded.model, context.source.holdout_batches())


def run_alignment(context: Context, config: AlignConfig) -> None:
    """Train the whole model to match its teacher."""
    if (how := pooling(context.loaded.embedder)[0]) != "mean":
        config = replace(config, pooling=how)
    context.on_event(Started("comparing with the original"))
    with _reporter(context, "alignment") as on_step:
        model, teacher = context.loaded.model, context.teacher
        context.alignment = align(model, context.source, config, teacher=teacher, on_step=on_step)
    context.on_event(Aligned(context.alignment))


def _reporter(context: Context, tag: str) -> AbstractContextManager[Callable[[StepReport | AlignStep], None]]:
    """Return a context with a function that reports every step to the trackers and the caller."""
    assert isinstance(context.job, StageOneJob | AlignJob)
    names = context.job.report_to if is_main() else "none"
    return reporter(names, f"{context.target}.tensorboard", tag, lambda report: context.on_event(StepDone(report)))


def finished_states(context: Context) -> dict[str, RunState | None]:
    """Return the last states of the stages that are done, by the ending of their folder's name."""
    results = {"search": context.searched, "stage1": context.distillation, "align": context.alignment}
    return {ending: result.state for ending, result in results.items() if result is not None}


@contextlib.contextmanager
def finished_kept(context: Context) -> Iterator[None]:
    """On Ctrl-C write the states of the stages that are done, so that a resumed run begins after them."""
    try:
        yield
    except KeyboardInterrupt:
        for ending, state in finished_states(context).items() if is_main() else ():
            if state is not None:
                with contextlib.suppress(CheckpointError, OSError):
                    StateFolder(f"{context.target}.{ending}", 1).save(state.step, state)
        raise


def write(context: Context, files: Mapping[str, str | bytes]) -> None:
    """Save the checkpoint with its provenance and its log, and remove the states of the run.

    Raises:
        NotSavedError: if it cannot be written; the result is then kept as states.
    """
    loaded, job, provenance = context.loaded, context.job, context.provenance
    provenance |= add_command(provenance)
    if context.longest_seen is not None and context.source is not None:
        before = provenance.get("longest_row")
        # The held-out rows may be few and short.
        full = context.source.row_length
        provenance["longest_row"] = max(context.longest_seen, full, before if isinstance(before, int) else 0)
    move(loaded.model, "cpu")
    if is_main():
        try:
            with quiet(), warnings.catch_warnings():
                # The note below says the same.
                warnings.filterwarnings("ignore", message="kernel .* is not part of linearize")
                save(
                    loaded.model,
                    context.target,
                    processor=[*loaded.whole, loaded.processor],
                    overwrite=job.overwrite,
                    provenance=provenance,
                    extra_files={**files, **loaded.embedder},
                )
        except CheckpointError as error:
            raise keep_states(error, context.target, finished_states(context)) from error
        if reason := why_not(Plan.from_dict(loaded.model.config.linearize)):
            context.on_event(Noted(f"Loading the checkpoint needs more code: {reason}."))
        drop_states(job)
    wait_for_all()


def _record(result: DistillResult | AlignResult, before: object, after: object) -> Values:
    """Return a stage's figures, and its measurements before and after, which are plain data."""
    record = {name: getattr(result, name) for name in ("steps", "best_step", "stopped", "seconds")}
    return record | {"hardware": machines_used(), "before": before, "after": after}


def distillation_record(result: DistillResult) -> Values:
    """Return the result of stage one as plain data."""
    return {"held_out_loss": result.held_out, **_record(result, result.before.to_dict(), result.after.to_dict())}


def without_heads(record: Values) -> Values:
    """Return a record of stage one without the figures of every head, for the checkpoint's own config."""
    brief = dict(record)
    for side in ("before", "after"):
        layers = [{k: v for k, v in layer.items() if k != "heads"} for layer in record[side]["layers"]]
        brief[side] = {"mean": record[side]["mean"], "layers": layers}
    return brief


def alignment_record(result: AlignResult, config: AlignConfig | None = None) -> Values:
    """Return the result of an alignment as plain data, with those of its options that a checkpoint records."""
    kept = ("train", "blockwise", "learning_rate", "kernel_learning_rate", "seed") if config is not None else ()
    record = _record(result, asdict(result.before), asdict(result.after))
    return record | {name: getattr(config, name) for name in kept}


def data_names(data: DataConfig) -> str | None:
    """Return the names of the data sets; None for the built-in data."""
    return ", ".join(name_of(name) for name, _ in data.sources) or None
