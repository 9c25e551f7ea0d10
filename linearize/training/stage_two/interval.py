"""How far a measured score can be trusted: a bootstrap interval over rows, and what guessing reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from linearize.training.stage_two.metrics import PositionLoss
from linearize.training.stage_two.prepared import Predictions, TaskData
from linearize.training.stage_two.tasks import main_metric

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
        chance: the score of the best answer that looks at no input; None if undefined (perplexities, spans).
        units: how many rows (or questions, if one may have several rows) were drawn.
        resampled: [R] the score on units drawn with replacement; as many units give the same draws.
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
    """What a model reaches on a task's validation rows: its main metric, and

    Attributes:
        metrics: all metrics.
        rows: how many rows were measured.
        by_position: of causal language models, the loss by the number of tokens before.
        balanced: macro-F1, if the task has it and the classes are uneven: accuracy alone rewards the largest class.
    """

    metrics: dict[str, float]
    rows: int
    by_position: tuple[PositionLoss, ...] = ()
    balanced: Score | None = None


@dataclass(frozen=True)
class Difference:
    """How far one score is above another on the same rows.

    Attributes:
        value: the first score minus the second.
        interval: its 95 % paired bootstrap interval: both are computed on the same drawn rows.
    """

    value: float
    interval: tuple[float, float]

    @property
    def within_noise(self) -> bool:
        """Whether 0 lies in the interval."""
        return self.interval[0] <= 0 <= self.interval[1]


def score_of(
    data: TaskData,
    metrics: dict[str, float],
    predictions: Predictions,
    labels: Predictions,
    score: Sequence[str] | None = None,
) -> Score:
    """Return the mean of some metrics (by default the task's score), with its resamples and the chance level."""
    return Score(
        score=main_metric(data.task, metrics, score),
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
    found = score_of(data, metrics, predictions, labels, (BALANCED,))
    # Guessing in proportion to the classes reaches 1 / C, which is more than any constant answer.
    return replace(found, chance=max(found.chance or 0.0, 1 / classes))


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
        seed: of the draws; as many units give the same draws, so that two models' scores are paired.
    """
    chance = np.random.default_rng(seed)
    units = data.type.units(predictions, labels)
    scores = []
    for _ in range(resamples):
        drawn = chance.integers(len(units[0]), size=len(units[0]))
        scores.append(main_metric(data.task, data.type.metrics(*(unit[drawn] for unit in units)), score))
    return np.array(scores)


def paired_difference(ours: Score | None, theirs: Score | None) -> Difference | None:
    """Return how far one score is above another on the same rows; None if their rows are not the same ones.

    Args:
        ours: measured on the same data set as `theirs`; rows may be cut at other lengths.
        theirs: what is subtracted.
    """
    if ours is None or theirs is None or ours.units != theirs.units:
        return None
    return Difference(ours.score - theirs.score, percentiles(ours.resampled - theirs.resampled))


def percentiles(scores: np.ndarray) -> tuple[float, float]:
    """Return the ends of the 95 % interval of resampled scores [R]."""
    low, high = np.quantile(scores, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def chance_level(data: TaskData, labels: Predictions, score: Sequence[str] | None = None) -> float | None:
    """Return the best score without looking at the input; None if the task has no such answer.

    Classes: the best constant answer (accuracy: the share of the largest class; Matthews correlation: 0). Numbers: the
    mean (correlations: 0). Tags and recalled tokens: the most frequent one. Retrieval: a random order.
    """
    scores = [main_metric(data.task, metrics, score) for metrics in data.type.chance_metrics(labels)]
    return (min if data.task.lower_is_better else max)(scores, default=None)
