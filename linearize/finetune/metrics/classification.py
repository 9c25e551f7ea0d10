"""Metrics of classes, by scikit-learn: accuracy, F1 and Matthews correlation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from linearize.finetune.metrics.base import PackageMetric, without_warnings

if TYPE_CHECKING:
    from collections.abc import Sequence


class Accuracy(PackageMetric):
    """Share of the predictions that equal their reference; NaN where there is none."""

    def _compute(
        self, predictions: Sequence[int] | np.ndarray, references: Sequence[int] | np.ndarray
    ) -> dict[str, float]:
        from sklearn.metrics import accuracy_score

        if not len(references):
            return {"accuracy": math.nan}
        return {"accuracy": float(accuracy_score(references, predictions))}


class F1(PackageMetric):
    """F1 of class 1, as GLUE has it for MRPC and QQP; 0 where that class is neither predicted nor occurs."""

    @without_warnings
    def _compute(
        self, predictions: Sequence[int] | np.ndarray, references: Sequence[int] | np.ndarray
    ) -> dict[str, float]:
        from sklearn.metrics import f1_score

        found = f1_score(references, predictions, labels=[1], average="macro", zero_division=0.0)
        return {"f1": float(found)}


class MacroF1(PackageMetric):
    """Plain mean of the F1 of every class that is predicted or occurs."""

    @without_warnings
    def _compute(
        self, predictions: Sequence[int] | np.ndarray, references: Sequence[int] | np.ndarray
    ) -> dict[str, float]:
        from sklearn.metrics import f1_score

        return {"f1_macro": float(f1_score(references, predictions, average="macro", zero_division=0.0))}


class Matthews(PackageMetric):
    """Correlation of predicted and true classes, CoLA's metric; 0 where either of them is constant."""

    source = "https://doi.org/10.1016/j.compbiolchem.2004.09.006"

    @without_warnings
    def _compute(
        self, predictions: Sequence[int] | np.ndarray, references: Sequence[int] | np.ndarray
    ) -> dict[str, float]:
        from sklearn.metrics import matthews_corrcoef

        if min(len(np.unique(predictions)), len(np.unique(references))) < 2:
            return {"matthews": 0.0}
        return {"matthews": float(matthews_corrcoef(references, predictions))}
