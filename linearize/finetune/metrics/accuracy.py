"""Accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np

from linearize.finetune.metrics.base import PackageMetric


class Accuracy(PackageMetric):
    """Share of the predictions that equal their reference."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
