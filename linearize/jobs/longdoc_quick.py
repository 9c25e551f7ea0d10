"""`longdoc --quick`: lengths, rows and steps for a fixed number of operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from linearize.jobs.task_config import LongdocJob
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.load import length_limit

QUICK = 3e13
"""Operations of a `quick` run: 10 minutes at 50 billion per second, which two cores reach in fp32."""
QUICK_BATCH, QUICK_TOKENS, QUICK_EPOCHS = 8, 4096, 1.0
_TUNING, _STAGE_ONE, _ALIGNMENT, _MEASURING = 0.5, 0.08, 0.12, 0.3
"""Shares of these operations."""


def quick(job: LongdocJob) -> LongdocJob:
    """Return a job sized for `QUICK` operations, if it asks for that; options that were given stay.

    The sizes depend on the model's parameters only, so they are the same on every machine.
    """
    if not job.quick:
        return job
    cost, short = float(_parameters(job.model)), length_limit(job.model) or 1
    long = job.max_length or 2 * short
    # Operations per parameter and token: a pass 2, a step 6, stage one 3, the alignment (with its teacher) 8.
    rows = _TUNING * QUICK / (6 * cost * QUICK_EPOCHS * (short + long))
    # Four sides; and both models before the first epoch, after each one, and at the end.
    tokens = 3 * short + long + (QUICK_EPOCHS + 2) * (short + long)
    measured = _MEASURING * QUICK / (2 * cost * tokens)
    sizes = {
        "distill_steps": max(5, int(_STAGE_ONE * QUICK / (3 * cost * QUICK_TOKENS))),
        "align_steps": max(3, int(_ALIGNMENT * QUICK / (8 * cost * QUICK_TOKENS))),
        "batch_tokens": QUICK_TOKENS,
    }
    rows_read = DataOptions(
        limit=job.rows.limit or max(16, int(rows)), validation_limit=job.rows.validation_limit or max(24, int(measured))
    )
    tune = _with_defaults(job.tune, {"batch_size": QUICK_BATCH, "epochs": QUICK_EPOCHS})
    return _with_defaults(replace(job, max_length=long, rows=rows_read, tune=tune), sizes)


def _with_defaults(config: Any, values: Mapping[str, object]) -> Any:
    """Return a config with other defaults; values that differ from its defaults were given, and stay."""
    usual = {field.name: field.default for field in fields(config)}
    return replace(config, **{name: value for name, value in values.items() if getattr(config, name) == usual[name]})


def _parameters(name: str) -> int:
    """Count the parameters that a token passes through: all but the embeddings."""
    import torch
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(name))
    return sum(parameter.numel() for path, parameter in model.named_parameters() if "embedding" not in path)
