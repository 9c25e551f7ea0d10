"""How far a measured score is to be believed: a bootstrap interval over rows, and what guessing reaches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from linearize.finetune.prepared import IGNORED, Predictions, TaskData
from linearize.finetune.tasks import main_metric
from linearize.finetune.trainer import measure_task
from linearize.loading import wait

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from linearize.finetune.metrics.by_position import PositionLoss

RESAMPLES = 500
LEVEL = 0.95


@dataclass(frozen=True)
class Measured:
    """What a model reaches on a task's validation rows.

    Attributes:
        metrics: all metrics.
        score: the task's main metric.
        interval: its 95 % bootstrap interval over rows (over questions, where one may have several rows).
        chance: the score of the best answer that looks at no input; None where there is none (perplexities, spans).
        rows: how many rows were measured.
        units: how many of them, or questions, the interval is over.
        seconds_per_unit: of the model's forward passes.
        resampled: [R] the score on rows drawn with replacement, the same rows of the same data; None without interval.
        by_position: of causal language models, the loss by how many tokens stand before.
    """

    metrics: dict[str, float]
    score: float
    interval: tuple[float, float] | None
    chance: float | None
    rows: int
    units: int = 0
    seconds_per_unit: float = 0.0
    resampled: np.ndarray | None = None
    by_position: tuple[PositionLoss, ...] = ()


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


def measure_with_interval(model: PreTrainedModel, data: TaskData, *, batch_size: int = 64) -> Measured:
    """Measure a model on a task's validation rows, with an interval, the chance level and the time it took.

    Args:
        model: the model, on its device.
        data: the task's rows.
        batch_size: rows per batch.
    """
    kept: list[tuple[Predictions, Predictions]] = []

    def keep(predictions: Predictions, labels: Predictions) -> dict[str, float]:
        kept.append((predictions, labels))
        return data.compute_metrics(predictions, labels)

    with forward_seconds(model) as seconds:
        metrics = measure_task(model, replace(data, compute_metrics=keep), batch_size=batch_size)
    predictions, labels = kept[-1]
    scores = resampled_scores(data, predictions, labels)
    units = data.facts.get("questions", len(data.validation))
    return Measured(
        metrics,
        main_metric(data.task, metrics),
        None if scores is None else _percentiles(scores),
        chance_level(data, labels),
        len(data.validation),
        units,
        sum(seconds) / max(1, units),
        scores,
        () if data.by_position is None else data.by_position(predictions),
    )


@contextlib.contextmanager
def forward_seconds(model: nn.Module) -> Iterator[list[float]]:
    """Give a list that gets the seconds of every forward pass of a model in the block, a GPU's work included."""
    seconds: list[float] = []
    device = next(model.parameters()).device

    def now() -> float:
        wait(device if device.type == "cuda" else None)
        return time.perf_counter()

    # A forward pass is entered and left once: what the first hook pushes the second one replaces.
    hooks = [
        model.register_forward_pre_hook(lambda *_: seconds.append(-now())),
        model.register_forward_hook(lambda *_: seconds.append(seconds.pop() + now())),
    ]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


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
        # The metrics are means over units, and so is their mean.
        found = data.by_unit(predictions, labels)
        units = np.mean([found[name] for name in data.task.score], axis=0)
        return np.array([units[chance.integers(len(units), size=len(units))].mean() for _ in range(resamples)])
    if data.task.type.labels == "span":
        return None
    predictions = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
    labels = np.asarray(labels)
    scores = []
    for _ in range(resamples):
        rows = chance.integers(len(labels), size=len(labels))
        scores.append(main_metric(data.task, data.compute_metrics(predictions[rows], labels[rows])))
    return np.array(scores)


def paired_difference(ours: Measured, theirs: Measured) -> Difference | None:
    """Return how far one score is above another on the same rows; None where their rows are not the same ones.

    Args:
        ours: measured on the same data set as `theirs`; rows may be cut at other lengths.
        theirs: what is subtracted.
    """
    if ours.resampled is None or theirs.resampled is None or ours.units != theirs.units:
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
            yield np.tile(np.eye(len(data.task.labels or ()))[one], (len(labels), 1))
    elif kind == "number":
        yield np.full((len(labels), 1), float(np.mean(labels)))
    elif kind == "tags" or data.task.type.name == "recall":
        known = labels[labels != IGNORED]
        if len(known):
            yield np.full_like(labels, np.bincount(known).argmax())
