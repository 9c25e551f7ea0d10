"""What the steps of a job with stage one or an alignment share, and those of its steps that touch the output."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from linearize.checkpoint.output import check_room, check_target, claim
from linearize.checkpoint.save import save, size_of
from linearize.distillation.batches import batches_for, within
from linearize.distillation.processes import is_main, several, wait_for_all
from linearize.distillation.state import StateFolder, keep_states
from linearize.errors import CheckpointError, TrainingError
from linearize.jobs import findings
from linearize.jobs.config import AlignJob, StageOneJob
from linearize.jobs.events import Callback, DataOpened, Noted
from linearize.jobs.search_config import SearchJob
from linearize.loading import Loaded, move, quiet
from linearize.modeling.plan import Plan
from linearize.modeling.portable import why_not

if TYPE_CHECKING:
    from torch import Tensor

    from linearize.alignment.loop import AlignResult
    from linearize.distillation.loop import DistillResult
    from linearize.fidelity.ablate import KernelMerit
    from linearize.kernel_search.result import SearchResult
    from linearize.surgery.positions import PositionReport


SKIP = "--distill-steps 0 --align-steps 0"
"""What does without data."""


@dataclass
class Context:
    """Where a job stands; its steps fill it in.

    Attributes:
        job: what was asked for.
        loaded: the model with its processor.
        on_event: called with every event.
        provenance: what the checkpoint says about how it was made.
        earlier: the log of what it was made from.
        source: the data, or None where nothing learns.
        positions: how positions were extended, or None.
        example_inputs: inputs of trial runs, where the job names a file of them.
        searched: what the search for a plan has found, or None.
        distillation: what stage one did, or None.
        alignment: what the alignment did, or None.
        merit: what the kernels bring over their windows alone after stage one, or None.
        failure: why the alignment had to stop, where what was learned before is saved.
        start: when the job began.
    """

    job: StageOneJob | AlignJob | SearchJob
    loaded: Loaded
    on_event: Callback
    provenance: dict[str, Any] = field(default_factory=dict)
    earlier: list[dict[str, object]] = field(default_factory=list)
    source: Any = None
    positions: PositionReport | None = None
    example_inputs: Mapping[str, Tensor] | None = None
    searched: SearchResult | None = None
    distillation: DistillResult | None = None
    alignment: AlignResult | None = None
    merit: KernelMerit | None = None
    failure: TrainingError | None = None
    start: float = field(default_factory=time.perf_counter)

    @property
    def target(self) -> str:
        """The output folder, without a slash at its end."""
        return str(self.job.target()).rstrip("/")

    @property
    def board(self) -> str:
        """The folder of TensorBoard's files."""
        return f"{self.target}.tensorboard"

    @functools.cached_property
    def longest_seen(self) -> int | None:
        """Tokens of the longest held-out row; None without text to learn from."""
        if self.source is None or self.loaded.modality != "text":
            return None
        return findings.longest_row(self.source.holdout_batches())

    @property
    def seconds(self) -> float:
        """How long it took so far."""
        return time.perf_counter() - self.start


@contextlib.contextmanager
def reserved(job: StageOneJob | AlignJob) -> Iterator[None]:
    """Check the output and the states beside it, and keep the output for this process; of several one writes."""
    target, sources = job.target(), job.sources()
    check_target(target, overwrite=job.overwrite, sources=sources)
    claimed = claim(target, overwrite=job.overwrite, sources=sources) if is_main() else contextlib.nullcontext()
    with claimed:
        if is_main():
            check_states(job)
        yield


def check_states(job: StageOneJob | AlignJob | SearchJob) -> None:
    """Refuse to begin anew where an interrupted run lies.

    Raises:
        ConfigError: if there is one and the job does not overwrite.
        CheckpointError: if a folder of states holds something else.
    """
    for folder in _begun_anew(job):
        folder.check_free(overwrite=job.overwrite)


def first_device(job: StageOneJob | AlignJob | SearchJob) -> str:
    """Return where the model is loaded to: of several processes each loads it into the host's memory."""
    return "cpu" if several() and job.device == "auto" else job.device


def open_data(context: Context, length: int | None, skip: str) -> None:
    """Open the data; `length` and `skip` as in `batches_for`. Rows that are cut to what the model takes are said so."""
    if length is not None and (most := within(context.loaded, length)) < length:
        text = (
            f"Rows are cut to {most:,} tokens, as many as the model takes (got {length:,}); convert with --max-length"
        )
        context.on_event(Noted(text))
    context.source = batches_for(context.loaded, context.job.data, length, skip)
    context.on_event(DataOpened(context.source.description))


def make_room(context: Context) -> None:
    """Do what comes last before the training: all else has been checked."""
    if is_main():
        check_room(context.target, size_of(context.loaded.model))
        clear_states(context.job)


def clear_states(job: StageOneJob | AlignJob | SearchJob) -> None:
    """Remove the states that a run which is not resumed begins without."""
    for folder in _begun_anew(job):
        folder.remove()


def longest_row(context: Context) -> dict[str, int]:
    """Return what a checkpoint says of the lengths that it was taught on: tokens of the longest held-out row."""
    found = context.longest_seen
    before = context.provenance.get("longest_row")
    return {} if found is None else {"longest_row": max(found, before if isinstance(before, int) else 0)}


def add_command(provenance: Mapping[str, object], command: str) -> dict[str, list[str]]:
    """Return the commands that made a checkpoint, with the one that makes it now."""
    earlier = provenance.get("commands")
    return {"commands": [*(earlier if isinstance(earlier, list) else []), command]}


def write(context: Context, provenance: Mapping[str, object], files: Mapping[str, str | bytes]) -> None:
    """Write the checkpoint, once, and drop the states of its run.

    Args:
        context: where the job stands.
        provenance: what the checkpoint says about how it was made.
        files: its log.

    Raises:
        NotSavedError: if it cannot be written; what was trained is kept as states.
    """
    loaded, job = context.loaded, context.job
    move(loaded.model, "cpu")
    if is_main():
        try:
            with quiet():
                save(
                    loaded.model,
                    context.target,
                    processor=loaded.processor,
                    overwrite=job.overwrite,
                    provenance=dict(provenance),
                    extra_files={**files, **loaded.embedder},
                )
        except CheckpointError as error:
            trained = {"search": context.searched, "stage1": context.distillation, "align": context.alignment}
            states = {name: one.state for name, one in trained.items() if one is not None}
            raise keep_states(error, context.target, states) from error
        stays = why_not(Plan.from_dict(loaded.model.config.linearize))
        if stays:
            context.on_event(Noted(f"The checkpoint does not run by itself: {stays}."))
        drop_states(job)
    wait_for_all()


def drop_states(job: StageOneJob | AlignJob | SearchJob) -> None:
    """Remove the states of a run that is over."""
    if job.keeps_states:
        for folder in _state_folders(job):
            # What is not ours stays, and is no reason to fail now.
            with contextlib.suppress(CheckpointError):
                folder.remove()


def _state_folders(job: StageOneJob | AlignJob | SearchJob) -> list[StateFolder]:
    return [StateFolder(folder, job.stage.keep) for folder in job.state_folders()]


def _begun_anew(job: StageOneJob | AlignJob | SearchJob) -> list[StateFolder]:
    """The folders of states that a run which is not resumed begins with empty."""
    return _state_folders(job) if job.keeps_states and not job.stage.resume else []
