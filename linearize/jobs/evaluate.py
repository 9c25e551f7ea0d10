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
    chunk_options,
    difference,
    measure_side,
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
        notes: what a reader of the comparison must know.
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
    data, ours, result = measure_side(setup, Side(OURS, job.model, job.data), on_event)
    found = Evaluation(
        data.task.name,
        data.description,
        ours.metrics,
        ours.score,
        {"rows": ours.rows, **data.facts},
        interval=ours.interval,
        chance=ours.chance,
        sides=(result,),
        notes=() if result.note is None else (result.note,),
    )
    if not others:
        return found
    its_data, original, its_result = measure_side(setup, others[0], on_event)
    found = replace(
        found,
        original=original.metrics,
        original_score=original.score,
        original_interval=original.interval,
        recovered=recovery(data.task, ours.score, original.score, chance=ours.chance, interval=original.interval),
    )
    measured = [(result, ours), (its_result, original)]
    notes = [note for note in (result.note, its_result.note) if note is not None]
    for side in others[1:]:
        note = why_no_chunks(its_data, side.options.max_length)
        if note is None:
            _, chunks, chunks_result = measure_side(setup, side, on_event)
            measured.append((chunks_result, chunks))
        elif its_data.chunkable or its_data.facts.get("cut_share"):
            notes.append(note)
    differences = [difference(data.task, measured[0], other) for other in measured[1:]]
    return replace(
        found,
        sides=tuple(one for one, _ in measured),
        differences=tuple(one for one in differences if one is not None),
        notes=tuple(notes),
    )


def _others(job: EvaluateJob) -> list[Side]:
    """Return the sides to compare with; refuses what can be refused before anything is measured."""
    if job.compare is None:
        return []
    options = original_options(job.compare, job.data, job.task)
    sides = [Side(ORIGINAL, job.compare, options)]
    if job.chunks:
        sides.append(Side(CHUNKS, job.compare, chunk_options(job.compare, options, job.chunk_length)))
    return sides
