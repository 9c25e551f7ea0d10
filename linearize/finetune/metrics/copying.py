"""How well a language model copies a passage that it has read: accuracy and loss, the second time beside the first."""

from __future__ import annotations

import math

import numpy as np

from linearize.finetune.metrics.base import NUMBERS, PackageMetric


class Copying(PackageMetric):
    """Share of the repeated tokens that are the model's first choice, and the loss of the first and the second reading.

    `predictions` are sums over rows [N, 3]: right first choices and losses (nats) of the second reading, losses of the
    first; `references` are the tokens of each reading [N, 2], second and first.
    """

    fields = NUMBERS

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        right, again, first = np.asarray(predictions, dtype=np.float64).sum(axis=0)
        tokens, tokens_first = np.asarray(references, dtype=np.float64).sum(axis=0)
        return {
            "copy_accuracy": right / tokens if tokens else math.nan,
            "nll_copy": again / tokens if tokens else math.nan,
            "nll_first": first / tokens_first if tokens_first else math.nan,
        }
