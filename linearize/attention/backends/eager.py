"""PyTorch backends: map all tokens, then mix them with one of the ops in `linearize.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.attention.backends.causal import attend_causally, attend_with_state, causal_op
from linearize.attention.call import AttentionCall, Kind, MixerState
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.parts import NEAR, ROUTED, SCALED
from linearize.ops import WindowState, advance, bidirectional_attention, floored_attention, window_attention
from linearize.ops.window_parts import choose_blocks

NO_FLOOR = "it does not support a floor for denominators"


class Eager:
    """All tokens at once; accepts every call of the layers that it supports."""

    name, uses_op, supports = "eager", True, SCALED

    def why_not(self, mixer: FeatureMapMixer, kind: Kind) -> str:
        """Return why it declines such calls; empty if it can compute them."""
        return ""

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Return the output [B, H, T, V] and the state after, from the features of all tokens."""
        queries, keys = mixer.features(call)
        # Stay in fp32 until the output: sums without a denominator would overflow fp16.
        tensors, options = (queries.phi, keys.phi, call.v.float()), mixer.options(call, keys.log_scale)
        op = causal_op(call.native, normalize=mixer.divides) if mixer.shape.causal else bidirectional_attention
        if op is attend_with_state and not call.needs_state:
            return mixer.cast_output(attend_causally(*tensors, **options), call.v.dtype), None
        if mixer.floor > 0.0:
            out, state = floored_attention(*tensors, mixer.floor, op=op, **options)
        else:
            out, state = op(*tensors, **options)
        return mixer.cast_output(out, call.v.dtype), state._asdict() if call.needs_state else None


class Windowed:
    """Softmax inside a window, with a causal op that sums up the keys outside it."""

    name, uses_op, supports = "window", True, NEAR | ROUTED | SCALED

    def why_not(self, mixer: FeatureMapMixer, kind: Kind) -> str:
        """Return why it declines such calls; empty if it can compute them."""
        return "the layer has no softmax window" if mixer.window is None else ""

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Return the output [B, H, T, V] and the state after, with softmax for near keys."""
        window = mixer.form(call.scaling)
        assert window is not None
        queries, keys = mixer.sides(call)
        mask, before = call.key_padding_mask, None
        if call.state is not None:
            before = WindowState.of(call.state) if window.causal else call.linear_state
        # Stay in fp32 until the output, like all sums.
        choose = choose_blocks if call.native is None else call.native.choose
        out, state = window_attention(
            queries, keys, call.v, window, key_padding_mask=mask, initial_state=before, choose=choose
        )
        after = state.present() if call.needs_state and state is not None else None
        return mixer.cast_output(out.float(), call.v.dtype), after


class OneStep:
    """One decoding step: updates the state in place, without a gradient."""

    name, uses_op, supports = "one step", False, SCALED

    def why_not(self, mixer: FeatureMapMixer, kind: Kind) -> str:
        """Return why it declines such calls; empty if it can compute them."""
        if mixer.floor > 0.0:
            return NO_FLOOR
        return "" if kind.one_step else "the call is not a decoding step"

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Return the output [B, H, 1, V] and the state, which is updated in place."""
        if mixer.symmetric and call.q.shape[1] == call.k.shape[1]:
            both = torch.cat(call.without_padding(), dim=2)
            features = mixer.map_tokens(both, call.scaling, native=call.native)
            phi_q, phi_k = features.phi[:, :, :1], features.phi[:, :, 1:]
            log_scale = None if features.log_scale is None else features.log_scale[..., 1:]
        else:
            queries, keys = mixer.features(call)
            phi_q, phi_k, log_scale = queries.phi, keys.phi, keys.log_scale
        options = mixer.options(call, log_scale)
        before = options["initial_state"]
        assert before is not None
        out, state = advance(phi_q, phi_k, call.v, before, **options)
        return mixer.cast_output(out, call.v.dtype), state._asdict()
