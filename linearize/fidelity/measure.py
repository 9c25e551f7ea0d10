"""How close a converted model's attention is to the softmax that it replaced, layer by layer and head by head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.errors import DataError
from linearize.fidelity.ablate import without_kernel
from linearize.ops import Window, kernel_weights
from linearize.teacher.observe import has_rows, show, softmax_output
from linearize.teacher.rows import Rows, all_rows, group, softmax_rows

LOG_FLOOR = 1e-6
"""Weights below this count as this in the logarithm of the KL. Total variation and negative share have no floor."""


@dataclass(frozen=True)
class LayerFidelity:
    """One layer; every figure is a mean over valid queries, per head in `heads`.

    Attributes:
        module: the host module.
        kernel: the kernel's name.
        kl: cross-entropy minus the target's entropy, nats per query; None where weights are not normalised.
        total_variation: half the L1 distance of the SIGNED normalised weights to softmax's: 0 to 1 for distributions,
            more where weights are negative.
        negative_share: share of the weights that are negative.
        output_error: norm of the output's difference over the norm of softmax's output.
        heads: the four figures per head.
        far_mass: softmax's weight outside the layer's window and sinks; None without a window.
        window_error: the output error of the window alone; None without a window, or without a kernel beside it.
    """

    module: str
    kernel: str
    kl: float | None
    total_variation: float | None
    negative_share: float | None
    output_error: float
    heads: dict[str, list[float]]
    far_mass: float | None = None
    window_error: float | None = None


@dataclass(frozen=True)
class OutputDifference:
    """Whole models on the same inputs, at their last hidden states.

    Attributes:
        cosine: mean cosine of the two vectors of a token.
        relative_error: norm of the difference over the norm of the original's states.
        tokens: how many tokens were compared.
    """

    cosine: float
    relative_error: float
    tokens: int


@dataclass(frozen=True)
class Fidelity:
    """All converted layers of a model, on some batches.

    Attributes:
        layers: one entry per layer.
        queries: how many were compared per head.
        outputs: whole outputs against the original's; None where they were not compared.
    """

    layers: tuple[LayerFidelity, ...]
    queries: int
    outputs: OutputDifference | None = None

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure over the layers that have it."""
        values = [getattr(layer, name) for layer in self.layers if getattr(layer, name) is not None]
        return sum(values) / len(values) if values else None

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        figures = ["kl", "total_variation", "negative_share", "output_error"]
        figures += [name for name in ("far_mass", "window_error") if self.mean(name) is not None]
        return {
            "queries": self.queries,
            "mean": {name: self.mean(name) for name in figures},
            "layers": [asdict(layer) for layer in self.layers],
            **({} if self.outputs is None else {"outputs": asdict(self.outputs)}),
        }


class _Sums:
    """Sums of one layer over batches, per head."""

    def __init__(self, heads: int) -> None:
        names = ("kl", "total_variation", "negative", "weights", "error", "power", "queries", "far", "window_error")
        self.values = {name: torch.zeros(heads, dtype=torch.float64) for name in names}
        self.normalized, self.windowed, self.kernel_beside_window = True, False, False

    def add(self, name: str, per_row: Tensor) -> None:
        """Add figures [B, K, G, R] or [B, H, R]."""
        flat = per_row.reshape(per_row.shape[0], -1, per_row.shape[-1])
        self.values[name] += flat.double().sum(dim=(0, 2)).cpu()

    def result(self, module: str, kernel: str) -> LayerFidelity:
        """Divide."""
        v = self.values
        queries = v["queries"].clamp(min=1)
        heads = {"output_error": (v["error"] / v["power"].clamp(min=1e-30)).sqrt().tolist()}
        mean = {"output_error": float((v["error"].sum() / v["power"].sum().clamp(min=1e-30)).sqrt())}
        if self.normalized:
            per_head = {
                "kl": v["kl"] / queries,
                "total_variation": v["total_variation"] / queries,
                "negative_share": v["negative"] / v["weights"].clamp(min=1),
            }
            heads |= {name: value.tolist() for name, value in per_head.items()}
            mean |= {name: float(value.mean()) for name, value in per_head.items()}
        return LayerFidelity(
            module,
            kernel,
            mean.get("kl"),
            mean.get("total_variation"),
            mean.get("negative_share"),
            mean["output_error"],
            heads,
            float((v["far"] / queries).mean()) if self.windowed else None,
            float((v["window_error"].sum() / v["power"].sum().clamp(min=1e-30)).sqrt())
            if self.kernel_beside_window
            else None,
        )


@torch.no_grad()
def measure_layers(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]) -> Fidelity:
    """Compare kernel and softmax in every converted layer, on the hidden states of the frozen softmax model.

    Args:
        model: a converted model; it is left as it was.
        batches: model inputs; they are moved to the model's device.

    Returns:
        The figures per layer and head. Time is quadratic in the length, memory linear.

    Raises:
        DataError: if there is no batch.
    """
    layers = linear_attentions(model)
    sums = {id(layer): _Sums(layer.shape.heads) for layer in layers.values()}

    def observe(
        layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        with torch.autocast(device_type=q.device.type, enabled=False):
            target = _add(sums[id(layer)], layer, q, k, v, mask, scaling).to(v.dtype)
        # The host's own way would make a T x T mask of a causal one with padding.
        return target if layer.shape.causal else None

    if not show(model, batches, observe):
        raise DataError("fidelity: got no batch to measure on; give a data set with at least one example")
    found = tuple(sums[id(layer)].result(name, layer.kernel) for name, layer in layers.items())
    queries = max((int(s.values["queries"].max()) for s in sums.values()), default=0)
    return Fidelity(found, queries)


def _add(
    sums: _Sums, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Add a layer's figures on a batch, and return softmax's head outputs, which go on through the model."""
    valid = torch.ones_like(q[:, :1, :, 0], dtype=torch.float32) if mask is None else mask[:, None].float()
    valid = valid.expand(-1, q.shape[1], -1)
    sums.add("queries", valid)
    target = softmax_output(layer, q.float(), k.float(), v.float(), mask, scaling)
    out = layer(q, k, v, mask, scaling).float()
    sums.add("error", (out - target).square().sum(dim=-1) * valid)
    sums.add("power", target.square().sum(dim=-1) * valid)
    mixer: Any = layer.mixer
    window = mixer.form(scaling) if has_rows(layer) else None
    sums.windowed = window is not None
    undo = without_kernel(layer)
    if undo is not None:
        sums.kernel_beside_window = True
        alone = layer(q, k, v, mask, scaling).float()
        undo()
        sums.add("window_error", (alone - target).square().sum(dim=-1) * valid)
    sums.normalized = layer.mixer.info.normalized
    if not sums.normalized:
        return target
    weights = weight_rows(layer, q, k, mask, scaling)
    queries = group(q, k.shape[1])
    valid = valid.reshape(*queries.shape[:-1])
    for rows in all_rows(q, layer.shape.causal, mask):
        t, w = softmax_rows(queries, k, rows, scaling), weights(rows)
        keep = valid[..., rows.part]
        visible = torch.ones_like(w, dtype=torch.bool) if rows.visible is None else rows.visible.expand_as(w)
        kl = (t * (t.clamp(min=1e-30).log() - w.clamp(min=LOG_FLOOR).log())).sum(dim=-1)
        sums.add("kl", kl * keep)
        if window is not None:
            sums.add("far", (t * _far(window, mask, rows, t)).sum(dim=-1) * keep)
        sums.add("total_variation", 0.5 * (t - w).abs().sum(dim=-1) * keep)
        sums.add("negative", ((w < 0) & visible).float().sum(dim=-1) * keep)
        sums.add("weights", visible.float().sum(dim=-1) * keep)
    return target


def _far(window: Window, mask: Tensor | None, rows: Rows, weights: Tensor) -> Tensor:
    """Tell which keys of a block [B, K, G, C, S] lie outside the window and are no sinks: [B or 1, 1, 1, C, S]."""
    total = rows.seen if mask is None else mask.shape[1]
    real = torch.ones(1, max(total, rows.part.stop), device=weights.device) if mask is None else mask
    place = real.long().cumsum(dim=-1)
    distance = place[:, rows.part, None] - place[:, None, : rows.seen]
    return ~(window.holds(distance) | (place <= window.sinks)[:, None, : rows.seen])[:, None, None]


def weight_rows(
    layer: LinearAttention, q: Tensor, k: Tensor, mask: Tensor | None, scaling: float
) -> Callable[[Rows], Tensor]:
    """Return a function that gives the signed normalised weights [B, K, G, C, seen] of a block of rows."""
    if not has_rows(layer) or layer.hybrid.window is not None or layer.hybrid.softmax_heads:
        whole = group(layer.mixer.weights(q, k, scaling=scaling, key_padding_mask=mask), k.shape[1])
        return lambda rows: whole[:, :, :, rows.part, : rows.seen]
    mixer: Any = layer.mixer
    queries, (phi_k, log_scale) = mixer.mapped(q, k, scaling=scaling, key_padding_mask=mask)

    def rows_of(rows: Rows) -> Tensor:
        # The queries of a causal block are the last of the tokens that it sees.
        weights = kernel_weights(
            queries.phi[:, :, rows.part],
            phi_k[:, :, : rows.seen],
            key_padding_mask=rows.mask,
            log_scale=None if log_scale is None else log_scale[:, :, : rows.seen],
            causal=rows.causal,
            eps=mixer.eps,
            floor=mixer.floor,
        )
        return group(weights, k.shape[1])

    return rows_of
