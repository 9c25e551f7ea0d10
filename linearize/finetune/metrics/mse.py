"""Mean squared error, for regressions."""

from __future__ import annotations

from typing import Any

import numpy as np

from linearize.finetune.metrics.base import NUMBERS, PackageMetric


class MeanSquaredError(PackageMetric):
    """Mean of the squared differences."""

    fields = NUMBERS

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"mse": float(np.mean((np.asarray(predictions) - np.asarray(references)) ** 2))}
