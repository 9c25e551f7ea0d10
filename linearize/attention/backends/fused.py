"""The backend in Triton, for whole calls on a GPU: map and attention in one pass over the tokens.

The features never exist in memory: every kernel maps the tokens that it reads. Tokens are cut into segments that run in
parallel. Each segment's keys are summed up first; bidirectional queries read the sum of all segments, and causal ones
start from the sum of the segments before theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linearize.attention.backends.eager import NO_FLOOR
from linearize.attention.backends.native import maps_of
from linearize.attention.backends.triton_calls import (
    EXACT,
    HALVES,
    USUAL,
    WEIGHTS,
    launch,
    not_whole,
    padded_sizes,
    precision_of,
    readable,
    strides,
    unusable,
)
from linearize.attention.call import AttentionCall, Kind, MixerState
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.native.gradient import first_order
from linearize.attention.parts import SCALED
from linearize.kernels.base import MapSpec
from linearize.ops.state import FLOOR, Context

UNIT, LEAST = 64, 128
"""Segments are multiples of UNIT tokens, LEAST or more."""

PROGRAMS = {False: 264, True: 528}
"""About how many programs there are, by whether a call is causal: two or four per multiprocessor."""


class Tuning(NamedTuple):
    """Tokens of a block, which divide UNIT; threads over 32; and how many blocks Triton pipelines."""

    block: int
    warps: int
    stages: int = 1


TUNING = {
    "sums": Tuning(64, 4, 3),
    "read": Tuning(64, 4, 3),
    "scan": Tuning(64, 4, 2),
    "gradients": Tuning(64, 4, 2),
    "causal_gradients": Tuning(16, 4, 2),
    "slopes": Tuning(64, 4),
}
"""By kernel, or by the way in which it is used; the fastest for bf16 on an H100 (docs/benchmarks/gpu.md)."""

TIGHT = {
    **dict.fromkeys(("sums", "read"), Tuning(32, 8)),
    **dict.fromkeys(("scan", "gradients", "causal_gradients"), Tuning(16, 8)),
    "slopes": Tuning(64, 4),
}
"""The same for exact products and for sizes above `USUAL`: an H100's shared memory has 227 KB per block."""

FEW = 32
"""Up to this size, four warps are enough."""


class Fused:
    """Whole calls in one pass on a GPU, map included."""

    name, uses_op, supports = "triton", False, SCALED

    def why_not(self, mixer: FeatureMapMixer, kind: Kind) -> str:
        """Return why it declines such calls; empty if it can compute them."""
        if why := not_whole(kind):
            return why
        if mixer.floor > 0.0:
            return NO_FLOOR
        if kind.needs_state and kind.gradient:
            return "its gradient does not pass through states"
        if mixer.shape.causal and mixer.key_scale is not None:
            return "it does not support learned log-scales of causal keys"
        if mixer.shape.causal and precision_of(kind.types[2]) == EXACT:
            return "exact fp32 products of causal calls are faster in PyTorch"
        return unusable(mixer, kind)

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Return the output [B, H, T, V] and the state after, from the Triton kernels."""
        maps, mask = maps_of(mixer), call.key_padding_mask
        mask = None if mask is None else mask.bool().contiguous()
        # The factors [B, K, T] of the keys, and the logarithm [B, K] of what they are divided by; None if all are 1.
        factor, shift, log_scale = None, None, mixer.log_scales(call)[1]
        if log_scale is not None:
            log_scale = log_scale if mask is None else log_scale.masked_fill(~mask[:, None], FLOOR)
            shift = log_scale.detach().amax(dim=-1)
            factor = torch.exp(log_scale - shift[..., None])
        weights = [getattr(map, name) for map in maps for name in WEIGHTS]
        out, kv = _Attend.apply(Launcher(mixer, call, maps[0]), mask, call.q, call.k, call.v, factor, *weights)
        if not call.needs_state:
            return out, None
        return out, {"kv": kv, "log_scale": kv.new_zeros(kv.shape[:2]) if shift is None else shift}


class Side(NamedTuple):
    """Queries or keys, as the kernels read them; see fused_kernels.py.

    Attributes:
        x: tokens [B, H, T, D], or [B, K, T, D] for keys.
        y: rows [B, H, T, V] that are added up, likewise.
        a: factors [B, H, T] of the rows, or None.
        b: numbers [B, H, T] that are added up, or None for ones.
        weights: the tensors `WEIGHTS` of the map, in fp32.
        map_group: number of heads that share a map.
        keys: whether padding is left out.
    """

    x: Tensor
    y: Tensor
    a: Tensor | None
    b: Tensor | None
    weights: list[Tensor | None]
    map_group: int
    keys: bool


class Launcher:
    """Runs the kernels of one call, forwards and backwards; holds no tensors.

    Attributes:
        kind: kind of the maps.
        causal: whether queries see only keys up to their own.
        scale: factor of queries and keys before the map.
        eps: smallest magnitude of a denominator.
        needs_state: whether the state after the tokens is returned.
        gradient: whether there may be a backward pass.
        segment: tokens of a segment.
        segments: number of segments.
    """

    def __init__(self, mixer: FeatureMapMixer, call: AttentionCall, map: MapSpec) -> None:
        self.kind, self.causal, self.eps = map.kind, mixer.shape.causal, mixer.eps
        self.scale = mixer.input_scale(call.scaling)
        self.needs_state, self.gradient, self.device = call.needs_state, torch.is_grad_enabled(), call.q.device
        self.batch, self.heads, self.tokens, size = call.q.shape
        self.key_heads = call.v.shape[1]
        self.groups = self.heads // self.key_heads
        self.halves = HALVES[map.kind]
        self.numbers = map.first.shape[1], size, call.v.shape[-1]
        most = max(1, PROGRAMS[self.causal] // (self.batch * self.key_heads))
        self.segment = max(LEAST, -(-self.tokens // (most * UNIT)) * UNIT)
        self.segments = -(-self.tokens // self.segment)
        self.padded = padded_sizes(self.numbers)
        self.precision = precision_of(call.v.dtype)
        self.tuning = TIGHT if max(self.numbers) > USUAL or self.precision == EXACT else TUNING

    def launch(self, name: str, tuning: str, heads: int, arguments: Sequence[object], **options: bool | int) -> None:
        """Run a kernel for every segment of all heads."""
        tuned = self.tuning[tuning]
        warps = tuned.warps if max(self.padded.values()) > FEW else 4
        shared = {**self.padded, "KIND": self.kind, "HALVES": self.halves, "PRECISION": self.precision}
        blocks = {"BLOCK": tuned.block, "num_warps": warps, "num_stages": tuned.stages}
        launch(f"fused_kernels.{name}", (self.batch * heads, self.segments), arguments, **options, **shared, **blocks)

    def blocks(self, tuning: str) -> int:
        """Return the number of blocks of a segment."""
        return self.segment // self.tuning[tuning].block

    def states(self, count: int, slots: int) -> Tensor:
        """Return memory for states [count, slots, F, V + 1]."""
        rows, _, width = self.numbers
        return torch.empty(count, slots, self.halves * rows, width + 1, device=self.device)

    def sums(self, side: Side, mask: Tensor | None, order: int) -> Tensor:
        """Sum up a side for every head [B * heads, slots, F, V + 1].

        Args:
            side: the side.
            mask: [B, T] bool, or None.
            order: 0: one slot with the sum of all tokens. 1: a slot with the sums before each segment, and one with
                the sum of all. -1: the same in the opposite order, from the last segment to the first.
        """
        heads = side.x.shape[1]
        slots = self.segments + abs(order)
        states = self.states(self.batch * heads, slots)
        arguments = (
            *(side.x, side.y, side.a, side.b, mask, *side.weights, states),
            *strides(side.x, side.y),
            *(self.scale, self.tokens, self.blocks("sums"), slots, heads, side.map_group, *self.numbers),
        )
        self.launch("sums", "sums", heads, arguments, KEYS=side.keys, SCALED=side.a is not None, SLOTS=order)
        if order == 0:
            return states if slots == 1 else states.sum(dim=1, keepdim=True)
        states[:, 0] = 0.0
        return states.cumsum_(dim=1)

    def attend(
        self, queries: Side, keys: Side, mask: Tensor | None, states: Tensor, *, save: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, T, V] and, with `save`, the inverse denominators [B, H, T], given the keys' sums."""
        out, inverse = self.tokens_first(self.heads, self.numbers[2], keys.y.dtype), None
        if save:
            inverse = torch.empty(self.batch, self.heads, self.tokens, device=self.device)
        tuning = "scan" if self.causal else "read"
        arguments = (
            *(queries.x, keys.x, keys.y, keys.a, mask, *queries.weights, *keys.weights, states, out, inverse),
            *strides(queries.x, keys.x, keys.y, out),
            *(self.scale, self.eps, self.tokens, self.blocks(tuning), states.shape[1]),
            *(self.heads, self.groups, queries.map_group, *self.numbers),
        )
        self.launch("attend", tuning, self.heads, arguments, CAUSAL=self.causal, SCALED=keys.a is not None, SAVE=save)
        return out, inverse

    def slopes(self, out: Tensor, grad: Tensor, inverse: Tensor) -> Tensor:
        """Return the gradients [B, H, T] of the denominators."""
        found, tuned = torch.empty_like(inverse), self.tuning["slopes"]
        grid = self.batch * self.heads, -(-self.tokens // tuned.block)
        numbers = self.heads, self.tokens, self.eps, self.numbers[2]
        arguments = out, grad, inverse, found, *strides(out, grad), *numbers
        options = {"BLOCK": tuned.block, "V_": self.padded["V_"], "num_warps": tuned.warps}
        launch("fused_kernels.slopes", grid, arguments, **options)
        return found

    def gradients(
        self, side: Side, other: Side, mask: Tensor | None, states: Tensor, *, learned: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of a side, given the sums of the other: in causal calls those before or after segments.

        Args:
            side: the side.
            other: the other side.
            mask: [B, T] bool, or None.
            states: the sums of the other side, for each of its heads.
            learned: whether the gradients of the weights are needed.

        Returns:
            Those of the side's tokens, values and factors, and of the map's weights as the kernel stores them.
        """
        causal = self.causal
        # Causal keys are mapped once for each query head, because the kernel also reads the queries in order.
        heads = self.heads if causal else side.x.shape[1]
        group, other_group = heads // side.x.shape[1], heads // other.x.shape[1] if causal else 1
        # They are not rounded yet, because sums over the heads of a group follow.
        dtype = side.x.dtype if group == 1 else torch.float32
        dx, dy, da, dw = self.tokens_first(heads, side.x.shape[3], dtype), None, None, None
        rows, size, width = self.numbers
        if side.keys:
            dy = self.tokens_first(heads, width, side.y.dtype if group == 1 else torch.float32)
            da = None if side.a is None else torch.empty(self.batch, heads, self.tokens, device=self.device)
        if learned:
            all_rows = 2 * rows + 1 if self.kind == "positive_waves" else rows
            dw = torch.zeros(self.batch * heads, self.segments, all_rows, size + 1, device=self.device)
        tuning = "causal_gradients" if causal else "gradients"
        arguments = (
            *(side.x, side.y, side.a, side.b, other.x, other.y, other.a, other.b, mask),
            *(*side.weights, *other.weights, states, dx, dw, dy, da),
            *strides(side.x, side.y, other.x, other.y, dx, dx if dy is None else dy),
            *(self.scale, self.tokens, self.blocks(tuning), states.shape[1], heads, group, other_group),
            *(group * side.map_group, other_group * other.map_group, self.batch * heads // len(states), *self.numbers),
        )
        options = {"KEYS": side.keys, "KEYS2": other.keys, "SCALED": side.a is not None, "SCALED2": other.a is not None}
        self.launch("gradients", tuning, heads, arguments, CAUSAL=causal, REVERSED=causal and side.keys, **options)
        if dw is not None:
            dw = dw.unflatten(0, (self.batch, -1, group * side.map_group)).sum(dim=(0, 2, 3))
        if group == 1:
            return dx, dy, da, dw
        dy, da = (None if x is None else x.unflatten(1, (-1, group)).sum(dim=2) for x in (dy, da))
        return dx.unflatten(1, (-1, group)).sum(dim=2), dy, da, dw

    def tokens_first(self, heads: int, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory [B, heads, T, size] with the tokens first, because that is how the host reads it next."""
        return torch.empty(self.batch, self.tokens, heads, size, device=self.device, dtype=dtype).transpose(1, 2)


def _sides(
    q: Tensor, rows: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, *weights: Tensor | None
) -> tuple[Side, Side]:
    """Return queries with `rows` [B, H, T, V], which the forward pass does not use, and keys."""
    ready = [None if w is None else w.detach().float().contiguous() for w in weights]
    count, groups = len(WEIGHTS), q.shape[1] // k.shape[1]
    a = None if factor is None else factor.detach().contiguous()
    keys = Side(readable(k), readable(v), a, a, ready[:count], 1, keys=True)
    own = ready[count:]
    return Side(readable(q), readable(rows), None, None, own or keys.weights, 1 if own else groups, keys=False), keys


class _Attend(torch.autograd.Function):
    """Map and attend.

    The inputs are the launcher of the call, the mask, q, k, v, the keys' factors, and the maps of keys and queries (or
    the single map that they share); the results are the output, and the state's sums or None.
    """

    @staticmethod
    def forward(
        ctx: Context, launcher: Launcher, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *more: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, T, V], and the sums [B, K, F, V + 1] if the state is needed, else None."""
        queries, keys = _sides(q, q, k, v, *more)
        # `needs_input_grad` is also true while gradients are off, for leaves that could have one.
        save = launcher.gradient and any(ctx.needs_input_grad)
        if launcher.causal and launcher.segments == 1 and not launcher.needs_state:
            # There are no keys before the only segment.
            states = launcher.states(k.shape[0] * k.shape[1], 1).zero_()
        else:
            states = launcher.sums(keys, mask, int(launcher.causal))
        out, inverse = launcher.attend(queries, keys, mask, states, save=save)
        if save:
            ctx.launcher = launcher
            ctx.save_for_backward(mask, out, inverse, states, q, k, v, *more)
        kv = states[:, -1].unflatten(0, k.shape[:2]).clone() if launcher.needs_state else None
        return out, kv

    @staticmethod
    @first_order
    def backward(ctx: Context, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs, given that of the output."""
        mask, out, inverse, states, q, k, v, *more = ctx.saved_tensors
        launcher, weights = ctx.launcher, more[1:]
        queries, keys = _sides(q, grad, k, v, *more)
        learned = any(ctx.needs_input_grad[6:])
        queries = queries._replace(a=inverse, b=launcher.slopes(out, queries.y, inverse))
        dq, _, _, query_weights = launcher.gradients(queries, keys, mask, states, learned=learned)
        sums = launcher.sums(queries, mask, -1 if launcher.causal else 0)
        if not launcher.causal:
            sums = sums.unflatten(0, (-1, launcher.groups)).sum(dim=1)
        dk, dv, dfactor, key_weights = launcher.gradients(keys, queries, mask, sums, learned=learned)
        size, count, shared = q.shape[-1], len(WEIGHTS), len(weights) == len(WEIGHTS)
        if shared and key_weights is not None and query_weights is not None:
            key_weights = key_weights + query_weights
        of_weights = _weight_gradients(key_weights, weights[:count], size)
        if not shared:
            of_weights += _weight_gradients(query_weights, weights[count:], size)
        dv = None if dv is None else dv.to(v.dtype)
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv, dfactor, *of_weights


def _weight_gradients(packed: Tensor | None, weights: Sequence[Tensor | None], size: int) -> list[Tensor | None]:
    """Unpack the gradients of a map's `WEIGHTS` as `fused_kernels.gradients` stores them [heads, rows, D + 1]."""
    if packed is None or weights[0] is None:
        return [None] * len(WEIGHTS)
    rows = weights[0].shape[1]
    found = [packed[:, :rows, :size], packed[:, rows : 2 * rows, :size], packed[:, :rows, size], packed[:, -1, :size]]
    return [None if w is None else grad.to(w.dtype) for w, grad in zip(weights, found, strict=True)]
