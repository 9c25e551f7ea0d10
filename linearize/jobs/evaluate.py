"""A checkpoint measured on a task, and its original too: each at its own length, the original also in chunks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from linearize.checkpoint.loading import check_device
from linearize.jobs.events import Callback, ignore
from linearize.jobs.sides import (
    Setup,
    Side,
    SideDifference,
    SideResult,
    Sides,
    Times,
    chunk_options,
    original_options,
    why_no_chunks,
)
from linearize.jobs.task_config import EvaluateJob
from linearize.training.stage_one.processes import check_alone, under_fsdp
from linearize.training.stage_two.prepared import Facts
from linearize.training.stage_two.tasks import recovery

OURS, ORIGINAL, CHUNKS = "this model", "the original", "the original, chunks averaged"
"""Names of the sides."""


@dataclass(frozen=True)
class Evaluation:
    """Result of `linearize evaluate`.

    Attributes:
        task: name of the task.
        data: one line about the data.
        figures: the model's metrics.
        score: the task's main metric.
        facts: rows, their length, the share that was cut, the stride of a perplexity.
        original: metrics of the original, if one was given.
        original_score: its main metric.
        recovered: share of the original's score above chance, percent; None if the original is not above chance.
        interval: 95 % bootstrap interval of the score over rows.
        original_interval: the original's.
        chance: the score of the best answer that looks at no input.
        sides: all that were measured: this model, ablations, the original at its own length and in chunks.
        differences: this model minus each other side, on the same rows.
        times: of each side; None without a comparison.
        notes: what a reader should know.
    """

    task: str
    data: str
    figures: dict[str, float]
    score: float
    facts: Facts
    original: dict[str, float] | None = None
    original_score: float | None = None
    recovered: float | None = None
    interval: tuple[float, float] | None = None
    original_interval: tuple[float, float] | None = None
    chance: float | None = None
    sides: tuple[SideResult, ...] = ()
    differences: tuple[SideDifference, ...] = ()
    times: Times | None = None
    notes: tuple[str, ...] = field(default=())


def evaluate_checkpoint(job: EvaluateJob, on_event: Callback = ignore) -> Evaluation:
    """Measure a checkpoint on a task, and compare it with its original if the job names one.

    Args:
        job: what to measure.
        on_event: called with `Started` before each side.

    Raises:
        LinearizeError: one of its children, for everything the user can correct.
    """
    if under_fsdp():
        check_alone("evaluate")
    setup = Setup(job.task, job.dataset, job.batch_size, check_device(job.device), job.memory)
    others = _others(job)
    sides = Sides(setup, on_event)
    # First, so that a part that the model lacks is refused before slow work.
    for part in job.ablate:
        sides.measure(Side(f"this model without its {part}", job.model, job.data, part))
    ours = sides.measure(Side(OURS, job.model, job.data))
    sides.read.sort(key=lambda read: read is not ours)
    original, skipped = None, []
    if others:
        original = sides.measure(others[0])
    for side in others[1:]:
        assert original is not None
        note = why_no_chunks(original.data, side.options.max_length)
        if note is None:
            sides.measure(side)
        elif original.data.chunkable or original.data.facts.get("cut_share"):
            skipped.append(note)
    found = Evaluation(
        task=ours.data.task.name,
        data=ours.data.description,
        figures=ours.measured.metrics,
        score=ours.measured.score,
        facts={"rows": ours.measured.rows, **ours.data.facts},
        interval=ours.measured.interval,
        chance=ours.measured.chance,
        sides=tuple(read.result for read in sides.read),
        differences=sides.differences(ours),
        times=sides.times() if others else None,
        notes=(*_notes(sides), *skipped),
    )
    if original is None:
        return found
    score, interval = original.measured.score, original.measured.interval
    return replace(
        found,
        original=original.measured.metrics,
        original_score=score,
        original_interval=interval,
        recovered=recovery(ours.data.task, found.score, score, chance=found.chance, interval=interval),
    )


def _notes(sides: Sides) -> list[str]:
    """Name the sides that learned nothing, and those that read more tokens than in training."""
    results = [read.result for read in sides.read]
    failed = ", ".join(result.name for result in results if not result.learned)
    notes = [f"Not above chance: {failed}."] if failed else []
    return notes + [result.note for result in results if result.note is not None]


def _others(job: EvaluateJob) -> list[Side]:
    """Return the sides to compare with; refuse wrong options before anything is measured."""
    if job.compare is None:
        return []
    options = original_options(job.compare, job.data, job.task)
    sides = [Side(ORIGINAL, job.compare, options)]
    if job.chunks:
        sides.append(Side(CHUNKS, job.compare, chunk_options(job.compare, options, job.chunk_length)))
    return sides
