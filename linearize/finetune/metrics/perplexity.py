"""Perplexity of a language model, from sums over windows: no logits have to be kept."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from linearize.finetune.metrics.base import NUMBERS, PackageMetric

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class Perplexity(PackageMetric):
    """Exponential of the mean negative log-likelihood per token.

    `predictions` are sums of negative log-likelihoods (nats) of windows, `references` the tokens they are sums over.
    """

    fields = NUMBERS

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        total, tokens = float(np.sum(predictions)), float(np.sum(references))
        mean = total / tokens if tokens else math.nan
        return {"perplexity": math.exp(mean) if mean < 700 else math.inf, "nll": mean, "tokens": tokens}
