"""The mixer of all feature-map kernels: parameters, and how queries and keys become features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linearize.attention.backends.choose import choose, map_keys, map_queries
from linearize.attention.call import AttentionCall, MixerState
from linearize.attention.mixer import Mixer
from linearize.attention.shape import HeadShape
from linearize.kernels.base import FeatureMap, Features, Inputs
from linearize.ops import Mapped, Window, kernel_weights, window_weights
from linearize.ops.state import EPS, without_padding
from linearize.registry import KernelInfo

SIGNED_EPS = 1e-6
"""Smallest denominator of a map whose weights can be negative: there it can cross zero among ordinary numbers."""


class FeatureMapMixer(Mixer):
    """`o_i = phi(q_i) . sum_j phi(k_j) v_j / phi(q_i) . sum_j phi(k_j)`.

    The keys' map has one set of parameters per key/value head. Queries use the same map (each query head that of its
    group), or one of their own per query head where the kernel's argument `tied` is false. With a window, near tokens
    get softmax's weights instead, under the same denominator, and with sinks the first ones too: see
    `linearize.ops.window`.

    Attributes:
        window: W of the softmax window, or None.
        sinks: S of the first tokens beside the window.
        eps: smallest magnitude of a denominator.
        floor: c of `linearize.ops.floored`, 0 for none; with a window there is none.
    """

    def __init__(
        self, info: KernelInfo, config: Any, shape: HeadShape, window: int | None = None, sinks: int = 0
    ) -> None:
        super().__init__(info, config, shape)
        self.window, self.sinks = window, sinks
        build: Any = info.build
        self.inputs: Inputs | None = build.inputs(config, shape.heads, shape.key_heads, shape.head_dim)
        self.keys: FeatureMap = build(config, shape.key_heads, shape.head_dim)
        tied = getattr(config, "tied", True)
        self.queries: FeatureMap | None = None if tied else build(config, shape.heads, shape.head_dim)
        self.floor = self.keys.floor if window is None else 0.0
        self.eps = EPS if self.positive else SIGNED_EPS
        assert info.feature_dim is not None
        self.feature_dim = info.feature_dim(config, shape.head_dim)
        tied_inputs = self.queries is None and self.inputs is None and not info.positional
        self.symmetric = self.keys.symmetric and tied_inputs
        self.memory: dict[str, object] = {}

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill the maps and what is around them; an untied query map starts as the keys' one."""
        self.keys.reset_parameters(generator)
        for around in (self.inputs, self.output):
            if around is not None:
                around.reset_parameters()
        if self.queries is None:
            return
        groups = self.shape.heads // self.shape.key_heads
        with torch.no_grad():
            mine = dict(self.keys.named_parameters()) | dict(self.keys.named_buffers())
            for name, tensor in [*self.queries.named_parameters(), *self.queries.named_buffers()]:
                # What all heads share has one entry on the head axis in both.
                shared = tensor.shape == mine[name].shape
                tensor.copy_(mine[name] if shared else mine[name].repeat_interleave(groups, dim=0))

    def forward(self, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """See `Mixer.forward`; `linearize.attention.backends.choose` says how it is carried out."""
        if self.info.positional:
            return self._positional(call)
        return choose(self, call).run(self, call)

    def _positional(self, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Count the tokens of a positional kernel before the call, and how many there are after it."""
        seen = None if call.state is None else call.state["seen"]
        counted = _count(call.k, call.key_padding_mask, seen)
        call = replace(call, positions=(counted - 1).clamp(min=0))
        out, after = choose(self, call).run(self, call)
        return out, None if after is None else after | {"seen": counted[:, -1]}

    def features(self, call: AttentionCall) -> tuple[Features, Features]:
        """Map queries and keys -> the features of both, [B, H, T, F] and [B, K, S, F].

        Padding is mapped as zeros are. The queries are the last tokens of the keys' where there are fewer.
        """
        q, k, mask, positions = call.q, call.k, call.key_padding_mask, call.positions
        if mask is not None:
            q = without_padding(q, mask[:, -q.shape[2] :])
            k = without_padding(k, mask)
        if self.inputs is not None:
            q, k = self.inputs(q.float(), k.float(), mask)
        queries = self.query_features(q, call.scaling, None if positions is None else positions[:, -q.shape[2] :])
        return queries, self.key_features(k, call.scaling, positions)

    def key_features(self, k: Tensor, scaling: float, positions: Tensor | None) -> Features:
        """Map keys [B, K, T, D], behind what precedes the map."""
        return map_keys(self.keys, k, self.input_scale(scaling), positions)

    def query_features(self, q: Tensor, scaling: float, positions: Tensor | None) -> Features:
        """Map queries [B, H, T, D], behind what precedes the map.

        With the keys' map, the query heads of a group go along as further batch entries.
        """
        scale, groups = self.input_scale(scaling), self.shape.heads // self.shape.key_heads
        if self.queries is not None or groups == 1:
            map = self.keys if self.queries is None else self.queries
            return map_queries(map, q, scale, positions)
        batch, _, tokens, size = q.shape
        folded = q.reshape(batch, -1, groups, tokens, size).transpose(1, 2).reshape(batch * groups, -1, tokens, size)
        repeated = None if positions is None else positions.repeat_interleave(groups, dim=0)
        found = map_queries(self.keys, folded, scale, repeated)

        def unfold(x: Tensor) -> Tensor:
            return x.unflatten(0, (batch, groups)).transpose(1, 2).flatten(1, 2)

        return Features(unfold(found.phi), None if found.log_scale is None else unfold(found.log_scale))

    def input_scale(self, scaling: float) -> float:
        """Return what the map wants queries and keys multiplied with."""
        return scaling**0.5 if self.keys.scale_inputs else 1.0

    def mapped(
        self, q: Tensor, k: Tensor, *, scaling: float, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Map a whole sequence -> phi(q) [B, H, T, F], phi(k) [B, K, T, F], log-scale of the keys [B, K, T] or None.

        Stage one and the reports start here.
        """
        queries, keys = self._mapped(q, k, scaling, key_padding_mask)
        return queries.phi, *keys

    def _mapped(self, q: Tensor, k: Tensor, scaling: float, mask: Tensor | None) -> tuple[Features, Features]:
        """Map a whole sequence; the queries are the last tokens of the keys' where there are fewer."""
        positions = (_count(k, mask, None) - 1).clamp(min=0) if self.info.positional else None
        return self.features(AttentionCall(q, k, k, scaling, mask, positions))

    def cast_output(self, mixed: Tensor, dtype: torch.dtype) -> Tensor:
        """Do what follows the sums [B, H, T, V] in fp32, and cast the output to the host's dtype."""
        out = self.apply_output(mixed)
        if not self.positive and dtype == torch.float16:
            # Signed weights can be large, and fp16 ends at 65504.
            limit = torch.finfo(dtype).max
            out = out.clamp(-limit, limit)
        return out.to(dtype)

    def weights(self, q: Tensor, k: Tensor, *, scaling: float, key_padding_mask: Tensor | None = None) -> Tensor:
        """See `Mixer.weights`; the queries are the last tokens of the keys' where there are fewer."""
        queries, keys = self._mapped(q, k, scaling, key_padding_mask)
        if self.window is not None:
            window = Window(self.window, scaling, self.shape.causal, self.eps, self.sinks)
            return window_weights(Mapped(q, *queries), Mapped(k, *keys), window, key_padding_mask=key_padding_mask)
        return kernel_weights(
            queries.phi,
            keys.phi,
            key_padding_mask=key_padding_mask,
            log_scale=keys.log_scale,
            causal=self.shape.causal,
            normalize=self.keys.normalize,
            eps=self.eps,
            floor=self.floor,
        )


def _count(k: Tensor, mask: Tensor | None, seen: Tensor | None) -> Tensor:
    """Count the tokens up to and with each one [B, T], padding left out, behind the `seen` [B] ones."""
    real = torch.ones(k.shape[0], k.shape[2], device=k.device) if mask is None else mask.float()
    counted = real.cumsum(dim=-1)
    return counted if seen is None else seen[:, None] + counted
