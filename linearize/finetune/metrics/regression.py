"""Metrics of numbers, by scipy and scikit-learn: Pearson and Spearman correlation, mean squared error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from linearize.finetune.metrics.base import NUMBERS, PackageMetric, without_warnings

if TYPE_CHECKING:
    from collections.abc import Sequence


def _correlation(
    correlate: Callable[..., Any], predictions: Sequence[float] | np.ndarray, references: Sequence[float] | np.ndarray
) -> float:
    """Return a correlation of numbers [N]; 0 where either side is constant, which scipy leaves undefined."""
    sides = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    if any((side == side[:1]).all() for side in sides):
        return 0.0
    return float(correlate(*sides).statistic)


class Pearson(PackageMetric):
    """Linear correlation, STS-B's metric; 0 where either side is constant."""

    fields = NUMBERS

    @without_warnings
    def _compute(
        self, predictions: Sequence[float] | np.ndarray, references: Sequence[float] | np.ndarray
    ) -> dict[str, float]:
        from scipy.stats import pearsonr

        return {"pearson": _correlation(pearsonr, predictions, references)}


class Spearman(PackageMetric):
    """Linear correlation of the ranks, STS-B's metric; 0 where either side is constant."""

    fields = NUMBERS

    @without_warnings
    def _compute(
        self, predictions: Sequence[float] | np.ndarray, references: Sequence[float] | np.ndarray
    ) -> dict[str, float]:
        from scipy.stats import spearmanr

        return {"spearman": _correlation(spearmanr, predictions, references)}


class MeanSquaredError(PackageMetric):
    """Mean of the squared differences; NaN where there is no number or one that is not finite."""

    fields = NUMBERS

    def _compute(
        self, predictions: Sequence[float] | np.ndarray, references: Sequence[float] | np.ndarray
    ) -> dict[str, float]:
        from sklearn.metrics import mean_squared_error

        if not len(references) or not np.isfinite(predictions).all():
            # scikit-learn raises; the trainer is to see the NaN, and says at which step.
            return {"mse": math.nan}
        return {"mse": float(mean_squared_error(references, predictions))}
