"""The mixer of all feature-map kernels: map queries and keys, then one of the linear attention ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.attention.mixer import HeadShape, Mixer, MixerState
from linearize.attention.streamed import Call, stream, stream_with_gradient
from linearize.kernels.base import FeatureMap, Features, Inputs
from linearize.native import NativeMap, engine
from linearize.native.gradient import attend_with_gradient, map_with_gradient
from linearize.ops import (
    State,
    WindowState,
    advance,
    bidirectional_attention,
    causal_attention,
    floored_attention,
    kernel_weights,
    recurrent_attention,
    window_attention,
    window_weights,
)
from linearize.ops.state import EPS, without_padding
from linearize.registry import KernelInfo

RECOMPUTED = 8192
"""From this many tokens on, the backward makes features again: a quarter to three quarters slower, little memory."""

SIGNED_EPS = 1e-6
"""Smallest denominator of a map whose weights can be negative: there it can cross zero among ordinary numbers."""


class FeatureMapMixer(Mixer):
    """`o_i = phi(q_i) . sum_j phi(k_j) v_j / phi(q_i) . sum_j phi(k_j)`.

    The keys' map has one set of parameters per key/value head. Queries use the same map (each query head that of its
    group), or one of their own per query head where the kernel's argument `tied` is false. With a window, near tokens
    get softmax's weights instead, under the same denominator: see `linearize.ops.window`.

    Attributes:
        window: W of the softmax window, or None.
        eps: smallest magnitude of a denominator.
        floor: c of `linearize.ops.floored`, 0 for none; with a window there is none.
    """

    def __init__(self, info: KernelInfo, config: Any, shape: HeadShape, window: int | None = None) -> None:
        super().__init__(info, config, shape)
        self.window = window
        build: Any = info.build
        self.inputs: Inputs | None = build.inputs(config, shape.heads, shape.key_heads, shape.head_dim)
        self.keys: FeatureMap = build(config, shape.key_heads, shape.head_dim)
        tied = getattr(config, "tied", True)
        self.queries: FeatureMap | None = None if tied else build(config, shape.heads, shape.head_dim)
        self.floor = self.keys.floor if window is None else 0.0
        self.eps = EPS if self.positive else SIGNED_EPS
        assert info.feature_dim is not None
        self.feature_dim = info.feature_dim(config, shape.head_dim)
        self._packed: Any = None

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

    def features(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scaling: float,
        key_padding_mask: Tensor | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> tuple[Features, Features]:
        """Map q [B, H, T, D] and k [B, K, S, D] -> the features of both, [B, H, T, F] and [B, K, S, F].

        Padding is mapped as zeros are. The queries are the last tokens of the keys' where there are fewer.
        """
        if key_padding_mask is not None:
            q = without_padding(q, key_padding_mask[:, -q.shape[2] :])
            k = without_padding(k, key_padding_mask)
        if self.inputs is not None:
            q, k = self.inputs(q.float(), k.float(), key_padding_mask)
        return self.query_features(q, scaling, query_positions), self.key_features(k, scaling, key_positions)

    def key_features(self, k: Tensor, scaling: float, positions: Tensor | None) -> Features:
        """Map keys [B, K, T, D], behind what precedes the map."""
        return self._map(self.keys, k, scaling, keys=True, positions=positions)

    def query_features(self, q: Tensor, scaling: float, positions: Tensor | None) -> Features:
        """Map queries [B, H, T, D], behind what precedes the map."""
        if self.queries is None:
            return self._tied(q, scaling, positions)
        return self._map(self.queries, q, scaling, keys=False, positions=positions)

    def _factor(self, scaling: float) -> float:
        """What the map wants queries and keys multiplied with."""
        return scaling**0.5 if self.keys.scale_inputs else 1.0

    def _map(self, map: FeatureMap, x: Tensor, scaling: float, *, keys: bool, positions: Tensor | None) -> Features:
        """Map x [B, H, T, D] in the scale that the map wants, in fp32."""
        native, factor = engine(), self._factor(scaling)
        if native is not None and native.takes(x, x, x) and (known := map.native()) is not None:
            return Features(*map_with_gradient(known, x, factor))
        x = x.float()
        return map(x if factor == 1.0 else x * factor, keys=keys, positions=positions)

    def _tied(self, q: Tensor, scaling: float, positions: Tensor | None) -> Features:
        """Map queries with the keys' map: the query heads of a group go along as further batch entries."""
        groups = self.shape.heads // self.shape.key_heads
        if groups == 1:
            return self._map(self.keys, q, scaling, keys=False, positions=positions)
        batch, _, tokens, size = q.shape
        folded = q.reshape(batch, -1, groups, tokens, size).transpose(1, 2).reshape(batch * groups, -1, tokens, size)
        repeated = None if positions is None else positions.repeat_interleave(groups, dim=0)
        found = self._map(self.keys, folded, scaling, keys=False, positions=repeated)

        def unfold(x: Tensor) -> Tensor:
            return x.unflatten(0, (batch, groups)).transpose(1, 2).flatten(1, 2)

        return Features(unfold(found.phi), None if found.log_scale is None else unfold(found.log_scale))

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
        positions, _ = self._positions(k, mask, None)
        return self.features(
            q,
            k,
            scaling=scaling,
            key_padding_mask=mask,
            query_positions=None if positions is None else positions[:, -q.shape[2] :],
            key_positions=positions,
        )

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
        call = Call(scaling, key_padding_mask, positions)
        after: MixerState | None = None
        native = self._native(q, k, v, call, state, return_state)
        if native is not None:
            out, after = native
        elif self._streams(q, state, return_state):
            if torch.is_grad_enabled():
                out = stream_with_gradient(self, q, k, v, call)
            else:
                out, found = stream(self, q, k, v, call, _linear_state(state))
                after = found._asdict()
        else:
            out, after = self._at_once(q, k, v, call, state, return_state)
        if after is None or not return_state:
            return out, None
        return out, after if seen is None else after | {"seen": seen}

    def _streams(self, q: Tensor, state: MixerState | None, return_state: bool) -> bool:
        """Tell whether the tokens are walked in parts: not where q and k meet before the map, nor while tracing."""
        at_once = self.window is not None or self.inputs is not None or self.floor > 0.0
        if at_once or torch.compiler.is_compiling() or q.shape[2] == 1:
            return False
        if not torch.is_grad_enabled():
            return True
        return state is None and not return_state and q.shape[2] >= RECOMPUTED

    def _native(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: MixerState | None, return_state: bool
    ) -> tuple[Tensor, MixerState | None] | None:
        """Attend through the native op; None where it is not there or cannot."""
        if self.window is not None or self.inputs is not None or self.floor > 0.0:
            return None
        native = engine()
        if native is None or call.positions is not None or not native.takes(q, k, v):
            return None
        maps = self._native_maps()
        if not maps:
            return None
        options = {"causal": self.shape.causal, "scale": self._factor(call.scaling), "eps": self.eps, "mask": call.mask}
        if torch.is_grad_enabled():
            # Through states, the ops in PyTorch know the gradient.
            if state is not None or return_state:
                return None

            def again(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
                return self._at_once(q, k, v, call, None, False)[0]

            return attend_with_gradient(maps, q, k, v, None, again, options), None
        out, kv, log_scale = native.attend(maps, q, k, v, start=_linear_state(state), **options)
        return out, {"kv": kv, "log_scale": log_scale}

    def _native_maps(self) -> list[NativeMap]:
        """Return the maps of keys and queries for the native op, one where it is the same; none where it lacks them."""
        if not self.keys.normalize or self.output is not None:
            return []
        maps = [map.native() for map in (self.keys, self.queries) if map is not None]
        return [map for map in maps if map is not None] if None not in maps else []

    def _packed_maps(self, native: Any, scaling: float) -> Any:
        """Return the maps as the native op reads them, or None where it lacks them.

        Describing them takes as long as a step: it is done once as long as the weights stay where they are, and where
        the op reads nothing but parameters.
        """
        weights = [w for map in (self.keys, self.queries) if map is not None for w in map._parameters.values()]
        key = [scaling, *((w.data_ptr(), w.dtype, w.stride()) for w in weights if w is not None)]
        if self._packed is not None and self._packed[0] == key:
            return self._packed[1]
        maps = self._native_maps()
        packed = native.pack(maps, self._factor(scaling)) if maps else None
        if packed is not None and {id(w) for w in packed.held} <= {id(w) for w in weights}:
            self._packed = key, packed._replace(held=())
        return packed

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        key_padding_mask: Tensor | None = None,
        state: MixerState,
    ) -> tuple[Tensor, MixerState]:
        """See `Mixer.decode`."""
        if self.window is not None or self.floor > 0.0:
            return super().decode(q, k, v, scaling=scaling, key_padding_mask=key_padding_mask, state=state)
        held = State(state["kv"], state["log_scale"])
        native = engine() if self.inputs is None else None
        if native is not None and native.steps(q, k, v, *held) and (maps := self._packed_maps(native, scaling)):
            return native.step(maps, q, k, v, held, eps=self.eps, mask=key_padding_mask), state
        positions, seen = self._positions(k, key_padding_mask, state)
        if self.keys.alike and self.queries is None and self.inputs is None and q.shape[1] == k.shape[1]:
            tokens = torch.cat([without_padding(x, key_padding_mask) for x in (q, k)], dim=2)
            both = self.key_features(tokens, scaling, None)
            phi_q, phi_k = both.phi[:, :, :1], both.phi[:, :, 1:]
            log_scale = None if both.log_scale is None else both.log_scale[..., 1:]
        else:
            options = {"query_positions": positions, "key_positions": positions, "key_padding_mask": key_padding_mask}
            queries, keys = self.features(q, k, scaling=scaling, **options)
            phi_q, phi_k, log_scale = queries.phi, keys.phi, keys.log_scale
        out, after = advance(
            phi_q,
            phi_k,
            v,
            held,
            key_padding_mask=key_padding_mask,
            log_scale=log_scale,
            normalize=self.keys.normalize,
            eps=self.eps,
        )
        found = after._asdict()
        return self.close(out, v.dtype), found if seen is None else found | {"seen": seen}

    def close(self, mixed: Tensor, dtype: torch.dtype) -> Tensor:
        """Do what follows the sums [B, H, T, V] in fp32, and go back to the host's dtype."""
        out = self.finish(mixed)
        if not self.positive and dtype == torch.float16:
            # Signed weights can be large, and fp16 ends at 65504.
            limit = torch.finfo(dtype).max
            out = out.clamp(-limit, limit)
        return out.to(dtype)

    def _at_once(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: MixerState | None, return_state: bool
    ) -> tuple[Tensor, MixerState | None]:
        """Map all tokens, then mix them."""
        queries, keys = self.features(
            q,
            k,
            scaling=call.scaling,
            key_padding_mask=call.mask,
            query_positions=call.positions,
            key_positions=call.positions,
        )
        # In fp32 until `finish`: sums without a denominator would overflow fp16.
        common: dict[str, Any] = {
            "key_padding_mask": call.mask,
            "log_scale": keys.log_scale,
            "return_state": return_state,
            "eps": self.eps,
        }
        if self.window is None:
            out, after = self._linear(queries.phi, keys.phi, v.float(), state, common)
        else:
            out, after = self._windowed(queries, keys, q, k, v, call.scaling, state, common)
        return self.close(out, v.dtype), after

    def _linear(
        self, phi_q: Tensor, phi_k: Tensor, v: Tensor, state: MixerState | None, common: dict[str, Any]
    ) -> tuple[Tensor, MixerState | None]:
        before = _linear_state(state)
        out: Any
        if self.floor > 0.0:
            out = floored_attention(
                phi_q, phi_k, v, floor=self.floor, causal=self.shape.causal, initial_state=before, **common
            )
        else:
            op = bidirectional_attention
            if self.shape.causal:
                op = recurrent_attention if phi_k.shape[2] == 1 else causal_attention
            out = op(phi_q, phi_k, v, initial_state=before, normalize=self.keys.normalize, **common)
        return (out[0], out[1]._asdict()) if common["return_state"] else (out, None)

    def _windowed(
        self,
        queries: Features,
        keys: Features,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        state: MixerState | None,
        common: dict[str, Any],
    ) -> tuple[Tensor, MixerState | None]:
        assert self.window is not None
        before = None if state is None else WindowState(*(state[name] for name in WindowState._fields))
        out: Any = window_attention(
            queries.phi,
            keys.phi,
            q,
            k,
            v,
            window=self.window,
            scaling=scaling,
            causal=self.shape.causal,
            query_log_scale=queries.log_scale,
            initial_state=before,
            **common,
        )
        return (out[0].float(), out[1]._asdict()) if common["return_state"] else (out.float(), None)

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
        queries, keys = self._mapped(q, k, scaling, key_padding_mask)
        common: dict[str, Any] = {
            "key_padding_mask": key_padding_mask,
            "log_scale": keys.log_scale,
            "causal": self.shape.causal,
            "eps": self.eps,
        }
        if self.window is None:
            return kernel_weights(queries.phi, keys.phi, normalize=self.keys.normalize, floor=self.floor, **common)
        return window_weights(
            queries.phi,
            keys.phi,
            q,
            k,
            window=self.window,
            scaling=scaling,
            query_log_scale=queries.log_scale,
            **common,
        )


def _linear_state(state: MixerState | None) -> State | None:
    return None if state is None else State(state["kv"], state["log_scale"])
