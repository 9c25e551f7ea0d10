"""Pearson and Spearman correlation, STS-B's metrics."""

from __future__ import annotations

from typing import Any

import numpy as np

from linearize.finetune.metrics.base import NUMBERS, PackageMetric


def pearson(first: np.ndarray, second: np.ndarray) -> float:
    """Return the correlation of two rows of numbers [N]; 0 where either is constant."""
    a, b = first - first.mean(), second - second.mean()
    spread = np.sqrt((a @ a) * (b @ b))
    return float(np.clip((a @ b) / spread, -1.0, 1.0)) if spread else 0.0


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks [N] of numbers [N] from 1; equal ones share the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]


class Pearson(PackageMetric):
    """Linear correlation."""

    fields = NUMBERS

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"pearson": pearson(np.asarray(predictions, np.float64), np.asarray(references, np.float64))}


class Spearman(PackageMetric):
    """Linear correlation of the ranks."""

    fields = NUMBERS

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"spearman": pearson(ranks(np.asarray(predictions)), ranks(np.asarray(references)))}
