"""Metrics as `evaluate.Metric` subclasses that live in the package: nothing is fetched from the Hub to compute one."""

from __future__ import annotations

import importlib
from typing import Any

from linearize.errors import unknown_name

METRICS = {
    "accuracy": "accuracy:Accuracy",
    "entities": "entities:Entities",
    "f1": "f1:F1",
    "f1_macro": "f1:MacroF1",
    "matthews": "matthews:Matthews",
    "mse": "mse:MeanSquaredError",
    "pearson": "correlation:Pearson",
    "perplexity": "perplexity:Perplexity",
    "spans": "spans:Spans",
    "spearman": "correlation:Spearman",
}
"""Metric name -> module and class."""


def metric(name: str) -> Any:
    """Build a metric; its `compute(predictions=..., references=...)` returns a dictionary of figures.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    if name not in METRICS:
        raise unknown_name("metric", name, METRICS)
    module, _, cls = METRICS[name].partition(":")
    return getattr(importlib.import_module(f"linearize.finetune.metrics.{module}"), cls)()


__all__ = ["METRICS", "metric"]
