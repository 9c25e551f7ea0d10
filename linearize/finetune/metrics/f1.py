"""F1 of the positive class, as GLUE has it for MRPC and QQP, and the mean over all classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from linearize.finetune.metrics.base import PackageMetric


def f1_of(predictions: np.ndarray, references: np.ndarray, label: int) -> float:
    """Return `2 TP / (2 TP + FP + FN)` of one class; 0 where the class occurs in neither [N] nor [N]."""
    hits = int(np.sum((predictions == label) & (references == label)))
    total = int(np.sum(predictions == label)) + int(np.sum(references == label))
    return 2 * hits / total if total else 0.0


class F1(PackageMetric):
    """F1 of class 1."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"f1": f1_of(np.asarray(predictions), np.asarray(references), 1)}


class MacroF1(PackageMetric):
    """Plain mean of the F1 of every class that is predicted or occurs."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        predicted, true = np.asarray(predictions), np.asarray(references)
        classes = np.union1d(predicted, true)
        return {"f1_macro": float(np.mean([f1_of(predicted, true, int(label)) for label in classes]))}
