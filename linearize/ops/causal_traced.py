"""The causal chunks as plain tensor operations, for tracing compilers: nothing in place, no branches on values.

Batch and key heads are one dimension here, N = B K. The query heads of a group are concatenated, G C rows per chunk, so
that no operation on a chunk needs a size that may be unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.state import FLOOR, LinearOptions, Options, State, group_queries

CHUNK = 64
"""Tokens per chunk: larger chunks cost more inside each chunk, but less for the products with the state."""


def traced_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> tuple[Tensor, State]:
    """Attend as `causal_attention` does; every row has its own stabiliser.

    If the number of tokens is not known, as when torch.export is given a dynamic length, the chunks are the steps of a
    `scan` instead of an unrolled loop.
    """
    given, shape = Options(**options), phi_k.shape[:2]
    state, scale = given.start(phi_k, v), given.scale(phi_k)
    queries = group_queries(phi_q, phi_k.shape[1]).float().flatten(0, 1)
    keys, values = given.keys(phi_k).flatten(0, 1), given.values(v).flatten(0, 1)
    tokens = [queries, keys, values] if scale is None else [queries, keys, values, scale.flatten(0, 1)]
    walk = _scan if isinstance(v.shape[2], torch.SymInt) else _loop
    mixed, (kv, last) = walk(tokens, State(state.kv.flatten(0, 1), state.log_scale.flatten(0, 1)))
    after = State(kv.unflatten(0, shape), last.unflatten(0, shape))
    return given.divided(mixed).unflatten(0, shape).flatten(1, 2).to(v.dtype), after


def _loop(tokens: list[Tensor], state: State) -> tuple[Tensor, State]:
    """Attend chunk by chunk: q [N, G, T, F], k [N, T, F], values [N, T, W], optional scale [N, T] -> [N, G, T, W]."""
    q, *rest = tokens
    outputs = []
    for start in range(0, q.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        mixed, state = _chunk([q[:, :, part].flatten(1, 2), *(x[:, part] for x in rest)], state)
        outputs.append(mixed.unflatten(1, (q.shape[1], -1)))
    return torch.cat(outputs, dim=2), state


def _scan(tokens: list[Tensor], state: State) -> tuple[Tensor, State]:
    """Attend as `_loop` does, for any number of tokens."""
    # Imported here, because it loads parts of PyTorch that nothing else needs.
    from torch._higher_order_ops.scan import scan

    groups, length = tokens[0].shape[1:3]
    # One chunk more than needed, so that there are at least two: with only one, the length would become a constant.
    count = (length + CHUNK - 1) // CHUNK + 1
    rest = count * CHUNK - length

    def cut(x: Tensor) -> Tensor:
        """Cut x [..., T, X] into chunks [n, ..., C, X], with zeros at the end."""
        return F.pad(x, (0, 0, 0, rest)).unflatten(-2, (count, CHUNK)).movedim(-3, 0)

    pieces = [cut(tokens[0]).flatten(2, 3), cut(tokens[1]), cut(tokens[2])]
    if len(tokens) > 3:
        pieces.append(F.pad(tokens[3], (0, rest), value=FLOOR).unflatten(-1, (count, CHUNK)).movedim(-2, 0))

    def step(before: Sequence[Tensor], piece: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        mixed, after = _chunk(piece, State(*before))
        # A carried output must not be one of the inputs.
        return [after.kv, after.log_scale.clone()], mixed

    (kv, log_scale), mixed = scan(step, [state.kv, state.log_scale], pieces)
    mixed = mixed.unflatten(2, (groups, CHUNK)).movedim(0, 2).flatten(2, 3)
    return mixed[:, :, :length], State(kv, log_scale)


def _chunk(tokens: Sequence[Tensor], state: State) -> tuple[Tensor, State]:
    """Advance by one chunk: q [N, G C, F], k [N, C, F], values [N, C, W], optional scale [N, C] -> [N, G C, W]."""
    q, k, values, *scaled = tokens
    groups = q.shape[1] // k.shape[1]
    later = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
    hidden = later.repeat(groups, 1) if groups > 1 else later
    scores = torch.bmm(q, k.transpose(1, 2)).masked_fill(hidden, 0.0)
    if not scaled:
        mixed = torch.bmm(scores, values) + torch.bmm(q, state.kv)
        return mixed, State(state.kv + torch.bmm(k.transpose(1, 2), values), state.log_scale)
    scale, past = scaled[0], state.log_scale[:, None]
    # Above the diagonal the exponent may be large, and 0 times infinity is NaN: mask before exp, not after.
    seen = scale[:, None, :].masked_fill(later, FLOOR)
    shift = torch.maximum(seen.detach().amax(dim=-1), past)
    decay = torch.exp((scale[:, None, :] - shift[..., None]).masked_fill(later, FLOOR))
    before = torch.exp(past - shift)
    if groups > 1:
        decay, before = torch.cat([decay] * groups, dim=1), torch.cat([before] * groups, dim=1)
    mixed = torch.bmm(scores * decay, values) + torch.bmm(q * before[..., None], state.kv)
    last = shift[:, -1]
    weighted = values * torch.exp(scale - last[:, None])[..., None]
    kv = state.kv * torch.exp(state.log_scale - last)[:, None, None] + torch.bmm(k.transpose(1, 2), weighted)
    return mixed, State(kv, last)
