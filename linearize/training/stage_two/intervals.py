"""A task's score, and how far it can be trusted: a bootstrap interval over units, and the chance level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from linearize.training.stage_two.metrics import PositionLoss
from linearize.training.stage_two.rows import Predictions
from linearize.training.stage_two.task_types.base import TaskData

RESAMPLES = 10_000
"""With 500 the ends of an interval moved by up to 2 points with the seed."""
LEVEL = 0.95
BALANCED = "f1_macro"
"""The metric that decides alongside accuracy when classes are uneven."""
UNEVEN = 1.1
"""Classes are uneven if the largest one has more than this many times its equal share of the rows."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One figure of a model on a task's validation rows, and how far it can be trusted.

    Attributes:
        score: the figure.
        chance: the score of the best answer that ignores the input; None if undefined (perplexities, spans).
        units: how many rows (or questions, if one may have several rows) were drawn.
        resampled: [R] the score on units drawn with replacement; equal numbers of units give the same draws.
    """

    score: float
    chance: float | None = None
    units: int = 0
    resampled: np.ndarray

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % percentile bootstrap interval (Efron 1979) of the score."""
        return percentiles(self.resampled)


@dataclass(frozen=True, kw_only=True)
class Measured(Score):
    """The results of a model on a task's validation rows: its main metric (`score`), and more.

    Attributes:
        metrics: all metrics.
        rows: how many rows were measured.
        by_position: for causal language models, the loss by the number of preceding tokens.
        balanced: macro-F1, if the task has it and the classes are uneven: accuracy alone rewards the largest class.
    """

    metrics: dict[str, float]
    rows: int
    by_position: tuple[PositionLoss, ...] = ()
    balanced: Score | None = None


def score_of(
    data: TaskData,
    metrics: dict[str, float],
    predictions: Predictions,
    labels: Predictions,
    score: Sequence[str] | None = None,
) -> Score:
    """Return the mean of some metrics (by default the task's score), with its resamples and the chance level."""
    return Score(
        score=data.task.mean_of(metrics, score),
        chance=chance_level(data, labels, score),
        units=data.facts.get("questions", len(data.validation)),
        resampled=resampled_scores(data, predictions, labels, score=score),
    )


def balanced_score(
    data: TaskData, metrics: dict[str, float], predictions: Predictions, labels: Predictions
) -> Score | None:
    """Return macro-F1 if the task has it alongside its score and the classes are uneven."""
    if BALANCED not in metrics or BALANCED in data.task.score:
        return None
    classes, counts = len(data.task.labels or ()), np.bincount(np.asarray(labels))
    if counts.max() <= UNEVEN * counts.sum() / classes:
        return None
    score = score_of(data, metrics, predictions, labels, (BALANCED,))
    # Guessing in proportion to the classes reaches 1 / C, which is more than any constant answer.
    return replace(score, chance=max(score.chance or 0.0, 1 / classes))


def resampled_scores(
    data: TaskData,
    predictions: Predictions,
    labels: Predictions,
    *,
    score: Sequence[str] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> np.ndarray:
    """Return the main metric [R] on units (rows, or questions) drawn with replacement.

    Args:
        data: the task's rows.
        predictions: [N, ...] as the trainer gathers them.
        labels: [N, ...].
        score: metrics whose mean is the score; by default the task's.
        resamples: how often units are drawn.
        seed: seed of the draws; equal numbers of units give the same draws, so that two models' scores are paired.
    """
    units = data.type.units(predictions, labels)
    scores = [
        data.task.mean_of(data.type.metrics(*(unit[drawn] for unit in units)), score)
        for drawn in draws(len(units[0]), resamples, seed)
    ]
    return np.array(scores)


def draws(units: int, resamples: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yield draws of `units` units with replacement; two models measured on the same draws are paired."""
    chance = np.random.default_rng(seed)
    return (chance.integers(units, size=units) for _ in range(resamples))


def percentiles(scores: np.ndarray) -> tuple[float, float]:
    """Return the ends of the 95 % interval of resampled scores [R]."""
    low, high = np.quantile(scores, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def chance_level(data: TaskData, labels: Predictions, score: Sequence[str] | None = None) -> float | None:
    """Return the best score without looking at the input; None if the task has no such answer.

    Classes: the best constant answer (accuracy: the share of the largest class; Matthews correlation: 0). Numbers: the
    mean (correlations: 0). Tags and recalled tokens: the most frequent one. Retrieval: a random order.
    """
    scores = [data.task.mean_of(metrics, score) for metrics in data.type.chance_metrics(labels)]
    return (min if data.task.lower_is_better else max)(scores, default=None)
