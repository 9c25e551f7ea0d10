"""How far a measured score is to be believed: a bootstrap interval over rows, and what guessing reaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from linearize.finetune.prepared import IGNORED, TaskData
from linearize.finetune.tasks import main_metric
from linearize.finetune.trainer import measure_task

RESAMPLES = 500
LEVEL = 0.95


@dataclass(frozen=True)
class Measured:
    """What a model reaches on a task's validation rows.

    Attributes:
        metrics: all metrics.
        score: the task's main metric.
        interval: its 95 % bootstrap interval over rows; None where rows cannot be drawn apart (answers of long texts).
        chance: the score of the best answer that looks at no input; None where there is none (perplexities, spans).
        rows: how many rows were measured.
    """

    metrics: dict[str, float]
    score: float
    interval: tuple[float, float] | None
    chance: float | None
    rows: int


def measure_with_interval(model: Any, data: TaskData, *, batch_size: int = 64) -> Measured:
    """Measure a model on a task's validation rows, with an interval and the chance level.

    Args:
        model: the model, on its device.
        data: the task's rows.
        batch_size: rows per batch.
    """
    kept: list[tuple[Any, Any]] = []

    def keep(predictions: Any, labels: Any) -> dict[str, float]:
        kept.append((predictions, labels))
        return data.compute_metrics(predictions, labels)

    metrics = measure_task(model, replace(data, compute_metrics=keep), batch_size=batch_size)
    predictions, labels = kept[-1]
    return Measured(
        metrics,
        main_metric(data.task, metrics),
        score_interval(data, predictions, labels),
        chance_level(data, labels),
        len(data.validation),
    )


def score_interval(
    data: TaskData, predictions: Any, labels: Any, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval (Efron 1979) of the main metric: rows drawn with replacement.

    Args:
        data: the task's rows.
        predictions: [N, ...] as the trainer gathers them.
        labels: [N, ...].
        resamples: how often rows are drawn.
        seed: of the draws; the same rows give the same interval.
    """
    if data.task.type.labels == "span":
        return None
    predictions = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
    labels = np.asarray(labels)
    chance = np.random.default_rng(seed)
    scores = []
    for _ in range(resamples):
        rows = chance.integers(len(labels), size=len(labels))
        scores.append(main_metric(data.task, data.compute_metrics(predictions[rows], labels[rows])))
    low, high = np.quantile(scores, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def chance_level(data: TaskData, labels: Any) -> float | None:
    """Return the best score of one and the same answer for every row.

    A class: the best of all classes (accuracy: the share of the largest one; Matthews correlation: 0). A number: the
    mean (correlations: 0). Tags and recalled tokens: the most frequent one.
    """
    labels = np.asarray(labels) if data.task.type.labels != "span" else labels
    scores = [main_metric(data.task, data.compute_metrics(guess, labels)) for guess in _constant(data, labels)]
    if not scores:
        return None
    return min(scores) if data.task.lower_is_better else max(scores)


def _constant(data: TaskData, labels: Any) -> Iterator[np.ndarray]:
    """Give the predictions that look at no input, in the form that the task's metrics read."""
    kind = data.task.type.labels
    if kind == "class":
        for one in range(len(data.task.labels or ())):
            yield np.tile(np.eye(len(data.task.labels or ()))[one], (len(labels), 1))
    elif kind == "number":
        yield np.full((len(labels), 1), float(np.mean(labels)))
    elif kind == "tags" or data.task.type.name == "recall":
        known = labels[labels != IGNORED]
        if len(known):
            yield np.full_like(labels, np.bincount(known).argmax())
