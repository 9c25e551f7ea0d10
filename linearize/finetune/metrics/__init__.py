"""Metrics as `evaluate.Metric` subclasses that live in the package: nothing is fetched from the Hub to compute one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from linearize.errors import unknown_name

if TYPE_CHECKING:
    from linearize.finetune.metrics.base import PackageMetric

METRICS = {
    "accuracy": "linearize.finetune.metrics.classification:Accuracy",
    "copying": "linearize.finetune.metrics.copying:Copying",
    "entities": "linearize.finetune.metrics.entities:Entities",
    "f1": "linearize.finetune.metrics.classification:F1",
    "f1_macro": "linearize.finetune.metrics.classification:MacroF1",
    "matthews": "linearize.finetune.metrics.classification:Matthews",
    "mse": "linearize.finetune.metrics.regression:MeanSquaredError",
    "pearson": "linearize.finetune.metrics.regression:Pearson",
    "perplexity": "linearize.finetune.metrics.perplexity:Perplexity",
    "retrieval": "linearize.finetune.metrics.retrieval:Retrieval",
    "spans": "linearize.finetune.metrics.spans:Spans",
    "spearman": "linearize.finetune.metrics.regression:Spearman",
}
"""Metric name -> module and class."""


def metric(name: str) -> PackageMetric:
    """Build a metric; its `compute(predictions=..., references=...)` returns a dictionary of numbers.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    if name not in METRICS:
        raise unknown_name("metric", name, METRICS)
    module, _, cls = METRICS[name].partition(":")
    return getattr(importlib.import_module(module), cls)()


__all__ = ["METRICS", "metric"]
