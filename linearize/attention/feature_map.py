"""The mixer for all feature-map kernels: its parameters, and the mapping of queries and keys to features."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from linearize.attention.call import AttentionCall
from linearize.attention.hybrid import LogScale, Scales, SoftmaxHeads, fade
from linearize.attention.mixer import Mixer
from linearize.attention.native import engine
from linearize.attention.native.gradient import MappedTokens
from linearize.attention.parts import HEADS, NEAR, ROUTED, SCALED, check_parts
from linearize.attention.shape import HeadShape
from linearize.core.registry import PLAIN, SCALES, Hybrid, KernelInfo
from linearize.kernels.base import FeatureMap, Features, Inputs, weights_of
from linearize.ops import LinearOptions, Mapped, Unmapped, Window, kernel_weights, window_weights
from linearize.ops.state import EPS

SIGNED_EPS = 1e-6
"""Smallest denominator of a map whose weights can be negative: such a denominator can cross zero in ordinary use."""


class FeatureMapMixer(Mixer):
    """`o_i = phi(q_i) . sum_j phi(k_j) v_j / phi(q_i) . sum_j phi(k_j)`.

    The keys' map has one set of parameters per key/value head. Queries use the same map (each query head uses that of
    its group), or a separate one per query head if the kernel's argument `tied` is false. With a window, near tokens
    get softmax weights instead, with the same denominator, and so do sinks, exact keys and routed blocks;
    `linearize.ops.window` has the formula.

    Attributes:
        hybrid: the layer's additions to the kernel.
        window: size W of the softmax window, or None.
        key_scale: learned log-scales of the keys, or None.
        query_scale: learned log-scales of the queries; None without a window, because they would cancel.
        softmax_heads: the query heads that keep softmax, or None.
        eps: smallest magnitude of a denominator.
        feature_dim: size F of the features.
        floor: c of `linearize.ops.floored`; 0 for no floor, and always 0 with a window.
        divides: whether the op divides rows by their sums; with a window or a floor this is done elsewhere.
        symmetric: whether queries and keys have the same map, so that both can be mapped at once.
        counts: whether tokens must be counted, because the kernel is positional or its linear part fades.
        asked: names of the parts that a backend must compute; `LinearMixer` adds the heads that keep softmax.
        memory: the backend of each kind of call so far, and what backends keep, by names that begin with theirs.
    """

    def __init__(self, info: KernelInfo, config: object, shape: HeadShape, hybrid: Hybrid = PLAIN) -> None:
        super().__init__(info, config, shape)
        build: Any = info.build
        self.inputs: Inputs | None = build.inputs(config, shape.heads, shape.key_heads, shape.head_dim)
        self.keys: FeatureMap = build(config, shape.key_heads, shape.head_dim)
        tied = getattr(config, "tied", True)
        self.queries: FeatureMap | None = None if tied else build(config, shape.heads, shape.head_dim)
        self.key_scale = self.query_scale = None
        if hybrid.scale != SCALES[0]:
            self.key_scale = LogScale(hybrid.scale, shape.key_heads, shape.head_dim, bias=False)
            if hybrid.window is not None:
                self.query_scale = LogScale(hybrid.scale, shape.heads, shape.head_dim, bias=True)
        self.eps = EPS if self.positive else SIGNED_EPS
        assert info.feature_dim is not None
        self.feature_dim = info.feature_dim(config, shape.head_dim)
        tied_inputs = self.queries is None and self.inputs is None and not info.positional
        self.symmetric = self.keys.symmetric and tied_inputs
        self.change(hybrid)

    def change(self, hybrid: Hybrid) -> None:
        """Replace the additions to the kernel by others with the same scale; the parameters are kept."""
        self.hybrid, self.window = hybrid, hybrid.window
        heads, groups = hybrid.softmax_heads, self.shape.heads // self.shape.key_heads
        self.softmax_heads = SoftmaxHeads(heads, groups, self.shape.causal) if heads else None
        self.floor = self.keys.floor if hybrid.window is None else 0.0
        self.divides = self.keys.normalize and hybrid.window is None and self.floor == 0.0
        self.counts = self.info.positional or hybrid.trained_length is not None
        self.asked = frozenset(hybrid.changed) - HEADS
        self.memory: dict[object, Any] = {}

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill the maps and the modules around them; a separate query map starts as a copy of the keys' map."""
        self.keys.reset_parameters(generator)
        for around in (self.inputs, self.output):
            if around is not None:
                around.reset_parameters()
        for scale in (self.key_scale, self.query_scale):
            if scale is not None:
                scale.reset_parameters(generator)
        if self.queries is None:
            return
        groups = self.shape.heads // self.shape.key_heads
        of_keys = dict(self.keys.named_parameters()) | dict(self.keys.named_buffers())
        for name, tensor in [*self.queries.named_parameters(), *self.queries.named_buffers()]:
            # A tensor shared by all heads has one entry on the head axis in both maps.
            shared = tensor.shape == of_keys[name].shape
            tensor.copy_(of_keys[name] if shared else of_keys[name].repeat_interleave(groups, dim=0))

    def features(
        self, call: AttentionCall, learned: Scales = (None, None), rows: Tensor | None = None
    ) -> tuple[Features, Features]:
        """Map queries and keys -> the features of both, [B, H, T, F] and [B, K, T, F].

        Padding is mapped like zeros.

        Args:
            call: the queries and keys.
            learned: the result of `log_scales` for them, if already computed.
            rows: tokens [R] whose queries are wanted, [B, H, R, F]; None for all.
        """
        q, k = self.prepared(call)
        places = of_queries = call.places if self.counts else None
        if rows is not None:
            q, of_queries = q[:, :, rows], None if places is None else places[:, rows]
        queries = self.map_tokens(q, call.scaling, of_queries, learned[0], queries=True, native=call.native)
        return queries, self.map_tokens(k, call.scaling, places, learned[1], native=call.native)

    def prepared(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Return queries [B, H, T, D] and keys [B, K, T, D] with zeros at padding, after the kernel's `inputs`."""
        q, k = call.without_padding()
        return (q, k) if self.inputs is None else self.inputs(q.float(), k.float(), call.key_padding_mask)

    def sides(self, call: AttentionCall) -> tuple[Mapped, Mapped | Unmapped]:
        """Return the queries and keys of a call with a window; after a state, keys are mapped when they leave it."""
        places = call.places if self.info.positional else None
        if call.state is None or not self.shape.causal:
            queries, keys = self.features(call)
            return Mapped(call.q, *queries), Mapped(call.k, *keys, places)
        q = self.prepared(call)[0]
        of_queries = call.places if self.counts else None
        queries = self.map_tokens(q, call.scaling, of_queries, queries=True, native=call.native)
        return Mapped(call.q, *queries), Unmapped(call.k, functools.partial(self._map_later, call), places)

    def _map_later(self, call: AttentionCall, k: Tensor, places: Tensor | None) -> Features:
        k = k if self.inputs is None else self.inputs.keys(k.float())
        if places is None or places.ndim == 2:
            return self.map_tokens(k, call.scaling, places, native=call.native)
        # A map takes the same places for all heads; of each head's own, only that head is used.
        every, places = k.repeat_interleave(k.shape[1], 0), places.flatten(0, 1)
        phi, scale = self.map_tokens(every, call.scaling, places, native=call.native)
        phi = phi.unflatten(0, k.shape[:2]).diagonal(dim1=1, dim2=2).movedim(-1, 1)
        return Features(phi, None if scale is None else scale.unflatten(0, k.shape[:2]).diagonal(dim1=1, dim2=2).mT)

    def options(self, call: AttentionCall, log_scale: Tensor | None) -> LinearOptions:
        """Return the options of an op that computes the call, given the log-scales [B, K, T] of the keys' features."""
        mask, state = call.key_padding_mask, call.linear_state
        given: LinearOptions = {"key_padding_mask": mask, "log_scale": log_scale, "initial_state": state}
        return {**given, "normalize": self.keys.normalize, "eps": self.eps}

    def log_scales(self, call: AttentionCall) -> Scales:
        """Return the learned log-scales of queries [B, H, T] and keys [B, K, T], for a kernel without `inputs`."""
        if self.key_scale is None:
            return None, None
        q, k = call.without_padding()
        places = call.places if self.counts else None
        return self._learned(q, places, queries=True), self._learned(k, places, queries=False)

    def _learned(self, x: Tensor, positions: Tensor | None, *, queries: bool) -> Tensor | None:
        """Return the learned log-scales; those of queries fade beyond the trained length."""
        log_scale, length = self.query_scale if queries else self.key_scale, self.hybrid.trained_length
        if log_scale is None:
            return None
        learned: Tensor = log_scale(x)
        if length is None or not queries:
            return learned
        assert positions is not None, "a linear part that fades needs the places of the queries"
        return learned + fade(positions[:, None], length)

    def map_tokens(
        self,
        x: Tensor,
        scaling: float,
        positions: Tensor | None = None,
        learned: Tensor | None = None,
        *,
        queries: bool = False,
        native: Any = None,
    ) -> Features:
        """Map keys [B, K, T, D] or queries [B, H, T, D] -> features in fp32.

        Args:
            x: the tokens, after the kernel's `inputs` module; padding is zero.
            scaling: the host's scaling factor of the scores.
            positions: their places [B, T], if tokens are counted.
            learned: their learned log-scales, if already computed.
            queries: whether they are queries.
            native: the native op, if it may compute the map.
        """
        map, batch, groups = self.keys, x.shape[0], 1
        if learned is None and self.key_scale is not None:
            learned = self._learned(x, positions, queries=queries)
        if queries and self.queries is not None:
            map = self.queries
        elif queries and (groups := self.shape.heads // self.shape.key_heads) > 1:
            # With the keys' map, the query heads of a group become extra batch entries.
            x = x.unflatten(1, (-1, groups)).transpose(1, 2).flatten(0, 1)
            positions = None if positions is None else positions.repeat_interleave(groups, dim=0)
        scale = self.input_scale(scaling)
        usable = native is not None and native.supports(x, x, x) and not self.is_offloaded()
        if usable and (spec := map.map_spec()) is not None:
            phi, log_scale = MappedTokens.apply(native, spec, scale, x, *weights_of(spec))
        else:
            x = x.float() if scale == 1.0 else x.float() * scale
            own = map.forward if self.symmetric else map.forward_queries if queries else map.forward_keys
            phi, log_scale = own(x, positions)
        if groups > 1:
            phi = phi.unflatten(0, (batch, groups)).transpose(1, 2).flatten(1, 2)
            if log_scale is not None:
                log_scale = log_scale.unflatten(0, (batch, groups)).transpose(1, 2).flatten(1, 2)
        if learned is not None:
            log_scale = learned if log_scale is None else log_scale + learned
        return Features(phi, log_scale)

    def is_offloaded(self) -> bool:
        """Tell whether accelerate loads the weights for a module's own forward only; until then they have no memory."""
        # Decoding calls this at every step, and these loops are the fastest way.
        for part in self._modules.values():
            for weight in () if part is None else part._parameters.values():
                if weight is not None and weight.is_meta:
                    return True
        return False

    def input_scale(self, scaling: float) -> float:
        """Return the factor that multiplies queries and keys before the map."""
        return scaling**0.5 if self.keys.scale_inputs else 1.0

    def mapped(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scaling: float,
        key_padding_mask: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Features, Features]:
        """Map a whole sequence -> the features of the queries [B, H, T, F] and of the keys [B, K, T, F].

        With `rows` [R], the features of the queries of these tokens only. Used by stage one and the reports.
        """
        native = engine() if k.is_cpu else None
        return self.features(AttentionCall(q, k, k, scaling, key_padding_mask, native=native), rows=rows)

    def form(self, scaling: float) -> Window | None:
        """Return the window in the form that the ops expect; None without a window."""
        if self.window is None:
            return None
        hybrid = self.hybrid
        kept = hybrid.sinks, hybrid.exact_keys, *hybrid.blocks, hybrid.routed_heads
        return Window(self.window, scaling, self.shape.causal, self.eps, *kept)

    def apply_output(self, mixed: Tensor) -> Tensor:
        """Apply the kernel's output to the weighted sum of the values [B, H, T, V]; heads that keep softmax have none.

        For every mixer, `forward` equals `apply_output(weights @ v)`.
        """
        out = super().apply_output(mixed)
        if self.output is None or self.softmax_heads is None:
            return out
        heads = torch.tensor(self.softmax_heads.heads, device=out.device)
        return out.index_copy(1, heads, mixed.index_select(1, heads).to(out.dtype))

    def cast_output(self, mixed: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply the kernel's output to the sums [B, H, T, V] in fp32, and cast it to the host's dtype."""
        out = mixed if self.output is None else self.apply_output(mixed)
        if not self.positive and dtype == torch.float16:
            # Signed weights can be large, and the largest fp16 number is 65504.
            limit = torch.finfo(dtype).max
            out = out.clamp(-limit, limit)
        return out.to(dtype)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scaling: float,
        key_padding_mask: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the weights as `Mixer.weights` does."""
        check_parts(self.hybrid, NEAR | ROUTED | SCALED | HEADS, "weights")
        queries, keys = self.mapped(q, k, scaling=scaling, key_padding_mask=key_padding_mask, rows=rows)
        window = self.form(scaling)
        if window is not None:
            sides = Mapped(q if rows is None else q[:, :, rows], *queries), Mapped(k, *keys)
            weights = window_weights(*sides, window, key_padding_mask=key_padding_mask, rows=rows)
        else:
            options = self.options(AttentionCall(q, k, k, scaling, key_padding_mask), keys.log_scale)
            weights = kernel_weights(
                queries.phi, keys.phi, causal=self.shape.causal, floor=self.floor, rows=rows, **options
            )
        if self.softmax_heads is None:
            return weights
        index = torch.tensor(self.softmax_heads.heads, device=weights.device)
        softmax = self.softmax_heads.weights(q, k, scaling, key_padding_mask)
        return weights.index_copy(1, index, softmax if rows is None else softmax[:, :, rows])
