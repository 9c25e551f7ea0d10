"""Measuring a checkpoint on a task, and the original beside it: each at its own length, and the original in chunks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from linearize.distillation.processes import check_alone, under_fsdp
from linearize.finetune.prepared import Facts
from linearize.finetune.tasks import recovery
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
from linearize.loading import check_device

OURS, ORIGINAL, CHUNKS = "this model", "the original", "the original, chunks averaged"
"""Names of the sides."""


@dataclass(frozen=True)
class Evaluation:
    """What `linearize evaluate` found.

    Attributes:
        task: name of the task.
        data: one line about the data.
        figures: the model's metrics.
        score: the task's main metric.
        facts: what a reader must know: rows, their length, the share that was cut, the stride of a perplexity.
        original: the same metrics of the original, if one was given.
        original_score: its main metric.
        recovered: share of the original's score above chance, percent; None where the original is not above chance.
        interval: 95 % bootstrap interval of the score over rows.
        original_interval: the same of the original's.
        chance: the score of the best answer that looks at no input.
        sides: this model, the original at its own length, and the original in chunks, where they were measured.
        differences: this model minus each of the others, on the same rows.
        times: what reading costs each side; None without a comparison.
        notes: what a reader must know.
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
    """Measure a checkpoint on a task, and the original beside it.

    Args:
        job: what to measure.
        on_event: called with `Started` before each side.

    Raises:
        LinearizeError: one of its children, for everything the user can put right.
    """
    if under_fsdp():
        check_alone("evaluate")
    setup = Setup(job.task, job.dataset, job.batch_size, check_device(job.device), job.memory)
    others = _others(job)
    sides = Sides(setup, on_event)
    # First: a part that the model does not have is refused before anything slow.
    for part in job.ablate:
        sides.measure(Side(f"this model without its {part}", job.model, job.data, part))
    ours = sides.measure(Side(OURS, job.model, job.data))
    sides.read.sort(key=lambda one: one is not ours)
    found = Evaluation(
        ours.data.task.name,
        ours.data.description,
        ours.measured.metrics,
        ours.measured.score,
        {"rows": ours.measured.rows, **ours.data.facts},
        interval=ours.measured.interval,
        chance=ours.measured.chance,
        sides=(ours.result,),
        notes=tuple(_notes(sides)),
    )
    if job.ablate:
        results = tuple(one.result for one in sides.read)
        found = replace(found, sides=results, differences=sides.differences(ours), notes=tuple(_notes(sides)))
    if not others:
        return found
    original = sides.measure(others[0])
    notes = []
    for side in others[1:]:
        note = why_no_chunks(original.data, side.options.max_length)
        if note is None:
            sides.measure(side)
        elif original.data.chunkable or original.data.facts.get("cut_share"):
            notes.append(note)
    score, its = ours.measured.score, original.measured
    return replace(
        found,
        original=its.metrics,
        original_score=its.score,
        original_interval=its.interval,
        recovered=recovery(ours.data.task, score, its.score, chance=found.chance, interval=its.interval),
        sides=tuple(one.result for one in sides.read),
        differences=sides.differences(ours),
        times=sides.times(),
        notes=(*_notes(sides), *notes),
    )


def _notes(sides: Sides) -> list[str]:
    """Say which sides learned nothing, and which read beyond what they were trained on."""
    results = [one.result for one in sides.read]
    failed = ", ".join(one.name for one in results if not one.learned)
    notes = [f"Not above chance: {failed}."] if failed else []
    return notes + [one.note for one in results if one.note is not None]


def _others(job: EvaluateJob) -> list[Side]:
    """Return the sides to compare with; refuses what can be refused before anything is measured."""
    if job.compare is None:
        return []
    options = original_options(job.compare, job.data, job.task)
    sides = [Side(ORIGINAL, job.compare, options)]
    if job.chunks:
        sides.append(Side(CHUNKS, job.compare, chunk_options(job.compare, options, job.chunk_length)))
    return sides
