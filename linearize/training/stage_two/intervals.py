"""A model's results on a task, and how far they can be trusted: a bootstrap interval over units, the chance level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from linearize.training.stage_two.metrics import PositionLoss
from linearize.training.stage_two.rows import Predictions
from linearize.training.stage_two.task_types.base import TaskData
from linearize.training.stage_two.tasks import Interval

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
        scored: hash of what was scored (`TaskType.scored`); figures with another one are not comparable.
        resampled: [R] the score on units drawn with replacement; equal numbers of units give the same draws.
    """

    score: float
    chance: float | None = None
    units: int = 0
    scored: str = ""
    resampled: np.ndarray

    @property
    def interval(self) -> Interval | None:
        """The 95 % percentile bootstrap interval (Efron 1979) of the score; None for one unit."""
        return None if self.units == 1 else percentiles(self.resampled)


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


def measured(data: TaskData, metrics: dict[str, float], predictions: Predictions, labels: Predictions) -> Measured:
    """Return a model's results on a task's validation rows.

    Args:
        data: the task's rows.
        metrics: all metrics.
        predictions: [N, ...] as the trainer gathers them.
        labels: [N, ...].
    """
    resampled = resampled_metrics(data, predictions, labels)

    def score_of(names: Sequence[str]) -> Score:
        mean = data.task.mean_of(metrics, names)
        return Score(
            score=mean,
            chance=chance_level(data, labels, names),
            units=data.facts.get("questions", len(data.validation)),
            scored=data.type.scored(labels),
            # If the score is undefined (no row of a class), so is its interval.
            resampled=np.array([mean if np.isnan(mean) else data.task.mean_of(drawn, names) for drawn in resampled]),
        )

    balanced = None
    if BALANCED in metrics and BALANCED not in data.task.score and not data.type.several:
        classes, counts = len(data.task.labels or ()), np.bincount(np.asarray(labels))
        if counts.max() > UNEVEN * counts.sum() / classes:
            score = score_of((BALANCED,))
            # Guessing in proportion to the classes reaches 1 / C, which is more than any constant answer.
            balanced = replace(score, chance=max(score.chance or 0.0, 1 / classes))
    return Measured(
        **vars(score_of(data.task.score)),
        metrics=metrics,
        rows=len(data.validation),
        by_position=data.type.by_position(predictions),
        balanced=balanced,
    )


def resampled_metrics(
    data: TaskData, predictions: Predictions, labels: Predictions, *, resamples: int = RESAMPLES, seed: int = 0
) -> list[dict[str, float]]:
    """Return the task's metrics on units (rows, or questions) drawn with replacement, once per resample.

    Equal numbers of units give the same draws with the same seed, so two models' scores are paired.
    """
    units = data.type.units(predictions, labels)
    count, chance = len(units[0]), np.random.default_rng(seed)
    draws = (chance.integers(count, size=count) for _ in range(resamples))
    return [data.type.metrics(*(unit[drawn] for unit in units)) for drawn in draws]


def percentiles(scores: np.ndarray) -> Interval:
    """Return the ends of the 95 % interval of resampled scores [R]; units drawn without a class (NaN) do not count."""
    known = scores[~np.isnan(scores)]
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if len(known) else (np.nan, np.nan)
    return float(low), float(high)


def chance_level(data: TaskData, labels: Predictions, score: Sequence[str] | None = None) -> float | None:
    """Return the best score without looking at the input; None if the task has no such answer.

    Classes: the best constant answer (accuracy: the share of the largest class; Matthews correlation: 0). Numbers: the
    mean (correlations: 0). Tags and recalled tokens: the most frequent one. Retrieval: a random order.
    """
    scores = [data.task.mean_of(metrics, score) for metrics in data.type.chance_metrics(labels)]
    return (min if data.task.lower_is_better else max)(scores, default=None)
