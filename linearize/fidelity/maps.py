"""Softmax's weights and the kernel's: whole matrices for one short input, and how widely they are spread.

Locally accumulated attention: Qin et al. 2022, "The Devil in Linear Transformer", https://arxiv.org/abs/2210.10340,
section 3.2. `l(i, r, N)` is the weight of the neighbourhood of r N keys centred on token i; a low curve is the
"attention dilution" of linear attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.core.errors import DataError
from linearize.fidelity.measure import weight_rows
from linearize.fidelity.teacher import Rows, all_rows, group, show, softmax_rows

MAX_TOKENS = 1024
"""Most tokens of the input, as there are T x T numbers per layer and head."""
RATIOS = tuple(i / 20 for i in range(1, 21))
"""Sizes of the neighbourhood, as shares of the input's length."""
SIDES = ("softmax", "linear")


@dataclass(frozen=True)
class LayerMaps:
    """One layer on one input of T real tokens; everything is on the CPU in fp32.

    Attributes:
        module: the host module.
        layer: the converted layer itself.
        softmax: its frozen softmax's weights [H, T, T].
        linear: the kernel's signed weights [H, T, T]; if the kernel does not normalise, divided by the sum of their
            magnitudes in the row, so that they can be compared with softmax's.
        scores: q . k times the host's scaling [H, T, T].
        q: queries [H, T, D].
        k: keys [K, T, D].
        scaling: the host's scaling.
    """

    module: str
    layer: LinearAttention
    softmax: Tensor
    linear: Tensor
    scores: Tensor
    q: Tensor
    k: Tensor
    scaling: float

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.layer.kernel

    @property
    def causal(self) -> bool:
        """Whether a query sees only keys up to its own position."""
        return self.layer.shape.causal

    @property
    def visible(self) -> Tensor:
        """[T, T] bool: which keys a query sees."""
        seen = torch.ones(self.softmax.shape[-2:], dtype=torch.bool)
        return seen.tril() if self.causal else seen

    def distances(self) -> Tensor:
        """Return the total variation between the two weights, mean over queries: [H]."""
        return 0.5 * (self.softmax - self.linear).abs().sum(dim=-1).mean(dim=-1)


@torch.no_grad()
def attention_maps(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> list[LayerMaps]:
    """Return the weights of every converted layer on one input without padding.

    Args:
        model: a converted model; it is unchanged afterwards.
        batch: its inputs, one row.

    Returns:
        One entry per converted layer, in the order of the layers.

    Raises:
        DataError: if there is more than one row, or more than `MAX_TOKENS` tokens.
    """
    maps: list[LayerMaps] = []

    def visit(
        name: str, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> None:
        maps.append(_maps(name, layer, q, k, mask, scaling))

    show(model, [batch], visit)
    return maps


def _maps(name: str, layer: LinearAttention, q: Tensor, k: Tensor, mask: Tensor | None, scaling: float) -> LayerMaps:
    if q.shape[0] != 1 or k.shape[2] > MAX_TOKENS:
        raise DataError(
            f"attention maps: got {q.shape[0]} inputs of {k.shape[2]} tokens, expected one of at most {MAX_TOKENS}; "
            "give fewer"
        )
    tokens = k.shape[2]
    rows = Rows(slice(0, tokens), torch.arange(tokens, device=q.device), tokens, layer.shape.causal)
    queries = group(q, k.shape[1])
    softmax = softmax_rows(queries, k, rows, scaling)
    if layer.mixer.info.normalized:
        linear = weight_rows(layer, q, k, mask, scaling)(rows)
    else:
        # Without a denominator their sum may be negative; the sum of magnitudes is not.
        linear = group(layer.mixer.weights(q, k, scaling=scaling, key_padding_mask=mask), k.shape[1])
        linear = linear / linear.abs().sum(dim=-1, keepdim=True).clamp(min=1e-30)
    scores = (queries.float() * scaling) @ k[:, :, None].float().transpose(-1, -2)

    def plain(x: Tensor) -> Tensor:
        return x.flatten(1, 2)[0].float().cpu()

    return LayerMaps(
        name, layer, plain(softmax), plain(linear), plain(scores), q[0].float().cpu(), k[0].float().cpu(), scaling
    )


def rank_correlation(maps: LayerMaps) -> Tensor:
    """Return how monotone the kernel's weights are in q . k: Spearman's correlation per row, mean over rows, [H].

    Softmax has 1. Rows that see fewer than three keys are left out.
    """
    heads, tokens, _ = maps.scores.shape
    total, count = torch.zeros(heads), 0
    for row in range(tokens):
        seen = row + 1 if maps.causal else tokens
        if seen < 3:
            continue
        one, two = (_ranks(x[:, row, :seen]) for x in (maps.scores, maps.linear))
        total += torch.nn.functional.cosine_similarity(one, two, dim=-1)
        count += 1
    return total / max(1, count)


def _ranks(x: Tensor) -> Tensor:
    """Return centred ranks along the last axis."""
    ranks = x.argsort(dim=-1).argsort(dim=-1).float()
    return ranks - ranks.mean(dim=-1, keepdim=True)


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
    sums = {
        name: torch.zeros(len(SIDES), layer.shape.heads + len(RATIOS), dtype=torch.float64)
        for name, layer in layers.items()
    }
    counts = dict.fromkeys(layers, 0.0)

    def visit(
        name: str, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> None:
        valid = torch.ones(q.shape[0], q.shape[2], device=q.device) if mask is None else mask[:, -q.shape[2] :].float()
        counts[name] += valid.sum().item()
        sums[name] += _spread(layer, q, k, mask, scaling, valid)

    show(model, batches, visit)
    spreads = []
    for name, layer in layers.items():
        heads, count = layer.shape.heads, max(1.0, counts[name])
        entropy = dict(zip(SIDES, (sums[name][:, :heads] / count).tolist(), strict=True))
        local = dict(zip(SIDES, (sums[name][:, heads:] / (count * heads)).tolist(), strict=True))
        spreads.append(LayerSpread(name, layer.kernel, entropy, local))
    return spreads


def _spread(layer: LinearAttention, q: Tensor, k: Tensor, mask: Tensor | None, scaling: float, valid: Tensor) -> Tensor:
    """Return sums over valid queries, [2, H + R]: the entropy per head, and the weight near the query per ratio."""
    # A neighbourhood is a share of the real tokens, counted without the padding.
    places = (valid.cumsum(dim=-1) - 1).clamp(min=0)
    lengths = valid.sum(dim=-1)
    queries = group(q, k.shape[1])
    weights = weight_rows(layer, q, k, mask, scaling)
    sums = torch.zeros(len(SIDES), layer.shape.heads + len(RATIOS), dtype=torch.float64)
    for rows in all_rows(q, layer.shape.causal, mask):
        keep = valid[:, None, None, rows.part]
        near = _neighbourhoods(places[:, rows.part], places[:, : rows.seen], lengths)
        for side, w in enumerate((softmax_rows(queries, k, rows, scaling), weights(rows))):
            p = w.abs()
            p = p if rows.visible is None else p * rows.visible
            p = p / p.sum(dim=-1, keepdim=True).clamp(min=1e-30)
            entropy = -(p * p.clamp(min=1e-30).log()).sum(dim=-1) * keep
            heads = (p.flatten(1, 2) * keep.flatten(1, 2)[..., None]).sum(dim=1)
            local = torch.stack([(heads * mask).sum() for mask in near])
            sums[side] += torch.cat([entropy.double().sum(dim=(0, 3)).flatten().cpu(), local.double().cpu()])
    return sums


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
