"""The verb `align`: bring a converted checkpoint close to its original and save the result."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linearize.alignment.config import AlignConfig
from linearize.data import DataConfig
from linearize.distillation.state import keep_states
from linearize.errors import CheckpointError, ConfigError

Listener = Callable[[str, Any], None]


@dataclass(frozen=True)
class AlignJob:
    """What `linearize align` is told.

    Attributes:
        model: the converted checkpoint: folder or Hub name.
        teacher: its original; None: the checkpoint's own weights under softmax.
        data: which data.
        length: tokens per row; None: 256, or what the model takes.
        align: options of the alignment; its folder of states is `<output>.align`.
        output: folder to make; None: `<folder>-aligned`.
        overwrite: whether that folder may be replaced.
        device: where to run.
        report_to: none or tensorboard.
    """

    model: str
    teacher: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    length: int | None = None
    align: AlignConfig = field(default_factory=AlignConfig)
    output: str | None = None
    overwrite: bool = False
    device: str = "auto"
    report_to: str = "none"

    def target(self) -> str:
        """Return the output folder: as asked, or `<folder>-aligned`."""
        return self.output or f"{Path(self.model).name}-aligned"


@dataclass
class AlignmentSaved:
    """What `linearize align` did.

    Attributes:
        output: the folder.
        data: one line about the data.
        alignment: see `linearize.alignment.loop.AlignResult`.
        seconds: duration of everything.
    """

    output: Path
    data: str
    alignment: Any
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "output": str(self.output),
            "data": self.data,
            "alignment": alignment_record(self.alignment),
            "seconds": self.seconds,
        }


def align_checkpoint(job: AlignJob, listen: Listener | None = None) -> AlignmentSaved:
    """Align a converted checkpoint with its original and save the result, all or nothing.

    Raises:
        LinearizeError: one of its children, for everything the user can mend; nothing is written then.
    """
    from linearize.checkpoint.output import check_target, claim
    from linearize.distillation.processes import is_main
    from linearize.distillation.state import StateFolder

    sources = [job.model, job.teacher, *(name for name, _ in job.data.sources)]
    given: dict[str, Any] = {"overwrite": job.overwrite, "sources": sources}
    check_target(job.target(), **given)
    with claim(job.target(), **given) if is_main() else contextlib.nullcontext():
        if job.align.folder is not None and not job.align.resume and is_main():
            StateFolder(job.align.folder, job.align.keep).check_free(overwrite=job.overwrite)
        return _align(job, listen)


def _align(job: AlignJob, listen: Listener | None) -> AlignmentSaved:
    from linearize.checkpoint.log import ALIGNMENT, log_file, read_log
    from linearize.checkpoint.output import check_room
    from linearize.checkpoint.save import save, size_of
    from linearize.checkpoint.sentence import pools_first
    from linearize.distillation.batches import batches_for
    from linearize.distillation.processes import is_main, several, wait_for_all
    from linearize.distillation.state import StateFolder
    from linearize.loading import load_converted, quiet

    announce = listen or (lambda name, data: None)
    start = time.perf_counter()
    earlier = read_log(job.model)
    loaded = load_converted(job.model, device="cpu" if several() and job.device == "auto" else job.device)
    provenance = dict(loaded.model.config.linearize.get("provenance") or {})
    teacher = _load_teacher(job, loaded, provenance)
    source = batches_for(loaded, job.data, job.length, "a model that reads text or images")
    if teacher is not None:
        check_rows(teacher, source.options["max_length"], loaded.modality)
    announce("data", source.description)
    config = job.align
    if pools_first(loaded.embedder):
        config = dataclasses.replace(config, pooling="first")
    if is_main():
        check_room(job.target(), size_of(loaded.model))
        if job.align.folder is not None and not job.align.resume:
            StateFolder(job.align.folder, job.align.keep).remove()
    result = run_alignment(
        loaded.model, source, config, teacher, announce, job.report_to, f"{job.target()}.tensorboard"
    )
    loaded.model.to("cpu")
    if is_main():
        record = {"alignment": alignment_record(result, teacher=job.teacher, data=job.data, config=job.align)}
        try:
            with quiet():
                save(
                    loaded.model,
                    job.target(),
                    processor=loaded.processor,
                    overwrite=job.overwrite,
                    provenance=provenance | record,
                    extra_files={**log_file(ALIGNMENT, result.history, earlier), **loaded.embedder},
                )
        except CheckpointError as error:
            raise keep_states(error, job.target(), {"align": result.state}) from error
        if job.align.folder is not None:
            with contextlib.suppress(CheckpointError):
                StateFolder(job.align.folder, job.align.keep).remove()
    wait_for_all()
    saved = AlignmentSaved(Path(job.target()), source.description, result, time.perf_counter() - start)
    announce("saved", saved)
    return saved


def run_alignment(
    student: Any, source: Any, config: AlignConfig, teacher: Any, announce: Listener, report_to: str, board: str
) -> Any:
    """Align a model, reporting to TensorBoard where asked and to the caller: "align step", then "aligned"."""
    from linearize.alignment.loop import align
    from linearize.distillation.processes import is_main
    from linearize.trackers import reporter

    with reporter(report_to if is_main() else "none", board, "alignment") as write:

        def on_step(report: Any) -> None:
            write(report)
            announce("align step", report)

        result = align(student, source, config, teacher=teacher, on_step=on_step)
    announce("aligned", result)
    return result


def _load_teacher(job: AlignJob, loaded: Any, provenance: dict[str, Any]) -> Any:
    """Load the original; None where the checkpoint's own softmax still is the original's.

    Raises:
        ConfigError: if the checkpoint's weights were changed since and no teacher is given, or it does not fit.
    """
    from linearize.loading import load_model, model_type

    if job.teacher is None:
        check_own_softmax(provenance)
        return None
    if model_type(job.teacher) == "linearize":
        raise ConfigError(f"teacher: {job.teacher!r} is converted itself; give the original that it was made from")
    base = type(loaded.model).__name__.removeprefix("Linearized")
    teacher = load_model(job.teacher)
    from linearize.alignment.pair import check_teacher

    check_teacher(loaded.model, teacher.model)
    mine: dict[str, int] = getattr(loaded.processor, "get_vocab", dict)()
    its: dict[str, int] = getattr(teacher.processor, "get_vocab", dict)()
    if mine and its and mine != its:
        raise ConfigError(
            f"teacher: {job.teacher!r} has a tokenizer of {len(its):,} pieces that differs from the checkpoint's "
            f"({len(mine):,} pieces); give the original of this {base}"
        )
    return teacher.model


def check_own_softmax(provenance: dict[str, Any]) -> None:
    """Refuse to take a checkpoint's own weights for its original's where they were trained since.

    Raises:
        ConfigError: saying which stage changed them.
    """
    from linearize.checkpoint.inspect import weights_were_trained

    stage = None
    if weights_were_trained(provenance):
        stage = "tuned on a task" if "finetuning" in provenance else "aligned"
    if stage is not None:
        given = "TUNED-ORIGINAL" if "finetuning" in provenance else provenance.get("base_model", "ORIGINAL")
        raise ConfigError(
            f"this checkpoint was {stage}, so that its own softmax is no longer the original's; "
            f"say what it is to be aligned with: --teacher {given}"
        )


def check_rows(teacher: Any, length: int, modality: str) -> None:
    """Refuse rows that are longer than the teacher takes.

    Raises:
        ConfigError: if they are.
    """
    from linearize.surgery.positions import current_length

    most = current_length(teacher) if modality == "text" else None
    if most is not None and length > most:
        raise ConfigError(
            f"teacher: got rows of {length} tokens, but it takes at most {most}; lower --length, or leave --teacher "
            "out: the checkpoint's own softmax has its longer positions"
        )


def alignment_record(
    result: Any, *, teacher: str | None = None, data: DataConfig | None = None, config: AlignConfig | None = None
) -> dict[str, Any]:
    """Return what a checkpoint says about its alignment; a folder's path is not the world's business, its name is."""
    found: dict[str, Any] = {
        "steps": result.steps,
        "best_step": result.best_step,
        "stopped": result.stopped,
        "seconds": result.seconds,
        "before": result.before.to_dict(),
        "after": result.after.to_dict(),
    }
    if teacher is not None:
        found["teacher"] = Path(teacher).name if Path(teacher).exists() else teacher
    if data is not None and data.dataset is not None:
        found["dataset"] = ", ".join(Path(name).name if Path(name).exists() else name for name, _ in data.sources)
    if config is not None:
        kept = ("train", "blockwise", "learning_rate", "kernel_learning_rate", "seed")
        found |= {name: getattr(config, name) for name in kept}
    return found
