"""The backend in Triton for a decoding step on a GPU, with or without a softmax window: one kernel, or two."""

from __future__ import annotations

from torch import Tensor

from linearize.attention.backends.eager import NO_FLOOR
from linearize.attention.backends.native import maps_of
from linearize.attention.backends.triton_calls import (
    HALVES,
    USUAL,
    elsewhere,
    launch,
    padded,
    padded_sizes,
    readable,
    unusable,
    weights_of,
)
from linearize.attention.call import AttentionCall, Kind, MixerState
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.hybrid import FADING, UNITS
from linearize.attention.parts import NEAR, SCALED

MOST_GROUPS = 4
"""Most query heads per key head: one program holds the features of all of them."""

COUNTED = ("ring_mask", 1), ("sink_k", 2), ("kept_mask", 1)
"""Tensors whose axes tell the sizes of window, sinks and exact keys."""

HELD = ("ring_k", "ring_v", "ring_mask", "sink_k", "sink_v", "tokens", "kept_k", "kept_v", "kept_scale", "kept_mask")


class FusedStep:
    """One decoding step; updates the state in place, without a gradient."""

    name, uses_op, supports = "triton step", False, NEAR | SCALED

    def why_not(self, mixer: FeatureMapMixer, kind: Kind) -> str:
        """Return why it declines such calls; empty if it can compute them."""
        if why := elsewhere(kind):
            return why
        if not kind.one_step or not kind.rows:
            return "the call is not a decoding step"
        if mixer.floor > 0.0:
            return NO_FLOOR
        if not kind.writes:
            return "it cannot write into this state"
        if mixer.shape.heads > MOST_GROUPS * mixer.shape.key_heads:
            return "its queries would need too many registers"
        return unusable(mixer, kind, USUAL)

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Return the output [B, H, 1, V] and the state, which is updated in place."""
        (q, k, v), state = (readable(x) for x in (call.q, call.k, call.v)), call.state
        assert state is not None
        maps = maps_of(mixer)
        weights = [weights_of(map, q.device) for map in (maps[-1], maps[0])]
        scales = [(None,) * 5 if x is None else x.tensors for x in (mixer.query_scale, mixer.key_scale)]
        mask, length = call.key_padding_mask, mixer.hybrid.trained_length
        mask = None if mask is None else mask.contiguous()
        batch, heads, _, size = q.shape
        key_heads, groups = k.shape[1], heads // k.shape[1]
        sizes = maps[0].first.shape[1], size, v.shape[3]
        out = v.new_empty(batch, heads, 1, v.shape[3])
        held = [state.get(name) for name in HELD]
        ring, sinks, slots = (0 if state.get(name) is None else state[name].shape[axis] for name, axis in COUNTED)
        places = {"SLOTS_": padded(slots)}
        arguments = (
            *(q, k, v, mask, None if length is None else call.places, out, *weights[0], *weights[1]),
            *(*scales[0], scales[1][0], *scales[1][2:], state["kv"], state["log_scale"], *held),
            *(x.stride(axis) for x in (q, k, v) for axis in (0, 1)),
            *(call.scaling, mixer.input_scale(call.scaling), mixer.eps, float(length or 1), FADING),
            *(heads, groups, groups if len(maps) == 1 else 1, *sizes, ring, sinks, slots),
        )
        kind, tiles = maps[0].kind, {**padded_sizes(sizes), **places, "SINKS_": padded(sinks), "G_": padded(groups, 1)}
        options = {"UNITS": UNITS, "KIND": kind, "HALVES": HALVES[kind], "TILE": 32, "num_warps": 4}
        launch("step_kernels.step", (batch * key_heads,), arguments, **tiles, **options)
        if ring:
            shared = state["ring_mask"], mask, state.get("tokens"), state.get("kept_mask"), ring, sinks, slots
            launch("step_kernels.advance", (batch,), shared, WIDTH_=padded(ring), **places, num_warps=1)
        return out, state
