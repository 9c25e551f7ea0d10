"""Metrics of how close a converted model is to its softmax original: per layer, per head, and for whole outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.attention.native import chooser
from linearize.attention.parts import HEADS, NEAR, ROUTED, SCALED, check_parts, taken_heads
from linearize.conversion.timm import is_timm, wrap
from linearize.core.errors import ConfigError
from linearize.core.figures import check_finite
from linearize.fidelity import teacher
from linearize.fidelity.ablate import merit_of, undone, without_kernel
from linearize.fidelity.teacher import Batch
from linearize.ops import Mapped, Window, kernel_weights
from linearize.ops.state import group_queries
from linearize.ops.window import NearKeys
from linearize.ops.window_parts import TINY

LOG_FLOOR = 1e-6
"""Smallest weight in the logarithm of the KL divergence. Total variation and negative share have no such floor."""


@dataclass(frozen=True)
class LayerFidelity:
    """The figures of one layer, averaged over valid queries; `heads` has them per head.

    Attributes:
        module: name of the host module.
        kernel: the kernel's name.
        kl: KL divergence (cross-entropy minus the target's entropy) in nats per query; None if weights are not
            normalised.
        total_variation: half the L1 distance between the SIGNED normalised weights and softmax's: 0 to 1 for
            distributions, possibly more if weights are negative.
        negative_share: share of the weights that are negative.
        output_error: norm of the difference between the outputs, relative to the norm of softmax's output.
        heads: the four figures per head.
        far_mass: softmax weight outside the layer's window and sinks; None without a window.
        window_error: the output error of the window alone; None unless the layer has both a window and a kernel.
        kernel_gain: 95 % bootstrap interval, over rows, of `window_error` minus `output_error`; None if there is no
            `window_error`, or if only one row was measured.
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
    kernel_gain: tuple[float, float] | None = None


@dataclass(frozen=True)
class OutputDifference:
    """Difference between two whole models on the same inputs, at their last hidden states.

    Attributes:
        cosine: mean cosine between the two vectors of a token.
        relative_error: norm of the difference, relative to the norm of the original's states.
        tokens: number of tokens compared.
    """

    cosine: float
    relative_error: float
    tokens: int


@dataclass(frozen=True)
class Fidelity:
    """Fidelity of all converted layers of a model.

    Attributes:
        layers: one entry per layer.
        queries: number of queries compared per head.
        outputs: difference of the whole outputs from the original's; None if they were not compared.
    """

    layers: tuple[LayerFidelity, ...]
    queries: int
    outputs: OutputDifference | None = None

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure over the layers for which it exists."""
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


def measure(original: PreTrainedModel | None, converted: PreTrainedModel, batches: Iterable[Batch]) -> Fidelity:
    """Measure how close a converted model is to its original.

    First, layer by layer, the kernels are compared with the converted model's own softmax, on the hidden states of that
    softmax model, which is the original unless the model was tuned after the conversion. Then the whole models are
    compared with each other.

    Args:
        original: the model that was converted; load it again, because `convert` changes a model in place. None compares
            the layers only.
        converted: the converted model. Both are unchanged afterwards.
        batches: model inputs (such as `input_ids` [B, T]); they are moved to the models' devices.

    Returns:
        The figures per layer and head, and in `outputs` the difference between the last hidden states. `to_dict`
        returns them as plain data; `linearize.fidelity.plots.fidelity_heatmaps` draws them.

    Raises:
        ConfigError: if the original is itself converted, or a different kind of model, or `converted` is not converted.
        DataError: if `batches` is empty, or a model's outputs are NaN or infinite.
    """
    if not linear_attentions(converted):
        raise ConfigError(f"got {type(converted).__name__}, expected a converted model; call linearize.convert first")
    if original is not None:
        original = wrap(original) if is_timm(original) else original
        check_original(original, converted)
    batches = list(batches)
    fidelity = measure_layers(converted, batches)
    if original is None:
        return fidelity
    return replace(fidelity, outputs=output_difference(original, converted, batches))


def check_original(original: PreTrainedModel, converted: PreTrainedModel, name: str = "") -> None:
    """Check that `original` can be the model that was converted.

    Raises:
        ConfigError: if it is itself converted, or a different kind of model.
    """
    label = f"original {name!r}" if name else "original"
    if getattr(original.config, "linearize", None):
        raise ConfigError(f"{label}: got a converted model, expected the model it was made from; load that model again")
    got, expected = original.config.model_type, converted.config.linearize["base_model_type"]
    if got != expected:
        raise ConfigError(
            f"{label}: got a model of type {got!r}, expected {expected!r}; give the model that the checkpoint was "
            "made from"
        )


def output_difference(
    original: PreTrainedModel, converted: PreTrainedModel, batches: Sequence[Batch]
) -> OutputDifference | None:
    """Compare the last hidden states [B, T, C] at all real tokens; None if a model returns none, or their sizes differ.

    Texts are cut to the maximum length of the original.
    """
    cosine = error = power = 0.0
    count = 0
    for batch in batches:
        cut = teacher.within_limit(original, batch)
        first, second = (teacher.exact_states(model, cut) for model in (original, converted))
        if first is None or second is None or first.shape != second.shape:
            return None
        mask = teacher.mask_of(cut, first)
        keep = torch.ones(first.shape[:2], dtype=torch.bool) if mask is None else mask.bool().cpu()
        expected, got = first[keep], second[keep]
        for side, states in (("original", expected), ("converted", got)):
            check_finite(f"last hidden states of the {side} model", states.float().numpy(), "tokens")
        cosine += float(torch.nn.functional.cosine_similarity(expected, got, dim=-1).sum())
        error += float((expected - got).square().sum())
        power += float(expected.square().sum())
        count += len(expected)
    if not count:
        return None
    return OutputDifference(cosine / count, (error / max(power, 1e-30)) ** 0.5, count)


class _Sums:
    """Sums of one layer's figures over batches, per head; figures that do not apply to the layer are missing."""

    def __init__(self, heads: int) -> None:
        self.heads, self.values = heads, dict[str, Tensor]()
        self.rows: dict[str, list[Tensor]] = {"error": [], "window_error": [], "power": []}

    def add(self, name: str, per_row: Tensor) -> None:
        """Add figures [B, K, G, R] or [B, H, R]."""
        flat = per_row.reshape(per_row.shape[0], self.heads, per_row.shape[-1]).cpu().double().sum(dim=2)
        self.values[name] = flat.sum(dim=0) + self.values.get(name, 0.0)
        if name in self.rows:
            self.rows[name].append(flat.sum(dim=1))

    def result(self, module: str, kernel: str) -> LayerFidelity:
        """Return the averages over all queries, and the errors relative to the norm of softmax's output."""
        v, none = self.values, torch.zeros(self.heads, dtype=torch.float64)
        for name, per_head in v.items():
            check_finite(f"layer {module}, {name}", per_head.numpy(), "heads")
        queries, power = v.get("queries", none).clamp(min=1), v.get("power", none)

        def whole(name: str) -> float:
            return float((v.get(name, none).sum() / power.sum().clamp(min=1e-30)).sqrt())

        heads = {"output_error": (v.get("error", none) / power.clamp(min=1e-30)).sqrt()}
        if "kl" in v:
            heads |= {name: v[name] / queries for name in ("kl", "total_variation")}
            heads["negative_share"] = v.get("negative", none) / v.get("weights", none).clamp(min=1)
        mean: dict[str, float] = {name: float(value.mean()) for name, value in heads.items()}
        gain = None
        if "window_error" in v:
            gain = merit_of(torch.stack([torch.cat(squares) for squares in self.rows.values()], dim=1)).interval
        return LayerFidelity(
            module,
            kernel,
            **{name: mean.get(name) for name in ("kl", "total_variation", "negative_share")},
            output_error=whole("error"),
            heads={name: value.tolist() for name, value in heads.items()},
            far_mass=float((v["far"] / queries).mean()) if "far" in v else None,
            window_error=whole("window_error") if "window_error" in v else None,
            kernel_gain=gain,
        )


@torch.no_grad()
def measure_layers(model: PreTrainedModel, batches: Iterable[Batch]) -> Fidelity:
    """Compare kernel and softmax in every converted layer, on the hidden states of the frozen softmax model.

    Args:
        model: a converted model; it is unchanged afterwards.
        batches: model inputs (such as `input_ids` [B, T]); they are moved to the model's device.

    Returns:
        The figures per layer and head, of the layers that ran. Time is quadratic in the length, memory linear.

    Raises:
        DataError: if `batches` is empty, or a model's outputs are NaN or infinite.
    """
    layers = linear_attentions(model)
    for layer in layers.values():
        check_parts(layer.hybrid, NEAR | ROUTED | SCALED | HEADS, "fidelity")
    sums = {name: _Sums(layer.shape.heads) for name, layer in layers.items()}

    def visit(
        name: str, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        add = sums[name].add
        valid = torch.ones_like(q[:, :1, :, 0], dtype=torch.float32) if mask is None else mask[:, None].float()
        valid = valid.expand(-1, q.shape[1], -1)
        add("queries", valid)
        target = teacher.softmax_output(layer, q.float(), k.float(), v.float(), mask, scaling)
        add("error", (layer(q, k, v, mask, scaling).float() - target).square().sum(dim=-1) * valid)
        add("power", target.square().sum(dim=-1) * valid)
        if (restore := without_kernel(layer)) is not None:
            with undone([restore]):
                alone = layer(q, k, v, mask, scaling).float()
            add("window_error", (alone - target).square().sum(dim=-1) * valid)
        if layer.mixer.info.normalized:
            for batch, tokens in teacher.pieces(mask):
                queries, keys = (q, k) if batch is None else [teacher.take(x, batch, tokens) for x in (q, k)]
                _add_weights(sums[name], layer, queries, keys, scaling)
        # For a causal layer with padding, the host would build a T x T mask; so it gets this output instead.
        return target.to(v.dtype) if layer.shape.causal else None

    teacher.show(model, batches, visit)
    queries = max((int(s.values["queries"].max()) for s in sums.values() if s.values), default=0)
    seen = {name: layer.kernel for name, layer in layers.items() if sums[name].values}
    return Fidelity(tuple(sums[name].result(name, kernel) for name, kernel in seen.items()), queries)


def _add_weights(sums: _Sums, layer: LinearAttention, q: Tensor, k: Tensor, scaling: float) -> None:
    """Add the figures that compare normalised weights, block by block; there is no padding."""
    window = layer.mixer.form(scaling) if isinstance(layer.mixer, FeatureMapMixer) else None
    kept, key_heads = sorted(taken_heads(layer.mixer.hybrid)), k.shape[1]
    queries, weights = group_queries(q, key_heads), _weight_rows(layer, q, k, scaling, window)
    # In `far_mass`, exact keys and routed blocks count as far.
    near = None if window is None else NearKeys(replace(window, exact_keys=0, blocks=0), k[..., 0])
    for rows in teacher.all_rows(q, layer.shape.causal):
        scores = teacher.score_rows(queries, k, rows, scaling)
        t, w = scores.softmax(dim=-1), weights(rows, scores)
        if kept:
            w.flatten(1, 2)[:, kept] = t.flatten(1, 2)[:, kept]
        sums.add("kl", (t * (t.clamp(min=1e-30).log() - w.clamp(min=LOG_FLOOR).log())).sum(dim=-1))
        sums.add("total_variation", 0.5 * (t - w).abs().sum(dim=-1))
        if near is not None:
            sums.add("far", (t * ~near.rows(rows.places, rows.seen)).sum(dim=-1))
        if not layer.mixer.positive:
            # Masked keys have weight zero.
            sums.add("negative", (w < 0).float().sum(dim=-1))
            seen = rows.places + 1 if rows.causal else torch.full_like(rows.places, rows.seen)
            sums.add("weights", seen.expand(t.shape[:-1]))


def _weight_rows(
    layer: LinearAttention, q: Tensor, k: Tensor, scaling: float, window: Window | None
) -> Callable[[teacher.Rows, Tensor], Tensor]:
    """Return a function that maps a block of rows and its scores to signed normalised weights [B, K, G, C, seen]."""
    mixer = layer.mixer
    if not isinstance(mixer, FeatureMapMixer) or (window is not None and not mixer.positive):
        whole = group_queries(mixer.weights(q, k, scaling=scaling), k.shape[1])
        return lambda rows, scores: whole[:, :, :, rows.part, : rows.seen].clone()
    queries, keys = mixer.mapped(q, k, scaling=scaling)
    if window is not None:
        return _hybrid_rows(Mapped(q, *queries), Mapped(k, *keys), window)

    def rows_of(rows: teacher.Rows, scores: Tensor) -> Tensor:
        phi_q, phi_k = queries.phi[:, :, rows.part], keys.phi[:, :, : rows.seen]
        scale = None if keys.log_scale is None else keys.log_scale[:, :, : rows.seen]
        weights = kernel_weights(
            phi_q, phi_k, log_scale=scale, causal=rows.causal, rows=rows.places, eps=mixer.eps, floor=mixer.floor
        )
        return group_queries(weights, k.shape[1])

    return rows_of


def _hybrid_rows(queries: Mapped, keys: Mapped, window: Window) -> Callable[[teacher.Rows, Tensor], Tensor]:
    """Return what `_weight_rows` does, for a positive kernel with a window, as defined in `linearize.ops.window`."""
    query_scale, key_scale, key_heads = queries.scale(), keys.scale(), keys.x.shape[1]
    near_keys = NearKeys(window, key_scale, keys.x, chooser(keys.x))
    grouped = group_queries(queries.x, key_heads)

    def rows_of(rows: teacher.Rows, scores: Tensor) -> Tensor:
        near = near_keys.rows(rows.places, rows.seen, grouped[:, :, :, rows.part].flatten(0, 1))
        near = near.unflatten(0, (-1, key_heads)) if near.ndim == 4 else near
        phi_q, phi_k = queries.phi[:, :, rows.part].float(), keys.phi[:, :, None, : rows.seen].float()
        factors = group_queries(phi_q, key_heads) @ phi_k.mT
        factors.masked_fill_(near, 1.0)
        if rows.visible is not None:
            factors.masked_fill_(~rows.visible, 0.0)
        of_queries = group_queries(query_scale[:, :, rows.part, None], key_heads)
        exponents = torch.where(near, scores, of_queries + key_scale[:, :, None, None, : rows.seen])
        # A key without weight must not determine the row's shift.
        exponents.masked_fill_(factors <= TINY, -torch.inf)
        exponents -= exponents.amax(dim=-1, keepdim=True)
        weights = factors.mul_(exponents.exp_())
        return weights.div_(weights.sum(dim=-1, keepdim=True))

    return rows_of
