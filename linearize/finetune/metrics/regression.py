"""Metrics of numbers: Pearson and Spearman correlation, mean squared error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from linearize.finetune.metrics.base import NUMBERS, PackageMetric

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def _correlation(predictions: ArrayLike, references: ArrayLike) -> float:
    """Return Pearson's correlation of numbers [N]; 0 where either side is constant, which leaves it undefined."""
    sides = [np.asarray(side, np.float64) for side in (predictions, references)]
    if any((side == side[:1]).all() for side in sides):
        return 0.0
    # Scaled, so that no square overflows.
    one, two = (centred / np.abs(centred).max() for centred in (side - side.mean() for side in sides))
    return float(np.clip(one @ two / math.sqrt((one @ one) * (two @ two)), -1.0, 1.0))


def _ranks(values: ArrayLike) -> np.ndarray:
    """Return ranks [N], the mean rank for ties; NaN everywhere if a value is NaN. Quicker than scipy's."""
    values = np.asarray(values, np.float64)
    if np.isnan(values).any():
        return np.full(len(values), math.nan)
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


class Pearson(PackageMetric):
    """Linear correlation, STS-B's metric; 0 where either side is constant."""

    fields = NUMBERS

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        return {"pearson": _correlation(predictions, references)}


class Spearman(PackageMetric):
    """Linear correlation of the ranks, STS-B's metric; 0 where either side is constant."""

    fields = NUMBERS

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        return {"spearman": _correlation(_ranks(predictions), _ranks(references))}


class MeanSquaredError(PackageMetric):
    """Mean of the squared differences; NaN where there is no number or one that is not finite."""

    fields = NUMBERS

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        guess, true = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
        if not len(true) or not np.isfinite(guess).all():
            return {"mse": math.nan}
        return {"mse": float(np.mean((guess - true) ** 2))}
