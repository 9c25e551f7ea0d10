"""Measuring a checkpoint on a task, and the original beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from linearize.finetune.interval import Measured, measure_with_interval
from linearize.finetune.load import check_length, check_trained, fit_tokenizer, load_for_task, load_processor
from linearize.finetune.prepare import prepare
from linearize.finetune.prepared import TaskData
from linearize.finetune.tasks import recovery
from linearize.jobs.config import EvaluateJob
from linearize.loading import check_device


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
    """

    task: str
    data: str
    figures: dict[str, float]
    score: float
    facts: dict[str, Any]
    original: dict[str, float] | None = None
    original_score: float | None = None
    recovered: float | None = None
    interval: tuple[float, float] | None = None
    original_interval: tuple[float, float] | None = None
    chance: float | None = None


def evaluate_checkpoint(job: EvaluateJob) -> Evaluation:
    """Measure a checkpoint on a task, and the original beside it.

    Raises:
        LinearizeError: one of its children, for everything the user can put right.
    """
    device = check_device(job.device)
    data, ours = _measured(job, job.model, device)
    facts = {"rows": ours.rows, **data.facts}
    found = Evaluation(
        data.task.name, data.description, ours.metrics, ours.score, facts, interval=ours.interval, chance=ours.chance
    )
    if job.compare is None:
        return found
    _, original = _measured(job, job.compare, device)
    return replace(
        found,
        original=original.metrics,
        original_score=original.score,
        original_interval=original.interval,
        recovered=recovery(data.task, ours.score, original.score, chance=ours.chance, interval=original.interval),
    )


def _measured(job: EvaluateJob, name: str, device: str) -> tuple[TaskData, Measured]:
    """Measure one checkpoint; the rows are made with its own processor."""
    processor = load_processor(name, job.task.modality)
    data = prepare(job.task, processor, job.data, data=job.dataset)
    check_trained(name, job.task)
    model = load_for_task(name, data).to(device).eval()
    fit_tokenizer(model, processor)
    check_length(model, job.task, job.data.max_length)
    return data, measure_with_interval(model, data, batch_size=job.batch_size)
