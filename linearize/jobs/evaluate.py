"""Measuring a checkpoint on a task, and the original beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linearize.finetune.load import check_length, check_trained, fit_tokenizer, load_for_task, load_processor
from linearize.finetune.prepare import prepare
from linearize.finetune.prepared import TaskData
from linearize.finetune.tasks import main_metric, recovery
from linearize.finetune.trainer import measure_task
from linearize.jobs.config import EvaluateJob
from linearize.loading import check_device


@dataclass(frozen=True)
class Evaluation:
    """What `linearize evaluate` found.

    Attributes:
        task: name of the task.
        data: one line about the data.
        figures: the model's metrics.
        score: the task's one figure.
        facts: what a reader must know, such as the stride of a perplexity.
        original: the same metrics of the original, if one was given.
        original_score: its one figure.
        recovered: share of the original's score, percent.
    """

    task: str
    data: str
    figures: dict[str, float]
    score: float
    facts: dict[str, Any]
    original: dict[str, float] | None = None
    original_score: float | None = None
    recovered: float | None = None


def evaluate_checkpoint(job: EvaluateJob) -> Evaluation:
    """Measure a checkpoint on a task, and the original beside it.

    Raises:
        LinearizeError: one of its children, for everything the user can put right.
    """
    device = check_device(job.device)
    data, figures = _measured(job, job.model, device)
    score = main_metric(data.task, figures)
    if job.compare is None:
        return Evaluation(data.task.name, data.description, figures, score, data.facts)
    _, original = _measured(job, job.compare, device)
    original_score = main_metric(data.task, original)
    share = recovery(data.task, score, original_score)
    return Evaluation(data.task.name, data.description, figures, score, data.facts, original, original_score, share)


def _measured(job: EvaluateJob, name: str, device: str) -> tuple[TaskData, dict[str, float]]:
    """Measure one checkpoint; the rows are made with its own processor."""
    processor = load_processor(name, job.task.modality)
    data = prepare(job.task, processor, job.data, data=job.dataset)
    check_trained(name, job.task)
    model = load_for_task(name, data).to(device).eval()
    fit_tokenizer(model, processor)
    check_length(model, job.task, job.data.max_length)
    return data, measure_task(model, data, batch_size=job.batch_size)
