"""The backend in Triton for calls with a softmax window on a GPU, without gradients: near, far and exact keys at once.

Causal calls without a window whose keys have learned log-scales are computed here too, as a window of no tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.attention.backends.eager import NO_FLOOR
from linearize.attention.backends.native import maps_of, padding_last
from linearize.attention.backends.triton_calls import (
    EXACT,
    HALVES,
    USUAL,
    launch,
    not_whole,
    padded,
    padded_sizes,
    precision_of,
    readable,
    strides,
    unusable,
    weights_of,
)
from linearize.attention.call import AttentionCall, Kind, MixerState
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.hybrid import FADING
from linearize.attention.parts import NEAR, SCALED
from linearize.core.registry import Values
from linearize.ops import State, Window
from linearize.ops.state import put_back, real_tokens
from linearize.ops.window_causal import state_after

TUNING = {"bf16": (64, 32, 4, 64, 4), "tf32": (64, 32, 8, 32, 4), EXACT: (32, 32, 8, 32, 8)}
"""Block sizes, by precision of products: queries per block, keys per tile and warps of `window_attend`, then keys per
tile and warps of `chunk_sums`."""

CHUNK, SEGMENTS = 128, 512
"""Tokens per segment, and the maximum number of segments; longer rows get longer segments."""


class FusedWindow:
    """Whole calls with a softmax window, map included."""

    name, uses_op, supports = "triton window", False, NEAR | SCALED

    def why_not(self, mixer: FeatureMapMixer, kind: Kind) -> str:
        """Return why it declines such calls; empty if it can compute them."""
        if mixer.window is None and (mixer.key_scale is None or not mixer.shape.causal):
            return "the layer has no softmax window"
        if why := not_whole(kind):
            return why
        if kind.gradient:
            return "it has no gradient"
        if mixer.floor > 0.0:
            return NO_FLOOR
        if mixer.hybrid.exact_keys and mixer.shape.causal and precision_of(kind.types[2]) == EXACT:
            return "Triton cannot compile exact fp32 products with exact keys of causal calls"
        return unusable(mixer, kind, USUAL)

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Return the output [B, H, T, V] and the state after, from the Triton kernels."""
        call, order = padding_last(call)
        form = mixer.form(call.scaling) or Window(0, call.scaling, mixer.shape.causal, mixer.eps)
        launcher = Launcher(mixer, call, form)
        out, kv, level = launcher.attend()
        out = out if order is None else put_back(out, order)
        if not call.needs_state or not form.causal:
            return out, None
        if mixer.window is None:
            return out, {"kv": kv, "log_scale": level}
        real, kept = real_tokens(call.k, call.key_padding_mask), None
        if launcher.lost is not None:
            count = real.sum(dim=1)[:, None, None]
            place = torch.arange(real.shape[1], device=real.device)
            kept = (place >= form.sinks) & (place < count - form.size) & (launcher.lost == len(place))
        return out, state_after(call.k, call.v, real, form, State(kv, level), kept, launcher.priority).present()


class Launcher:
    """Runs the kernels of one call, whose padding comes last.

    Attributes:
        priority: the log-scales [B, K, T] by which exact keys are chosen; None without exact keys.
        lost: the step at which each key is lost to the state [B, K, T]; None without exact keys.
    """

    def __init__(self, mixer: FeatureMapMixer, call: AttentionCall, form: Window) -> None:
        self.form, self.q, self.k, self.v = form, *(readable(x) for x in (call.q, call.k, call.v))
        maps, mask = maps_of(mixer), call.key_padding_mask
        self.mask = None if mask is None else mask.contiguous()
        ready = [weights_of(map, self.q.device) for map in maps]
        self.key_weights, self.query_weights, self.tied = ready[0], ready[-1], len(ready) == 1
        self.a = self.c = None
        query_scale, key_scale = mixer.query_scale, mixer.key_scale
        self.scaled, length = key_scale is not None, mixer.hybrid.trained_length
        # Linear log-scales are computed in the kernels; those of a network, and those that choose exact keys, here.
        if key_scale is not None and (key_scale.hidden is not None or form.exact_keys):
            self.c = key_scale(call.without_padding()[1]).contiguous()
        if query_scale is not None and query_scale.hidden is not None:
            self.a = query_scale(call.without_padding()[0]).contiguous()
        self.c_weight = None if key_scale is None or self.c is not None else key_scale.weight
        linear = None if self.a is not None else query_scale
        self.a_weights = (None, None) if linear is None else (linear.weight, linear.bias)
        self.trained = length if query_scale is not None else None
        self.scale = mixer.input_scale(call.scaling)
        self.heads, self.tokens = self.q.shape[1:3]
        self.key_heads = self.k.shape[1]
        self.rows = self.k.shape[0] * self.key_heads
        sizes = maps[0].first.shape[1], self.q.shape[3], self.v.shape[3]
        self.sizes, self.precision = sizes, precision_of(self.v.dtype)
        self.features = HALVES[maps[0].kind] * sizes[0]
        kind, self.chunk = maps[0].kind, padded(-(-self.tokens // SEGMENTS), CHUNK)
        self.options: Values = {**padded_sizes(sizes), "KIND": kind, "HALVES": HALVES[kind]}
        self.options |= {"PRECISION": self.precision, "CHUNK": self.chunk, "SCALED": self.scaled}
        self.width = form.size if form.causal else form.size // 2
        self.segments = -(-self.tokens // self.chunk)
        self.priority = None
        if form.exact_keys:
            self.priority = torch.zeros(self.k.shape[:3], device=self.k.device) if self.c is None else self.c
        self.lost, self.order, self.places = self.choose()

    def choose(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Choose the exact keys, if any; the results are those that `window_kernels.contest` describes."""
        if self.priority is None:
            return None, None, None
        form, shape, device = self.form, self.k.shape[:3], self.k.device
        lost = torch.full(shape, self.tokens, dtype=torch.int32, device=device)
        order = torch.full(shape, -1, dtype=torch.int32, device=device)
        places = order.new_empty(*shape[:2], self.segments + 1, form.sinks + form.exact_keys)
        width = form.size if form.causal else 0
        arguments = (
            *(self.priority, self.mask, lost, order, places),
            *(self.tokens, self.segments, self.key_heads, width, form.sinks, form.exact_keys),
        )
        tiles = {"CHUNK": self.chunk, "TILE": min(64, self.chunk)}
        tiles |= {"PLACES": padded(form.exact_keys), "SINKS_": padded(form.sinks)}
        launch("window_kernels.contest", (self.rows,), arguments, **tiles, num_warps=1)
        if not form.causal:
            # All keys competed at once, so only the winners at the end count.
            kept = lost == self.tokens
            place = torch.arange(self.tokens, dtype=torch.int32, device=device)
            lost, order = torch.where(kept, lost, 0), torch.where(kept, -1, place)
            places = places[:, :, -1:].contiguous()
        return lost, order, places

    def attend(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output [B, H, T, V], and the state of the tokens that left the window (meaningful if causal)."""
        form, sizes = self.form, self.sizes
        block, tile, warps, sums_tile, sums_warps = TUNING[self.precision]
        width, device = sizes[2] + 1, self.q.device
        sums = torch.empty(self.rows, self.segments, self.features, width, device=device)
        levels = torch.empty(self.rows, self.segments, device=device) if self.scaled else None
        arguments: tuple[object, ...] = (
            *(self.k, self.v, self.c, self.c_weight, self.mask, self.order, *self.key_weights, sums, levels),
            *(*strides(self.k, self.v), self.scale, self.tokens, self.segments, self.key_heads),
            *(self.width if form.causal else 0, form.sinks, *sizes),
        )
        options = {**self.options, "TILE": sums_tile, "num_warps": sums_warps}
        launch("window_kernels.chunk_sums", (self.rows, self.segments), arguments, **options)
        states, levels = self.outside(sums, levels)
        out = self.q.new_empty(self.q.shape[0], self.tokens, self.heads, width - 1, dtype=self.v.dtype).transpose(1, 2)
        groups = self.heads // self.key_heads
        sets, keep = (1, form.sinks) if self.places is None else self.places.shape[2:]
        scales = self.a, *self.a_weights, self.c, self.c_weight
        arguments = (
            *(self.q, self.k, self.v, *scales, self.lost, self.places, self.mask),
            *(*self.query_weights, *self.key_weights, states, levels, out),
            *(*strides(self.q, self.k, self.v, out), form.scaling, self.scale, form.eps),
            *(float(self.trained or 1), FADING, self.tokens),
            *(self.width, form.sinks, sets, keep, states.shape[1], self.heads, groups, groups if self.tied else 1),
            *sizes,
        )
        options = {"CAUSAL": form.causal, "FADES": self.trained is not None, **self.options}
        options |= {"BLOCK": block, "TILE": tile, "num_warps": warps, "num_stages": 1}
        grid = self.q.shape[0] * self.heads, -(-self.tokens // block)
        launch("window_kernels.window_attend", grid, arguments, **options)
        shape = self.k.shape[:2]
        level = states.new_zeros(shape) if levels is None else levels[:, -1].reshape(shape).clone()
        return out, states[:, -1].unflatten(0, shape).clone(), level

    def outside(self, sums: Tensor, levels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return, for each segment, the sums over the chunks outside its region, and their log-scales.

        In causal calls, one more entry has the sums over all chunks.
        """
        slots, size = self.segments + int(self.form.causal), self.features * (self.sizes[2] + 1)
        states = sums.new_empty(self.rows, slots, *sums.shape[2:])
        state_levels = None if levels is None else levels.new_empty(self.rows, slots)
        apart = 0 if self.form.causal else -(-self.width // self.chunk)
        # Unless causal, log-scales of the sums over the chunks before each segment, to which the later ones are added.
        before = None if levels is None else torch.empty_like(levels)
        grid, arguments = (self.rows, -(-size // 128)), (sums, levels, states, state_levels, before)
        options = {"CAUSAL": self.form.causal, "SCALED": self.scaled, "BLOCK": 128, "num_warps": 1}
        launch("window_kernels.outside", grid, (*arguments, self.segments, apart, size), **options)
        return states, state_levels
