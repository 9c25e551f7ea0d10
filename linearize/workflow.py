"""The main job from end to end: load, plan, extend, distil, save. The command line calls this and prints."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from linearize.alignment.config import AlignConfig
from linearize.alignment.job import alignment_record, run_alignment
from linearize.conversion_options import ConvertOptions, DistillOptions, StageOneOptions
from linearize.data import DataConfig
from linearize.errors import CheckpointError, ConfigError, TrainingError
from linearize.modeling.plan import Plan

ALIGN_SHARE = 0.4
"""Steps of the alignment unless asked otherwise, as a share of stage one's."""


@dataclass
class ConvertResult:
    """What a conversion, or a further distillation, did."""

    output: Path
    plan: Plan
    distillation: Any
    positions: Any
    data: str | None
    parameters_added: int
    seconds: float
    alignment: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        distilled = None
        if self.distillation is not None:
            d = self.distillation
            distilled = {
                "steps": d.steps,
                "best_step": d.best_step,
                "held_out_loss": d.held_out,
                "stopped": d.stopped,
                "seconds": d.seconds,
                "before": d.before.to_dict(),
                "after": d.after.to_dict(),
            }
        return {
            "output": str(self.output),
            "plan": self.plan.to_dict(),
            "positions": None if self.positions is None else asdict(self.positions),
            "data": self.data,
            "parameters_added": self.parameters_added,
            "distillation": distilled,
            "alignment": None if self.alignment is None else alignment_record(self.alignment),
            "seconds": self.seconds,
        }


Listener = Callable[[str, Any], None]
"""Called with an event's name and its data: "plan" (Plan), "positions", "data" (text), "step" (StepReport) ..."""


def make_plan(options: ConvertOptions) -> tuple[Any, Plan]:
    """Load the model and plan its conversion; nothing is changed or written."""
    from linearize.loading import load_model
    from linearize.surgery.plan import plan

    loaded = load_model(options.model, task=options.task, device=_first_device(options), revision=options.revision)
    decided = plan(
        loaded.model,
        options.kernel,
        options.kernel_args,
        layers=options.layers,
        keep_softmax=options.keep_softmax,
        window=options.window,
        max_length=options.max_length,
        seed=options.seed,
    )
    return loaded, decided


def convert_checkpoint(options: ConvertOptions, listen: Listener | None = None) -> ConvertResult:
    """Convert a checkpoint and save the result, all or nothing.

    Args:
        options: what to do.
        listen: told what happens.

    Raises:
        LinearizeError: one of its children, for everything the user can mend; nothing is written then.
    """
    with _output(options):
        return _convert(options, listen)


def _convert(options: ConvertOptions, listen: Listener | None) -> ConvertResult:
    from linearize.checkpoint.sentence import with_length
    from linearize.registry import kernel_info, make_config
    from linearize.surgery.apply import apply

    tell = listen or (lambda name, data: None)
    start = time.perf_counter()
    # Everything that can be refused is refused before the first slow step.
    if options.kernel is not None:
        make_config(kernel_info(options.kernel), options.kernel_args)
    config = _distill_config(options)
    _align_config(options)
    loaded, plan = make_plan(options)
    tell("plan", plan)
    source = _load_data(options, loaded) if options.distill_steps or _align_config(options).steps else None
    positions = _extend(options, loaded)
    tell("positions", positions)
    loaded.embedder = with_length(loaded.embedder, options.max_length)
    apply(loaded.model, plan)
    # A folder's path is nobody's business; its name alone must not be taken for a name on the Hub later.
    local = Path(options.model).exists()
    made_from = Path(options.model).name if local else options.model
    provenance = {"base_model": made_from, "base_is_local": local, "max_length": options.max_length}
    return _distil_and_save(options, loaded, plan, source, config, positions, provenance, tell, start, [])


def distill_checkpoint(options: DistillOptions, listen: Listener | None = None) -> ConvertResult:
    """Go on with the distillation of a converted checkpoint and save the result, all or nothing.

    Raises:
        LinearizeError: one of its children, for everything the user can mend; nothing is written then.
    """
    with _output(options):
        return _distill(options, listen)


def _distill(options: DistillOptions, listen: Listener | None) -> ConvertResult:
    from linearize.checkpoint.inspect import weights_were_trained
    from linearize.checkpoint.log import read_log
    from linearize.loading import load_converted

    tell = listen or (lambda name, data: None)
    start = time.perf_counter()
    config = _distill_config(options)
    earlier = read_log(options.model)
    loaded = load_converted(options.model, device=_first_device(options))
    plan = Plan.from_dict(loaded.model.config.linearize)
    tell("plan", plan)
    source = _load_data(options, loaded)
    provenance = dict(loaded.model.config.linearize.get("provenance") or {})
    if weights_were_trained(provenance) and "finetuning" not in provenance:
        raise ConfigError(
            f"{options.model!r} was aligned with its original, so that its own softmax, which stage one imitates, is "
            f"no longer the original's; go on with: linearize align {options.model} --teacher ORIGINAL"
        )
    return _distil_and_save(options, loaded, plan, source, config, None, provenance, tell, start, earlier)


def _distil_and_save(
    options: ConvertOptions | DistillOptions,
    loaded: Any,
    plan: Plan,
    source: Any,
    config: Any,
    positions: Any,
    provenance: dict[str, Any],
    tell: Listener,
    start: float,
    earlier: list[dict[str, Any]],
) -> ConvertResult:
    from linearize.distillation.processes import is_main, wait_for_all
    from linearize.distillation.state import keep_states
    from linearize.modeling.model import kernel_parameters

    tell("data", None if source is None else source.description)
    if is_main():
        _make_room(options, loaded.model)
    distillation = _distil(options, loaded, source, config, tell)
    align = _align_config(options)
    alignment, failure = _align(options, loaded, source, align, tell)
    added = sum(p.numel() for p in kernel_parameters(loaded.model))
    description = None if source is None else source.description
    result = ConvertResult(Path(options.target()), plan, distillation, positions, description, added, 0.0, alignment)
    loaded.model.to("cpu")
    if is_main():
        record = provenance | _training(options, result)
        if alignment is not None:
            record["alignment"] = alignment_record(alignment, config=align)
        try:
            _save(options, loaded, record, _log_files(result, earlier))
        except CheckpointError as error:
            trained = {"stage1": distillation, "align": alignment}
            states = {name: one.state for name, one in trained.items() if one is not None}
            raise keep_states(error, _folder(options), states) from error
        _forget(options)
    wait_for_all()
    result.seconds = time.perf_counter() - start
    tell("saved", result)
    if failure is not None:
        raise TrainingError(f"{failure}; {str(result.output)!r} holds that state") from failure
    return result


def _distil(options: StageOneOptions, loaded: Any, source: Any, config: Any, tell: Listener) -> Any:
    """Run stage one; None where it is skipped."""
    from linearize.distillation.loop import distill
    from linearize.distillation.processes import is_main
    from linearize.trackers import reporter

    result = None
    if source is not None and config.steps:
        with reporter(options.report_to if is_main() else "none", f"{_folder(options)}.tensorboard") as write:

            def on_step(report: Any) -> None:
                write(report)
                tell("step", report)

            result = distill(loaded.model, source, config, on_step=on_step)
    tell("distilled", result)
    return result


def _align(
    options: StageOneOptions, loaded: Any, source: Any, config: AlignConfig, tell: Listener
) -> tuple[Any, TrainingError | None]:
    """Run the alignment with the model's own softmax as the teacher; None where it is skipped.

    What stage one has learned is not thrown away when the alignment leaves the numbers: the error comes back, too.
    """
    if source is None or not config.steps:
        return None, None
    from linearize.checkpoint.sentence import pools_first
    from linearize.distillation.processes import several

    if several() and os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        tell("note", "The alignment is skipped: it does not run under FSDP. Later, on one device: linearize align")
        return None, None
    if pools_first(loaded.embedder):
        config = replace(config, pooling="first")
    try:
        board = f"{_folder(options)}.tensorboard"
        return run_alignment(loaded.model, source, config, None, tell, options.report_to, board), None
    except TrainingError as error:
        return None, error


def _folder(options: Any) -> str:
    return str(options.target()).rstrip("/")


def _save(
    options: ConvertOptions | DistillOptions,
    loaded: Any,
    provenance: dict[str, Any],
    files: Mapping[str, str | bytes],
) -> None:
    """Write the checkpoint."""
    from linearize.checkpoint.save import save
    from linearize.loading import quiet

    with quiet():
        save(
            loaded.model,
            options.target(),
            processor=loaded.processor,
            overwrite=options.overwrite,
            provenance=provenance,
            extra_files=files | loaded.embedder,
        )


@contextlib.contextmanager
def _output(options: ConvertOptions | DistillOptions) -> Iterator[None]:
    """Check the output and the states beside it, and keep the output for this process; of several one writes."""
    from linearize.checkpoint.output import check_target, claim
    from linearize.distillation.processes import is_main
    from linearize.distillation.state import StateFolder

    given: dict[str, Any] = {"overwrite": options.overwrite, "sources": [options.model, options.dataset]}
    check_target(options.target(), **given)
    with claim(options.target(), **given) if is_main() else contextlib.nullcontext():
        if options.save_every is not None and not options.resume and is_main():
            for folder in _state_folders(_folder(options)):
                StateFolder(folder, options.keep_states).check_free(overwrite=options.overwrite)
        yield


def _state_folders(output: str) -> tuple[str, str]:
    """Return where the states of stage one and of the alignment are kept."""
    return f"{output}.stage1", f"{output}.align"


def _make_room(options: ConvertOptions | DistillOptions, model: Any) -> None:
    """Do what comes last before the training: all else has been checked."""
    from linearize.checkpoint.output import check_room
    from linearize.checkpoint.save import size_of
    from linearize.distillation.state import StateFolder

    check_room(options.target(), size_of(model))
    if options.save_every is not None and not options.resume:
        for folder in _state_folders(_folder(options)):
            StateFolder(folder, options.keep_states).remove()


def _forget(options: ConvertOptions | DistillOptions) -> None:
    """Drop the states of a run that is saved; what is not ours stays, and is no reason to fail now."""
    from linearize.distillation.state import StateFolder

    if options.save_every is not None or options.resume:
        for folder in _state_folders(_folder(options)):
            with contextlib.suppress(CheckpointError):
                StateFolder(folder, options.keep_states).remove()


def _first_device(options: StageOneOptions) -> str:
    """Return where the model is loaded to: of several processes each loads it into the host's memory."""
    from linearize.distillation.processes import several

    return "cpu" if several() and options.device == "auto" else options.device


def _distill_config(options: ConvertOptions | DistillOptions) -> Any:
    from linearize.distillation.config import DistillConfig

    keeps = options.save_every is not None or options.resume
    return DistillConfig(
        steps=options.distill_steps,
        learning_rate=options.learning_rate,
        loss=options.loss,
        output_weight=options.output_weight,
        negative_penalty=options.negative_penalty,
        patience=options.patience,
        feed=options.feed,
        query_sample=options.query_sample,
        layers_at_a_time=options.layers_at_a_time,
        gradient_accumulation=options.gradient_accumulation,
        precision=options.precision,
        save_every=options.save_every,
        keep=options.keep_states,
        resume=options.resume,
        folder=_state_folders(_folder(options))[0] if keeps else None,
        seed=options.seed,
    )


def _extend(options: ConvertOptions, loaded: Any) -> Any:
    if options.max_length is None:
        return None
    from linearize.surgery.positions import extend_positions, extend_processor

    report = extend_positions(loaded.model, options.max_length, method=options.positions)
    if loaded.processor is not None:
        loaded.processor = extend_processor(loaded.processor, report, loaded.model)
    return report


def _load_data(options: StageOneOptions, loaded: Any) -> Any:
    from linearize.distillation.batches import batches_for

    data = DataConfig(
        dataset=options.dataset,
        text_column=options.text_column,
        extra_pairs=options.extra_pairs,
        image_column=options.image_column,
        streaming=options.streaming,
        packing=options.packing,
        bucketing=options.bucket_by_length,
        batch_size=options.batch_size,
        seed=options.seed,
        holdout=options.holdout,
    )
    return batches_for(loaded, data, options.distill_length, "--distill-steps 0 --align-steps 0")


def _align_config(options: ConvertOptions | DistillOptions) -> AlignConfig:
    """Return the options of the alignment: as given, else its defaults and what stage one was told."""
    if not isinstance(options, ConvertOptions):
        return AlignConfig(steps=0)
    keeps = options.save_every is not None or options.resume
    shared: dict[str, Any] = {
        "steps": round(ALIGN_SHARE * options.distill_steps),
        "gradient_accumulation": options.gradient_accumulation,
        "precision": options.precision,
        "save_every": options.save_every,
        "keep": options.keep_states,
        "resume": options.resume,
        "folder": _state_folders(_folder(options))[1] if keeps else None,
        "seed": options.seed,
    }
    return AlignConfig(**shared | dict(options.align))


def _training(options: StageOneOptions, result: ConvertResult) -> dict[str, Any]:
    """What the checkpoint says about its training; a folder's path is not the world's business, its name is."""
    distilled = result.to_dict()["distillation"]
    if distilled is None:
        return {}
    for side in ("before", "after"):
        layers = [{k: v for k, v in layer.items() if k != "heads"} for layer in distilled[side]["layers"]]
        distilled[side] = {"mean": distilled[side]["mean"], "layers": layers}
    dataset = options.dataset
    local = dataset is not None and Path(dataset).exists()
    return {
        "dataset": Path(dataset).name if dataset is not None and local else dataset,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "distillation": distilled,
    }


def _log_files(result: ConvertResult, earlier: list[dict[str, Any]]) -> dict[str, str]:
    """Return the per-step log as a file of the checkpoint."""
    from linearize.checkpoint.log import ALIGNMENT, STAGE_ONE, log_file, log_lines

    lines = log_lines(STAGE_ONE, [] if result.distillation is None else result.distillation.history, earlier)
    return log_file(ALIGNMENT, [] if result.alignment is None else result.alignment.history, lines)
