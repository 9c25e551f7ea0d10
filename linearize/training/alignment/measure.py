"""How close a student is to its teacher on held-out data: hidden states, pooled output, logits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from linearize.core.errors import DataError
from linearize.training.alignment.objective import LOGITS, POOLED, Objective, size_of


@dataclass(frozen=True)
class Closeness:
    """Figures of a student against its teacher on held-out data.

    Attributes:
        layers: relative error of the hidden state after each block, and of the last one ("output"): the norm of the
            difference over that of the teacher's spread around its mean.
        cosine: mean cosine of the pooled outputs (means over the tokens of a row).
        logits: mean divergence of the logits in nats, or share of their variance for regression; None without a head.
        loss: the weighted sum that the alignment minimises.
    """

    layers: dict[str, float]
    cosine: float
    logits: float | None
    loss: float

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


@torch.no_grad()
def measure(objective: Objective, batches: list[dict[str, Tensor]]) -> Closeness:
    """Compare student and teacher on batches that are on the models' device.

    Raises:
        DataError: if there is no batch.
    """
    if not batches:
        raise DataError("alignment: got no held-out batch to measure on; set some rows aside (--holdout)")
    sizes = [size_of(batch) for batch in batches]
    tokens, rows = (sum(column) for column in zip(*sizes, strict=True))
    sums: dict[str, Tensor] = {}
    for batch, size in zip(batches, sizes, strict=True):
        for name, term in objective.end_to_end(batch, size.of(tokens, rows)).items():
            sums[name] = sums[name] + term if name in sums else term
    logits = [float(value) for name, value in sums.items() if name.startswith(LOGITS)]
    layers = {
        name: math.sqrt(max(float(value), 0.0)) if math.isfinite(float(value)) else float(value)
        for name, value in sums.items()
        if name != POOLED and not name.startswith(LOGITS)
    }
    return Closeness(
        layers,
        1 - float(sums[POOLED]),
        sum(logits) / len(logits) if logits else None,
        float(objective.total(sums)),
    )


@torch.no_grad()
def blockwise_loss(objective: Objective, batches: list[dict[str, Tensor]]) -> dict[str, float]:
    """Return each block's error under the teacher's inputs, on held-out batches."""
    total = sum(size_of(batch).tokens for batch in batches)
    sums: dict[str, float] = {}
    for batch in batches:
        for name, value in objective.blockwise(batch, size_of(batch).of(total, 1), train=False).items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
