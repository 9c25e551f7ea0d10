"""The mixer of all feature-map kernels: map queries and keys, then one of the linear attention ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.attention.mixer import HeadShape, Mixer, MixerState
from linearize.kernels.base import Features
from linearize.ops import State, bidirectional_attention, causal_attention, kernel_weights, recurrent_attention
from linearize.ops.state import EPS
from linearize.registry import KernelInfo

SIGNED_EPS = 1e-6
"""Smallest denominator of a map whose weights can be negative: there it can cross zero among ordinary numbers."""


class FeatureMapMixer(Mixer):
    """`o_i = phi(q_i) . sum_j phi(k_j) v_j / phi(q_i) . sum_j phi(k_j)`.

    The keys' map has one set of parameters per key/value head. Queries use the same map (each query head that of its
    group), or one of their own per query head where the kernel's argument `tied` is false.
    """

    def __init__(self, info: KernelInfo, config: Any, shape: HeadShape) -> None:
        super().__init__(info, config, shape)
        self.keys = info.build(config, shape.key_heads, shape.head_dim)
        self.queries = None if getattr(config, "tied", True) else info.build(config, shape.heads, shape.head_dim)
        self.eps = EPS if info.positive else SIGNED_EPS

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill the maps; an untied query map starts as the keys' one."""
        self.keys.reset_parameters(generator)
        if self.queries is None:
            return
        groups = self.shape.heads // self.shape.key_heads
        with torch.no_grad():
            mine = dict(self.keys.named_parameters()) | dict(self.keys.named_buffers())
            for name, tensor in [*self.queries.named_parameters(), *self.queries.named_buffers()]:
                tensor.copy_(mine[name].repeat_interleave(groups, dim=0))

    def features(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scaling: float,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Map q [B, H, T, D] and k [B, K, S, D] -> phi(q) [B, H, T, F], phi(k) [B, K, S, F], log-scale [B, K, S]."""
        root = scaling**0.5 if self.keys.scale_inputs else 1.0
        keys: Features = self.keys(k.float() * root, keys=True, positions=key_positions)
        queries = q.float() * root
        if self.queries is not None:
            return self.queries(queries, keys=False, positions=query_positions).phi, *keys
        return self._tied(queries, query_positions), *keys

    def _tied(self, q: Tensor, positions: Tensor | None) -> Tensor:
        """Map queries with the keys' map: the query heads of a group go along as further batch entries."""
        groups = self.shape.heads // self.shape.key_heads
        if groups == 1:
            return self.keys(q, keys=False, positions=positions).phi
        batch, _, tokens, size = q.shape
        folded = q.reshape(batch, -1, groups, tokens, size).transpose(1, 2).reshape(batch * groups, -1, tokens, size)
        repeated = None if positions is None else positions.repeat_interleave(groups, dim=0)
        phi = self.keys(folded, keys=False, positions=repeated).phi
        return phi.reshape(batch, groups, -1, tokens, phi.shape[-1]).transpose(1, 2).flatten(1, 2)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        key_padding_mask: Tensor | None = None,
        state: MixerState | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, MixerState | None]:
        """See `Mixer.forward`."""
        positions, seen = self._positions(k, key_padding_mask, state)
        phi_q, phi_k, log_scale = self.features(
            q, k, scaling=scaling, query_positions=positions, key_positions=positions
        )
        op = bidirectional_attention
        if self.shape.causal:
            op = recurrent_attention if k.shape[2] == 1 else causal_attention
        out: Any = op(
            phi_q,
            phi_k,
            v,
            key_padding_mask=key_padding_mask,
            log_scale=log_scale,
            initial_state=None if state is None else State(state["kv"], state["log_scale"]),
            return_state=return_state,
            eps=self.eps,
        )
        if not return_state:
            return out, None
        mixed, after = out
        return mixed, after._asdict() | ({} if seen is None else {"seen": seen})

    def _positions(
        self, k: Tensor, mask: Tensor | None, state: MixerState | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Count the tokens [B, T] of positional kernels from 0, padding left out, and how many there are after."""
        if not self.info.positional:
            return None, None
        batch, _, tokens, _ = k.shape
        real = torch.ones(batch, tokens, device=k.device) if mask is None else mask.float()
        before = real.new_zeros(batch) if state is None else state["seen"]
        counted = before[:, None] + real.cumsum(dim=-1)
        return (counted - 1).clamp(min=0), counted[:, -1]

    def weights(self, q: Tensor, k: Tensor, *, scaling: float, key_padding_mask: Tensor | None = None) -> Tensor:
        """See `Mixer.weights`; the queries are the last tokens of the keys' where there are fewer."""
        positions, _ = self._positions(k, key_padding_mask, None)
        phi_q, phi_k, log_scale = self.features(
            q,
            k,
            scaling=scaling,
            query_positions=None if positions is None else positions[:, -q.shape[2] :],
            key_positions=positions,
        )
        return kernel_weights(
            phi_q,
            phi_k,
            key_padding_mask=key_padding_mask,
            log_scale=log_scale,
            causal=self.shape.causal,
            eps=self.eps,
        )
