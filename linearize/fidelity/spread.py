"""How widely attention is spread: entropy of the weights, and the share of them near the query.

Locally accumulated attention: Qin et al. 2022, "The Devil in Linear Transformer", https://arxiv.org/abs/2210.10340,
section 3.2. `l(i, r, N)` is the weight of the neighbourhood of r N keys centred on token i; a low curve is the
"attention dilution" of linear attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.core.errors import DataError
from linearize.fidelity.measure import weight_rows
from linearize.fidelity.teacher.observe import show
from linearize.fidelity.teacher.rows import all_rows, group, softmax_rows

RATIOS = tuple(i / 20 for i in range(1, 21))
"""Sizes of the neighbourhood, as shares of the input's length."""
SIDES = ("softmax", "linear")


@dataclass(frozen=True)
class LayerSpread:
    """One layer, means over queries; `[softmax's, the kernel's]` by the names in `SIDES`.

    Attributes:
        module: the host module.
        kernel: the kernel's name.
        entropy: nats per head. Negative weights count by their magnitude, as an entropy needs a distribution.
        local: locally accumulated attention at each of `RATIOS`, mean over heads.
    """

    module: str
    kernel: str
    entropy: dict[str, list[float]]
    local: dict[str, list[float]]

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


class _Sums:
    def __init__(self, heads: int) -> None:
        self.entropy = {side: torch.zeros(heads, dtype=torch.float64) for side in SIDES}
        self.local = {side: torch.zeros(len(RATIOS), dtype=torch.float64) for side in SIDES}
        self.queries = torch.zeros(heads, dtype=torch.float64)


@torch.no_grad()
def measure_spread(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]) -> list[LayerSpread]:
    """Measure entropy and locally accumulated attention of softmax and kernel in every converted layer.

    Args:
        model: a converted model; it is unchanged afterwards.
        batches: model inputs; they are moved to the model's device.

    Raises:
        DataError: if `batches` is empty.
    """
    layers = linear_attentions(model)
    sums = {id(layer): _Sums(layer.shape.heads) for layer in layers.values()}

    def observe(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> None:
        with torch.autocast(device_type=q.device.type, enabled=False):
            _add(sums[id(layer)], layer, q, k, mask, scaling)

    if not show(model, batches, observe):
        raise DataError("spread of the attention: got no batch to measure on; give at least one input")
    return [_result(name, layer, sums[id(layer)]) for name, layer in layers.items()]


def _result(name: str, layer: LinearAttention, sums: _Sums) -> LayerSpread:
    queries = sums.queries.clamp(min=1)
    entropy = {side: (sums.entropy[side] / queries).tolist() for side in SIDES}
    local = {side: (sums.local[side] / queries.sum()).tolist() for side in SIDES}
    return LayerSpread(name, layer.kernel, entropy, local)


def _add(sums: _Sums, layer: LinearAttention, q: Tensor, k: Tensor, mask: Tensor | None, scaling: float) -> None:
    valid = torch.ones(q.shape[0], q.shape[2], device=q.device) if mask is None else mask[:, -q.shape[2] :].float()
    sums.queries += valid.sum().item()
    # A neighbourhood is a share of the real tokens, counted without the padding.
    places = (valid.cumsum(dim=-1) - 1).clamp(min=0)
    lengths = valid.sum(dim=-1)
    queries = group(q, k.shape[1])
    weights = weight_rows(layer, q, k, mask, scaling)
    for rows in all_rows(q, layer.shape.causal, mask):
        both = (softmax_rows(queries, k, rows, scaling), weights(rows))
        keep = valid[:, None, None, rows.part]
        near = _neighbourhoods(places[:, rows.part], places[:, : rows.seen], lengths)
        for side, w in zip(SIDES, both, strict=True):
            p = w.abs()
            p = p if rows.visible is None else p * rows.visible
            p = p / p.sum(dim=-1, keepdim=True).clamp(min=1e-30)
            entropy = -(p * p.clamp(min=1e-30).log()).sum(dim=-1) * keep
            sums.entropy[side] += entropy.double().sum(dim=(0, 3)).flatten().cpu()
            heads = (p.flatten(1, 2) * keep.flatten(1, 2)[..., None]).sum(dim=1)
            sums.local[side] += torch.stack([(heads * mask).sum() for mask in near]).double().cpu()


def _neighbourhoods(queries: Tensor, keys: Tensor, lengths: Tensor) -> list[Tensor]:
    """Tell which keys [B, S] are near which queries [B, C], for inputs of lengths [B]: one [B, C, S] per ratio.

    At the ends a neighbourhood is moved inwards, so that it always has r N tokens.
    """
    near = []
    for ratio in RATIOS:
        size = (ratio * lengths).round().clamp(min=1)[:, None]
        start = (queries - (size / 2).floor()).clamp(min=0).minimum((lengths[:, None] - size).clamp(min=0))
        gap = keys[:, None, :] - start[:, :, None]
        near.append((gap >= 0) & (gap < size[:, :, None]))
    return near
