"""How far a measured score is to be believed: a bootstrap interval over rows, and what guessing reaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from linearize.finetune.prepared import IGNORED, Predictions, TaskData
from linearize.finetune.tasks import main_metric

if TYPE_CHECKING:
    from linearize.finetune.metrics.by_position import PositionLoss

RESAMPLES = 10_000
"""With 500 the ends of an interval moved by up to 2 points with the seed."""
LEVEL = 0.95
BALANCED = "f1_macro"
"""The metric that decides alongside accuracy when classes are uneven."""
UNEVEN = 1.1
"""Classes are uneven if the largest one has more than this many times its equal share of the rows."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One figure of a model on a task's validation rows, and how far it is to be believed.

    Attributes:
        score: the figure.
        interval: its 95 % bootstrap interval over rows (over questions, if one may have several rows).
        chance: the score of the best answer that looks at no input; None if undefined (perplexities, spans).
        units: how many rows, or questions, the interval is over.
        resampled: [R] the score on rows drawn with replacement, the same rows of the same data; None without interval.
    """

    score: float
    interval: tuple[float, float] | None = None
    chance: float | None = None
    units: int = 0
    resampled: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Measured(Score):
    """What a model reaches on a task's validation rows: its main metric, and

    Attributes:
        metrics: all metrics.
        rows: how many rows were measured.
        by_position: of causal language models, the loss by how many tokens stand before.
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
        value: the one minus the other.
        interval: its 95 % paired bootstrap interval: both are taken on the same drawn rows.
    """

    value: float
    interval: tuple[float, float]

    @property
    def within_noise(self) -> bool:
        """Whether 0 lies in the interval."""
        return self.interval[0] <= 0 <= self.interval[1]


def score_of(data: TaskData, metrics: dict[str, float], predictions: Predictions, labels: Predictions) -> Score:
    """Return a task's main metric with its interval and the chance level, from what was predicted."""
    scores = resampled_scores(data, predictions, labels)
    return Score(
        score=main_metric(data.task, metrics),
        interval=None if scores is None else _percentiles(scores),
        chance=chance_level(data, labels),
        units=data.facts.get("questions", len(data.validation)),
        resampled=scores,
    )


def balanced_score(
    data: TaskData, metrics: dict[str, float], predictions: Predictions, labels: Predictions
) -> Score | None:
    """Return macro-F1 if the task has it alongside its score and the classes are uneven."""
    if data.task.type.labels != "class" or BALANCED not in metrics or BALANCED in data.task.score:
        return None
    classes = len(data.task.labels or ())
    if np.bincount(np.asarray(labels)).max() <= UNEVEN * len(np.asarray(labels)) / classes:
        return None
    found = score_of(replace(data, task=replace(data.task, score=(BALANCED,))), metrics, predictions, labels)
    # Guessing in proportion to the classes reaches 1 / C, which is more than any constant answer.
    return replace(found, chance=max(found.chance or 0.0, 1 / classes))


def score_interval(
    data: TaskData, predictions: Predictions, labels: Predictions, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval (Efron 1979) of the main metric; arguments as in `resampled_scores`."""
    scores = resampled_scores(data, predictions, labels, resamples=resamples, seed=seed)
    return None if scores is None else _percentiles(scores)


def resampled_scores(
    data: TaskData, predictions: Predictions, labels: Predictions, *, resamples: int = RESAMPLES, seed: int = 0
) -> np.ndarray | None:
    """Return the main metric [R] on rows drawn with replacement; None where rows cannot be drawn apart.

    Args:
        data: the task's rows.
        predictions: [N, ...] as the trainer gathers them.
        labels: [N, ...].
        resamples: how often rows are drawn.
        seed: of the draws; as many rows give the same draws, so that two models' scores are paired.
    """
    chance = np.random.default_rng(seed)
    if data.by_unit is not None:
        found = data.by_unit(predictions, labels)
        columns = np.stack(list(found.values()), axis=1)
        draws = (chance.integers(len(columns), size=len(columns)) for _ in range(resamples))
        means = (dict(zip(found, columns[rows].mean(axis=0), strict=True)) for rows in draws)
        return np.array([main_metric(data.task, one if data.of_means is None else data.of_means(one)) for one in means])
    if data.task.type.labels == "span":
        return None
    predictions = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
    if data.task.type.labels == "class":
        predictions = predictions.argmax(axis=-1)
    labels = np.asarray(labels)
    scores = []
    for _ in range(resamples):
        rows = chance.integers(len(labels), size=len(labels))
        scores.append(main_metric(data.task, data.compute_metrics(predictions[rows], labels[rows])))
    return np.array(scores)


def paired_difference(ours: Score | None, theirs: Score | None) -> Difference | None:
    """Return how far one score is above another on the same rows; None where their rows are not the same ones.

    Args:
        ours: measured on the same data set as `theirs`; rows may be cut at other lengths.
        theirs: what is subtracted.
    """
    if ours is None or theirs is None or ours.resampled is None or theirs.resampled is None:
        return None
    if ours.units != theirs.units:
        return None
    return Difference(ours.score - theirs.score, _percentiles(ours.resampled - theirs.resampled))


def _percentiles(scores: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(scores, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def chance_level(data: TaskData, labels: Predictions) -> float | None:
    """Return the best score of one and the same answer for every row.

    A class: the best of all classes (accuracy: the share of the largest one; Matthews correlation: 0). A number: the
    mean (correlations: 0). Tags and recalled tokens: the most frequent one. Retrieval: a random order.
    """
    if data.chance is not None:
        return main_metric(data.task, dict(data.chance))
    labels = np.asarray(labels) if data.task.type.labels != "span" else labels
    scores = [main_metric(data.task, data.compute_metrics(guess, labels)) for guess in _constant(data, labels)]
    if not scores:
        return None
    return min(scores) if data.task.lower_is_better else max(scores)


def _constant(data: TaskData, labels: Predictions) -> Iterator[np.ndarray]:
    """Give the predictions that look at no input, in the form that the task's metrics read."""
    kind = data.task.type.labels
    if kind == "class":
        for one in range(len(data.task.labels or ())):
            yield np.full(len(labels), one)
    elif kind == "number":
        yield np.full((len(labels), 1), float(np.mean(labels)))
    elif kind == "tags" or data.task.type.name == "recall":
        known = labels[labels != IGNORED]
        if len(known):
            yield np.full_like(labels, np.bincount(known).argmax())
