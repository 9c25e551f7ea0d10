"""Measures of how close a converted model is to its softmax original: layers, heads, and whole outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.core.errors import ConfigError, DataError
from linearize.fidelity.ablate import without_kernel
from linearize.fidelity.teacher.observe import has_rows, run_body, show, softmax_output
from linearize.fidelity.teacher.rows import Rows, all_rows, group, softmax_rows
from linearize.modeling.model import evaluating
from linearize.ops import Window, kernel_weights

LOG_FLOOR = 1e-6
"""Least weight in the logarithm of the KL. Total variation and negative share have no floor."""


@dataclass(frozen=True)
class LayerFidelity:
    """One layer; every figure is a mean over valid queries, per head in `heads`.

    Attributes:
        module: the host module.
        kernel: the kernel's name.
        kl: cross-entropy minus the target's entropy, nats per query; None if weights are not normalised.
        total_variation: half the L1 distance of the SIGNED normalised weights to softmax's: 0 to 1 for distributions,
            more if weights are negative.
        negative_share: share of the weights that are negative.
        output_error: norm of the output's difference over the norm of softmax's output.
        heads: the four figures per head.
        far_mass: softmax's weight outside the layer's window and sinks; None without a window.
        window_error: the output error of the window alone; None unless the layer has both a window and a kernel.
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
    """Difference of two whole models on the same inputs, at their last hidden states.

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
    """Fidelity of all converted layers of a model.

    Attributes:
        layers: one entry per layer.
        queries: how many were compared per head.
        outputs: whole outputs against the original's; None if they were not compared.
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


def measure(
    original: PreTrainedModel | None, converted: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]
) -> Fidelity:
    """Measure how close a converted model is to its original.

    Layer by layer the kernels are compared with the converted model's own softmax, on the hidden states of that softmax
    model (in a model that was not tuned since, it is the original's); then the whole models with each other.

    Args:
        original: the model that was converted, loaded again, as `convert` changes a model in place. None: layers only.
        converted: the converted model. Both are unchanged afterwards.
        batches: model inputs; they are moved to the models' devices.

    Returns:
        The figures per layer and head, and in `outputs` how far the last hidden states differ. Its `to_dict` returns
        plain data, `linearize.fidelity.plots.fidelity_heatmaps` a picture.

    Raises:
        ConfigError: if the original is converted itself, or another kind of model.
        DataError: if `batches` is empty.
    """
    if original is not None:
        check_original(original, converted)
    batches = list(batches)
    fidelity = measure_layers(converted, batches)
    if original is None:
        return fidelity
    return replace(fidelity, outputs=output_difference(original, converted, batches))


def check_original(original: PreTrainedModel, converted: PreTrainedModel, name: str = "") -> None:
    """Refuse an original that cannot be the one that was converted.

    Raises:
        ConfigError: if it is converted itself, or another kind of model.
    """
    called = f"original {name!r}" if name else "original"
    if getattr(original.config, "linearize", None):
        raise ConfigError(f"{called}: got a converted model, expected the one it was made from; load that one again")
    got, expected = original.config.model_type, converted.config.linearize["base_model_type"]
    if got != expected:
        raise ConfigError(
            f"{called}: got a model of type {got!r}, expected {expected!r}; give the model that the checkpoint was "
            "made from"
        )


@torch.no_grad()
def output_difference(
    original: PreTrainedModel, converted: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]]
) -> OutputDifference | None:
    """Compare last hidden states at all real tokens; None if the models return none, or of different sizes.

    Texts are cut to what the original takes.
    """
    from linearize.conversion.positions import current_length

    cosine = error = power = 0.0
    count = 0
    for batch in batches:
        limit = current_length(original) if "input_ids" in batch else None
        cut = {name: value if limit is None else value[:, :limit] for name, value in batch.items()}
        first, second = (_states(model, cut) for model in (original, converted))
        if first is None or second is None or first.shape != second.shape:
            return None
        mask = cut.get("attention_mask")
        keep = torch.ones(first.shape[:2], dtype=torch.bool) if mask is None else mask.bool().cpu()
        one, two = first[keep], second[keep]
        cosine += float(torch.nn.functional.cosine_similarity(one, two, dim=-1).sum())
        error += float((one - two).square().sum())
        power += float(one.square().sum())
        count += len(one)
    if not count:
        return None
    return OutputDifference(cosine / count, (error / max(power, 1e-30)) ** 0.5, count)


def _states(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor | None:
    device = next(model.parameters()).device
    with evaluating(model):
        output = run_body(model, {name: value.to(device) for name, value in batch.items()})
    states = getattr(output, "last_hidden_state", None)
    return states.double().cpu() if torch.is_tensor(states) and states.ndim == 3 else None


class _Sums:
    """Sums of one layer over batches, per head."""

    def __init__(self, heads: int) -> None:
        names = ("kl", "total_variation", "negative", "weights", "error", "power", "queries", "far", "window_error")
        self.values = {name: torch.zeros(heads, dtype=torch.float64) for name in names}
        self.normalized, self.windowed, self.has_kernel_and_window = True, False, False

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
            if self.has_kernel_and_window
            else None,
        )


@torch.no_grad()
def measure_layers(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]) -> Fidelity:
    """Compare kernel and softmax in every converted layer, on the hidden states of the frozen softmax model.

    Args:
        model: a converted model; it is unchanged afterwards.
        batches: model inputs; they are moved to the model's device.

    Returns:
        The figures per layer and head. Time is quadratic in the length, memory linear.

    Raises:
        DataError: if `batches` is empty.
    """
    layers = linear_attentions(model)
    sums = {id(layer): _Sums(layer.shape.heads) for layer in layers.values()}

    def observe(
        layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        with torch.autocast(device_type=q.device.type, enabled=False):
            target = _add(sums[id(layer)], layer, q, k, v, mask, scaling).to(v.dtype)
        # For causal attention with padding the host itself would make a T x T mask.
        return target if layer.shape.causal else None

    if not show(model, batches, observe):
        raise DataError("fidelity: got no batch to measure on; give a data set with at least one example")
    fidelities = tuple(sums[id(layer)].result(name, layer.kernel) for name, layer in layers.items())
    queries = max((int(s.values["queries"].max()) for s in sums.values()), default=0)
    return Fidelity(fidelities, queries)


def _add(
    sums: _Sums, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Add a layer's figures on a batch, and return softmax's head outputs for the rest of the model."""
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
    restore = without_kernel(layer)
    if restore is not None:
        sums.has_kernel_and_window = True
        alone = layer(q, k, v, mask, scaling).float()
        restore()
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
    """Tell which keys of a block [B, K, G, C, S] are neither in the window nor sinks: [B or 1, 1, 1, C, S]."""
    total = rows.seen if mask is None else mask.shape[1]
    real = torch.ones(1, max(total, rows.part.stop), device=weights.device) if mask is None else mask
    place = real.long().cumsum(dim=-1)
    distance = place[:, rows.part, None] - place[:, None, : rows.seen]
    return ~(window.holds(distance) | (place <= window.sinks)[:, None, : rows.seen])[:, None, None]


def weight_rows(
    layer: LinearAttention, q: Tensor, k: Tensor, mask: Tensor | None, scaling: float
) -> Callable[[Rows], Tensor]:
    """Return a function from a block of rows to its signed normalised weights [B, K, G, C, seen]."""
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
