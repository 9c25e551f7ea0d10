"""Matthews correlation, CoLA's metric, for any number of classes (Gorodkin 2004, the R_K statistic)."""

from __future__ import annotations

from typing import Any

import numpy as np

from linearize.finetune.metrics.base import PackageMetric


class Matthews(PackageMetric):
    """Correlation of predicted and true classes; 0 where either of them is constant."""

    source = "https://doi.org/10.1016/j.compbiolchem.2004.09.006"

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        classes, flat = np.unique(np.concatenate([predictions, references]), return_inverse=True)
        predicted, true = np.split(flat.reshape(-1), 2)
        count = len(predicted)
        by_predicted = np.bincount(predicted, minlength=len(classes)).astype(np.float64)
        by_true = np.bincount(true, minlength=len(classes)).astype(np.float64)
        covariance = float(np.sum(predicted == true)) * count - by_predicted @ by_true
        spread = (count**2 - by_predicted @ by_predicted) * (count**2 - by_true @ by_true)
        return {"matthews": float(covariance / np.sqrt(spread)) if spread else 0.0}
