"""Metrics of classes, from counts: accuracy, F1 and Matthews correlation; quick enough for thousands of resamples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from linearize.finetune.metrics.base import PackageMetric

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def _counts(predictions: ArrayLike, references: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how often each class is right, predicted and true, int [C] each."""
    guess, true = np.asarray(predictions), np.asarray(references)
    classes = 1 + int(max(guess.max(initial=0), true.max(initial=0)))
    hits, guesses, truths = (np.bincount(values, minlength=classes) for values in (true[guess == true], guess, true))
    return hits, guesses, truths


class Accuracy(PackageMetric):
    """Share of the predictions that equal their reference; NaN where there is none."""

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        same = np.asarray(predictions) == np.asarray(references)
        return {"accuracy": np.count_nonzero(same) / same.size if same.size else math.nan}


class F1(PackageMetric):
    """F1 of class 1, as GLUE has it for MRPC and QQP; 0 where that class is neither predicted nor occurs."""

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        guess, true = np.asarray(predictions) == 1, np.asarray(references) == 1
        total = np.count_nonzero(guess) + np.count_nonzero(true)
        return {"f1": 2 * np.count_nonzero(guess & true) / total if total else 0.0}


class MacroF1(PackageMetric):
    """Plain mean of the F1 of every class that is predicted or occurs."""

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        hits, guesses, truths = _counts(predictions, references)
        total = guesses + truths
        known = total > 0
        return {"f1_macro": float(np.mean(2 * hits[known] / total[known])) if known.any() else 0.0}


class Matthews(PackageMetric):
    """Correlation of predicted and true classes, CoLA's metric; 0 where either of them is constant."""

    source = "https://doi.org/10.1016/j.compbiolchem.2004.09.006"

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        # Whole numbers up to the last step: of N rows they stay below N^2, and Python's have no end.
        hits, guesses, truths = _counts(predictions, references)
        rows, right = int(truths.sum()), int(hits.sum())
        spread = [rows**2 - int(counts @ counts) for counts in (guesses, truths)]
        if not all(spread):
            return {"matthews": 0.0}
        return {"matthews": (right * rows - int(guesses @ truths)) / math.sqrt(spread[0] * spread[1])}
