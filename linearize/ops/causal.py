"""Causal linear attention, in chunks and one token at a time.

The chunked form is quadratic inside a chunk and keeps a running state between chunks, so it is linear in T. One loop
over the chunks computes all heads, in place. The backward pass is written by hand: it visits the chunks again instead
of keeping the forward pass's intermediate results.

A key's log-scale is split into a power of two and a factor between 1 and 2. Multiplying by a power of two is exact. So
a whole chunk can share one power, the largest up to its end, and later tokens still do not change a single bit of an
earlier output. If the running maximum climbs by more than `CLIMB` inside a chunk, each of its rows gets its own power.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.causal_parallel import CHUNK, parallel_attention
from linearize.ops.state import (
    EPS,
    FLOOR,
    LinearOptions,
    Options,
    State,
    group_queries,
    guarded,
    is_tracing,
    without_padding,
)

CLIMB = 40.0
"""How many powers of two a row's own maximum may lie below its chunk's: 2^-40 is well inside the range of fp32."""

LN2_HIGH, LN2_LOW = 0.693359375, math.log(2.0) - 0.693359375
"""The logarithm of 2 in two parts: the first has 9 bits, so its whole multiples are exact in fp32."""


def causal_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> tuple[Tensor, State]:
    """Attend from query i to keys up to i: o_i = (sum_j w_ij v_j + rest) / (sum_j w_ij + rest) over the keys j it sees.

    w_ij = exp(c_j - m_i) phi(q_i) . phi(k_j). m_i is the largest of their log-scales c_j and cancels; "rest" is the
    contribution of the initial state.

    Args:
        phi_q: [B, H, T, F].
        phi_k: [B, K, T, F], K divides H.
        v: [B, K, T, V].
        **options: the fields of `linearize.ops.state.Options`.

    Returns:
        Output [B, H, T, V] in `v`'s dtype and the `State` after the last token. Sums and states are fp32. On a
        GPU and in traced graphs all chunks are computed at once (`linearize.ops.causal_parallel`).
    """
    if v.device.type != "cpu" or is_tracing():
        return parallel_attention(phi_q, phi_k, v, **options)
    given = Options(**options)
    state, mask = given.start(phi_k, v), given.key_padding_mask
    padding = None if mask is None else ~mask[:, None, :, None].bool()
    scale = given.scale(phi_k)
    if scale is None:
        plan = Plan(cut(v.shape[2]), given.normalize, given.eps, padding)
        out, kv = _Causal.apply(phi_q, phi_k, v, None, state.kv, plan)
        return out, State(kv, state.log_scale)
    # Split the log-scales, attend, and reassemble the state.
    # A NaN log-scale would reach earlier rows through the power that its chunk shares.
    lost = scale.isnan()
    phi_k, scale = phi_k.masked_fill(lost[..., None], torch.nan), scale.masked_fill(lost, FLOOR)
    power, rest = powers(scale)
    start_power, start_rest = powers(state.log_scale)
    plan = make_plan(power.detach(), start_power.detach(), given.normalize, given.eps, padding)
    start = state.kv * torch.exp(start_rest)[..., None, None]
    out, kv = _Causal.apply(phi_q, phi_k, v, torch.exp(rest), start, plan)
    if not given.normalize:
        top = torch.maximum(scale.detach().cummax(dim=-1).values, state.log_scale[..., None])
        factor = torch.exp(-powers(top)[1]).repeat_interleave(phi_q.shape[1] // phi_k.shape[1], dim=1)
        out = out * factor[..., None].to(v.dtype)
    last = torch.maximum(scale.detach().amax(dim=-1), state.log_scale)
    return out, State(kv * torch.exp(-powers(last)[1])[..., None, None], last)


def powers(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Split log-scales: exp(scale) = 2^n exp(r) with a whole number n and 0 <= r < log 2, up to rounding."""
    n = torch.floor(scale.detach() / math.log(2.0))
    rest = (scale - n * LN2_HIGH) - n * LN2_LOW
    return n, torch.where(scale <= FLOOR / 2, 0.0, rest)


def cut(tokens: int) -> list[tuple[int, int]]:
    """Cut tokens into chunks."""
    return [(start, min(start + CHUNK, tokens)) for start in range(0, tokens, CHUNK)]


class Plan(NamedTuple):
    """The parts of a call that have no gradient. All powers are powers of two.

    Attributes:
        spans: the chunks.
        normalize: whether rows are divided by their sums.
        eps: smallest magnitude of a sum, relative to the row's own maximum.
        padding: [B, 1, T, 1] bool, true at padding, or None.
        power: [B, K, T] the keys' powers; this and all attributes below are None if nothing is scaled.
        top: [B, K, T] running maximum of the powers.
        unit: [B, K, T] the power relative to which a row is summed: its chunk's, or its own if the chunk is steep.
        key_rescale: [B, K, T] factor that brings a key to its chunk's power.
        before: [B, K, N] the state's power before chunk n.
        decay: [B, K, N] factor that brings the state to the power of chunk n.
        steep: whether each row of chunk n has its own power.
    """

    spans: list[tuple[int, int]]
    normalize: bool
    eps: float
    padding: Tensor | None = None
    power: Tensor | None = None
    top: Tensor | None = None
    unit: Tensor | None = None
    key_rescale: Tensor | None = None
    before: Tensor | None = None
    decay: Tensor | None = None
    steep: list[bool] | None = None

    def least(self, part: slice) -> Tensor | float:
        """Return the smallest magnitude of a row's sum, in the row's unit: a number or [B, K, 1, C]."""
        if self.top is None or self.unit is None:
            return self.eps
        return (torch.exp2(self.top[..., part] - self.unit[..., part]) * self.eps).clamp(min=EPS)[:, :, None]

    def own(self, part: slice) -> Tensor:
        """Return the factors that bring rows from their unit to their own maximum [B, K, 1, C, 1]."""
        assert self.top is not None and self.unit is not None
        # A row that has seen no key is zero and has no maximum.
        gap = (self.unit[..., part] - self.top[..., part]).clamp(max=CLIMB)
        return torch.exp2(gap)[:, :, None, :, None]


@torch.no_grad()
def make_plan(power: Tensor, start: Tensor, normalize: bool, eps: float, padding: Tensor | None) -> Plan:
    """Plan a call from the powers of the keys, `power` [B, K, T], and of the initial state, `start` [B, K]."""
    spans = cut(power.shape[-1])
    top = torch.maximum(power.cummax(dim=-1).values, start[..., None])
    lengths = torch.tensor([stop - first for first, stop in spans], device=top.device)
    ends = top[..., lengths.cumsum(0) - 1]
    before = torch.cat([start[..., None], ends[..., :-1]], dim=-1)
    chunk = ends.repeat_interleave(lengths, dim=-1)
    # A row that has seen no key has no maximum to lose.
    far = ((chunk - top > CLIMB) & (top > FLOOR / 2)).flatten(0, 1).any(dim=0)
    steep = F.pad(far, (0, len(spans) * CHUNK - len(far))).view(-1, CHUNK).any(dim=1)
    unit = torch.where(steep.repeat_interleave(lengths), top, chunk)
    key_rescale, decay = torch.exp2(power - chunk), torch.exp2(before - ends)
    return Plan(spans, normalize, eps, padding, power, top, unit, key_rescale, before, decay, steep.tolist())


class _Chunk(NamedTuple):
    """One chunk, as batches of matrices: N = B K, rows are (query head, token).

    Attributes:
        part: its tokens.
        q: query features [N, G C, F].
        k: key features [N, C, F].
        v_intra: values as the chunk's own rows see them [N, C, V (+ 1)]; the last column is the denominator's.
        v_state: values as they are added to the state.
        powers: [N, G C, C], factors of a steep chunk's products, or None.
        decay: [N, 1, 1] factor that brings the state to this chunk's power, or None.
        row_rescale: [N, G C, 1] factors of the state's contribution to a steep chunk's rows, or None.
        key_rescale: [N, C, 1] v_state / v_intra, or None if they are the same.
        factor: [N, C, 1] v_intra / the plain values, or None.
    """

    part: slice
    q: Tensor
    k: Tensor
    v_intra: Tensor
    v_state: Tensor
    powers: Tensor | None
    decay: Tensor | None
    row_rescale: Tensor | None
    key_rescale: Tensor | None
    factor: Tensor | None


class _Chunks:
    """One call's tensors, chunk by chunk."""

    def __init__(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, weight: Tensor | None, plan: Plan) -> None:
        self.q, self.k, self.v, self.plan = group_queries(phi_q, phi_k.shape[1]), phi_k, v, plan
        self.weight = None if weight is None else weight.expand(phi_k.shape[:3])
        self.batch, self.heads, self.groups = self.q.shape[:3]
        self.width = v.shape[-1] + int(plan.normalize)
        self.n = self.batch * self.heads

    def walk(self, *, backwards: bool = False) -> Iterator[_Chunk]:
        """Iterate over the chunks."""
        numbers = range(len(self.plan.spans))
        for number in reversed(numbers) if backwards else numbers:
            yield self.chunk(number)

    def chunk(self, number: int) -> _Chunk:
        """Return chunk `number`."""
        plan, (start, stop) = self.plan, self.plan.spans[number]
        part, size = slice(start, stop), stop - start
        factor = self.column(self.weight, part)
        decay = key_rescale = row_rescale = None
        if plan.key_rescale is not None and plan.decay is not None and plan.steep is not None:
            decay, key_rescale = plan.decay[:, :, number].reshape(self.n, 1, 1), self.column(plan.key_rescale, part)
            if not plan.steep[number]:
                assert factor is not None and key_rescale is not None
                factor, key_rescale = factor * key_rescale, None
        values = torch.ones(self.batch, self.heads, size, self.width, device=self.v.device)
        values[..., : self.v.shape[-1]].copy_(self.v[:, :, part])
        values = self.real(values, part).view(self.n, size, self.width)
        values = values if factor is None else values.mul_(factor)
        products = None
        if key_rescale is not None:
            products, row_rescale = self.steep(number, part)
        return _Chunk(
            part,
            self.rows(self.q, part),
            self.real(self.k[:, :, part], part).reshape(self.n, size, -1).float(),
            values,
            values if key_rescale is None else values * key_rescale,
            products,
            decay,
            row_rescale,
            key_rescale,
            factor,
        )

    def real(self, x: Tensor, part: slice) -> Tensor:
        """Return a chunk of keys or values [B, K, C, X] with zeros for padding."""
        return x if self.plan.padding is None else x.masked_fill(self.plan.padding[:, :, part], 0.0)

    def steep(self, number: int, part: slice) -> tuple[Tensor, Tensor]:
        """Return powers and row_rescale of a steep chunk: every row relative to its own maximum."""
        plan = self.plan
        assert plan.power is not None and plan.unit is not None and plan.before is not None
        unit = plan.unit[..., part]
        below = (plan.power[..., None, part] - unit[..., None]).clamp(max=0.0)
        products = torch.exp2(below)
        row_rescale = torch.exp2(plan.before[:, :, number, None] - unit)
        repeat = (1, self.groups, 1)
        return products.flatten(0, 1).repeat(repeat), row_rescale.flatten(0, 1)[..., None].repeat(repeat)

    def rows(self, x: Tensor, part: slice) -> Tensor:
        """Cut a chunk out of x [B, K, G, T, X] -> [N, G C, X] fp32."""
        return x[:, :, :, part].reshape(self.n, -1, x.shape[-1]).float()

    def column(self, x: Tensor | None, part: slice) -> Tensor | None:
        """Cut a chunk out of x [B, K, T] -> [N, C, 1]."""
        return None if x is None else x[..., part].reshape(self.n, -1, 1)

    def lower(self, scores: Tensor, chunk: _Chunk) -> Tensor:
        """Set products with later keys [N, G C, C] to zero in place: multiplying by zero would keep NaN."""
        if chunk.powers is not None:
            scores.mul_(chunk.powers)
        scores.view(self.n, self.groups, -1, scores.shape[-1]).tril_()
        return scores

    def divide(self, mixed: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return a chunk's outputs [B, K, G, C, V] and guarded row sums [B, K, G, C, 1] from sums [N, G C, V + 1]."""
        mixed = mixed.view(self.batch, self.heads, self.groups, -1, self.width)
        if not self.plan.normalize:
            return mixed if self.plan.top is None else mixed * self.plan.own(part), None
        total = guarded(mixed[..., -1], self.plan.least(part))[..., None]
        return mixed[..., :-1] / total, total


class _Causal(torch.autograd.Function):
    """Forward and backward pass over the chunks; only inputs, output and row sums are kept between them."""

    @staticmethod
    def forward(
        ctx: Any, phi_q: Tensor, phi_k: Tensor, v: Tensor, weight: Tensor | None, start: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        chunks = _Chunks(phi_q, phi_k, v, weight, plan)
        shape = chunks.q.shape[:4]
        out = v.new_empty(*shape, v.shape[-1])
        keep = plan.normalize and any(ctx.needs_input_grad)
        sums = v.new_empty(*shape, 1, dtype=torch.float32) if keep else None
        kv = start.reshape(chunks.n, *start.shape[2:]).clone()
        for chunk in chunks.walk():
            scores = chunks.lower(torch.bmm(chunk.q, chunk.k.transpose(1, 2)), chunk)
            mixed = _read(chunk.q, kv, chunk).baddbmm_(scores, chunk.v_intra)
            kv.baddbmm_(chunk.k.transpose(1, 2), chunk.v_state)
            out[:, :, :, chunk.part], total = chunks.divide(mixed, chunk.part)
            if sums is not None and total is not None:
                sums[:, :, :, chunk.part] = total
        ctx.save_for_backward(phi_q, phi_k, v, weight, start, out if keep else None, sums)
        ctx.plan = plan
        return out.flatten(1, 2), kv.view_as(start)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_kv: Tensor) -> tuple[Tensor | None, ...]:
        phi_q, phi_k, v, weight, start, out, sums = ctx.saved_tensors
        chunks = _Chunks(phi_q, phi_k, v, weight, ctx.plan)
        # Sums are fp32 by design; autocast would lower their precision in the backward pass.
        with torch.autocast(device_type=v.device.type, enabled=False):
            rows = _row_gradients(chunks, grad_out, out, sums)
            grad_q = _query_gradients(chunks, rows, start)
            grad_k, grad_v, grad_weight, grad_start = _key_gradients(chunks, rows, grad_kv)
        return (
            grad_q.reshape(phi_q.shape).to(phi_q.dtype),
            grad_k.to(phi_k.dtype),
            grad_v.to(v.dtype),
            None if weight is None or grad_weight is None else grad_weight.sum_to_size(weight.shape),
            grad_start.view_as(start),
            None,
        )


def _read(rows: Tensor, kv: Tensor, chunk: _Chunk) -> Tensor:
    """Multiply rows [N, G C, X] by the state before the chunk [N, X, Y], and bring the state to the chunk's power."""
    if chunk.row_rescale is not None and chunk.decay is not None:
        mixed = torch.bmm(rows, kv).mul_(chunk.row_rescale)
        kv.mul_(chunk.decay)
        return mixed
    if chunk.decay is not None:
        kv.mul_(chunk.decay)
    return torch.bmm(rows, kv)


def _row_gradients(chunks: _Chunks, grad_out: Tensor, out: Tensor | None, sums: Tensor | None) -> Tensor:
    """Return the gradient of the rows before division [B, K, G, T, V (+ 1)], each in its unit."""
    grad, plan = grad_out.reshape(*chunks.q.shape[:4], -1).float(), chunks.plan
    if sums is None or out is None:
        return grad if plan.top is None else grad * plan.own(slice(None))
    rows = grad.new_empty(*grad.shape[:-1], chunks.width)
    torch.div(grad, sums, out=rows[..., :-1])
    # A sum that was clamped to its least magnitude is a constant.
    held = sums[..., 0].abs() <= plan.least(slice(None))
    rows[..., -1] = -(rows[..., :-1] * out.float()).sum(dim=-1).masked_fill(held, 0.0)
    return rows


def _query_gradients(chunks: _Chunks, rows: Tensor, start: Tensor) -> Tensor:
    """Return the gradient of the query features [B, K, G, T, F]; the chunks are visited forward, with the state."""
    grad = rows.new_empty(*rows.shape[:4], start.shape[-2])
    kv = start.reshape(chunks.n, *start.shape[2:]).transpose(1, 2).contiguous()
    for chunk in chunks.walk():
        row = chunks.rows(rows, chunk.part)
        scores = chunks.lower(torch.bmm(row, chunk.v_intra.transpose(1, 2)), chunk)
        part = _read(row, kv, chunk).baddbmm_(scores, chunk.k)
        kv.baddbmm_(chunk.v_state.transpose(1, 2), chunk.k)
        grad[:, :, :, chunk.part] = part.view(*grad.shape[:3], -1, grad.shape[-1])
    return grad


def _key_gradients(chunks: _Chunks, rows: Tensor, grad_kv: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of keys, values, weights and initial state; the chunks are visited backward."""
    grad_k, grad_v = rows.new_empty(chunks.k.shape), rows.new_empty(chunks.v.shape)
    weights = None if chunks.weight is None else rows.new_empty(chunks.weight.shape)
    state = grad_kv.reshape(chunks.n, *grad_kv.shape[2:]).float().clone()
    shape, size = chunks.k.shape[:2], chunks.v.shape[-1]
    for chunk in chunks.walk(backwards=True):
        row = chunks.rows(rows, chunk.part)
        scores = chunks.lower(torch.bmm(row, chunk.v_intra.transpose(1, 2)), chunk)
        part = torch.bmm(chunk.v_state, state.transpose(1, 2)).baddbmm_(scores.transpose(1, 2), chunk.q)
        grad_k[:, :, chunk.part] = part.view(*shape, -1, part.shape[-1])
        scores = chunks.lower(torch.bmm(chunk.q, chunk.k.transpose(1, 2)), chunk)
        part = torch.bmm(chunk.k, state)
        part = (part if chunk.key_rescale is None else part.mul_(chunk.key_rescale)).baddbmm_(
            scores.transpose(1, 2), row
        )
        if weights is not None:
            # Use the values before weighting, because a weight may be zero.
            plain = chunks.real(chunks.v[:, :, chunk.part], chunk.part).reshape(chunks.n, -1, size).float()
            total = (part[..., :size] * plain).sum(dim=-1)
            total = (total + part[..., -1] if chunks.plan.normalize else total).view(*shape, -1)
            if chunks.plan.key_rescale is not None and chunk.key_rescale is None:
                # The gradient of a steep chunk already contains key_rescale.
                total = total * chunks.plan.key_rescale[..., chunk.part]
            weights[:, :, chunk.part] = total
        part = part if chunk.factor is None else part.mul_(chunk.factor)
        grad_v[:, :, chunk.part] = part[..., :size].view(*shape, -1, size)
        if chunk.row_rescale is not None and chunk.decay is not None:
            state.mul_(chunk.decay).baddbmm_(chunk.q.transpose(1, 2), row * chunk.row_rescale)
        else:
            state.baddbmm_(chunk.q.transpose(1, 2), row)
            state = state if chunk.decay is None else state.mul_(chunk.decay)
    return grad_k, grad_v, weights, state


def recurrent_attention(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]:
    """Attend from query i to keys up to i, step by step; arguments and results as in `causal_attention`.

    Shapes: `phi_q` [B, H, T, F], `phi_k` [B, K, T, F], `v` [B, K, T, V] -> [B, H, T, V]; T is 1 when decoding.
    """
    given = Options(**options)
    batch, heads, tokens, features = phi_q.shape
    queries, keys, values, scale = phi_q.float(), given.keys(phi_k), given.values(v), given.scale(phi_k)
    state = given.start(phi_k, v)
    outputs = []
    for i in range(tokens):
        kv, value = state.kv, values[:, :, i]
        last = state.log_scale
        if scale is not None:
            last = torch.maximum(last, scale[:, :, i].detach())
            kv = kv * torch.exp(state.log_scale - last)[..., None, None]
            value = value * torch.exp(scale[:, :, i] - last)[..., None]
        kv = kv + keys[:, :, i, :, None] * value[:, :, None, :]
        state = State(kv, last)
        mixed = queries[:, :, i].reshape(batch, phi_k.shape[1], -1, features) @ kv
        outputs.append(mixed.reshape(batch, heads, 1, -1))
    return given.divided(torch.cat(outputs, dim=2)).to(v.dtype), state


def advance(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, state: State, **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]:
    """Run `recurrent_attention` for one token and update `state` in place: for decoding, without a gradient.

    Shapes: `phi_q` [B, H, 1, F], `phi_k` [B, K, 1, F], `v` [B, K, 1, V] -> [B, H, 1, V].
    """
    given = Options(**options)
    batch, key_heads, _, features = phi_k.shape
    count, mask = batch * key_heads, given.key_padding_mask
    kv = state.kv if state.kv.is_contiguous() else state.kv.contiguous()
    flat = kv.view(count, features, -1)
    values = v.reshape(count, 1, -1).float()
    if given.normalize:
        values = F.pad(values, (0, 1), value=1.0)
    shift = state.log_scale
    scale = given.scale(phi_k)
    if scale is not None:
        shift = torch.maximum(shift, scale[..., 0])
        # The largest log-scale is usually an earlier one; then the state need not be rescaled.
        if phi_k.device.type != "cpu" or not torch.equal(shift, state.log_scale):
            flat.mul_(torch.exp(state.log_scale - shift).view(count, 1, 1))
        values = values * torch.exp(scale - shift[..., None]).view(count, 1, 1)
    if mask is not None:
        padding = ~mask.bool().repeat_interleave(key_heads, dim=0)[..., None]
        values, phi_k = values.masked_fill(padding, 0.0), without_padding(phi_k, mask)
    flat.baddbmm_(phi_k.reshape(count, features, 1), values)
    mixed = torch.bmm(phi_q.reshape(count, -1, features), flat)
    if given.normalize:
        mixed = mixed[..., :-1] / guarded(mixed[..., -1:], given.eps)
    return mixed.reshape(batch, -1, 1, mixed.shape[-1]), State(kv, shift)
