"""Linear attention whose denominators cannot cross zero: for feature maps whose products can be negative.

A row's weights are divided by max(|sum_j w_ij|, c a_i), with the sum's sign. a_i = |phi(q_i)| . sum_j |phi(k_j)| is
what the sum would be if no feature were negative. |w_ij| is at most |phi(q_i)| . |phi(k_j)|, so the magnitudes of a row
never add up to more than 1 / c. A row to which the floor applies adds up to less than one; it applies to no row if no
feature is negative. Like the guard of the plain ops, the floor is a constant for the gradient.

The op can stream: its state [B, K, F, V + 2] has one more column, for sum_j |phi(k_j)|. `kernel_weights` are the full
weights, with or without a floor.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from linearize.ops.state import EPS, FLOOR, LinearOp, LinearOptions, Options, State, divide, held, keys_up_to, with_ones


def floored_attention(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, floor: float, *, op: LinearOp, **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]:
    """Attend with the floor described above; results as in `linearize.ops.causal_attention`.

    Args:
        phi_q: [B, H, T, F].
        phi_k: [B, K, T, F], K divides H.
        v: [B, K, T, V].
        floor: c, between 0 and 1.
        op: sums up the weighted values, bidirectionally or causally.
        **options: the fields of `linearize.ops.state.Options`; an `initial_state` must come from this op.
    """
    state, scale = options.get("initial_state"), options.get("log_scale")
    before: tuple[State | None, State | None] = (None, None)
    if state is not None:
        before = State(state.kv[..., :-1], state.log_scale), State(state.kv[..., -1:].detach(), state.log_scale)
    signed: LinearOptions = {**options, "initial_state": before[0], "normalize": False}
    mixed, after = op(phi_q, phi_k, with_ones(v, True), **signed)
    # The same log-scales, so that both sums of a row have the same unit.
    sizes: LinearOptions = {**signed, "initial_state": before[1]}
    sizes["log_scale"] = None if scale is None else scale.detach()
    ones = v.new_ones(*v.shape[:3], 1, dtype=torch.float32)
    most, absolute = op(phi_q.detach().float().abs(), phi_k.detach().float().abs(), ones, **sizes)
    out = mixed[..., :-1] / held(mixed[..., -1:], (floor * most).clamp(min=options.get("eps", EPS)))
    return out.to(v.dtype), State(torch.cat([after.kv, absolute.kv], dim=-1), after.log_scale)


def kernel_weights(
    phi_q: Tensor,
    phi_k: Tensor,
    *,
    causal: bool = False,
    floor: float = 0.0,
    rows: Tensor | None = None,
    **options: Unpack[LinearOptions],
) -> Tensor:
    """Return the attention weights of a feature map; quadratic in T, as a reference and for reports.

    Args:
        phi_q: query features [B, H, R, F].
        phi_k: key features [B, K, S, F].
        causal: whether query i sees only keys up to its own position.
        floor: c; 0 for no floor.
        rows: the places [R] of the queries among the keys; None if they are all S tokens in order.
        **options: the fields of `linearize.ops.state.Options`, except an initial state, which has no weights.

    Returns:
        Weights [B, H, R, S] in fp32, zero at padded and later keys.
    """
    groups, given = phi_q.shape[1] // phi_k.shape[1], Options(**options)
    keys = given.keys(phi_k).repeat_interleave(groups, dim=1)
    scores = phi_q.float() @ keys.transpose(-1, -2)
    visible = keys_up_to(phi_k, rows) if causal else scores.new_ones(scores.shape[-2:], dtype=torch.bool)
    if given.key_padding_mask is not None:
        visible = visible & given.key_padding_mask[:, None, None, :].bool()
    scale = given.scale(phi_k)
    if scale is not None:
        scale = scale.repeat_interleave(groups, dim=1)[:, :, None, :]
        seen = scale.masked_fill(~visible, FLOOR)
        shift = seen.detach().amax(dim=-1, keepdim=True)
        scores = scores * torch.exp(seen - shift)
    scores = scores.masked_fill(~visible, 0.0)
    if not given.normalize:
        return scores
    if floor:
        signless: LinearOptions = {**options, "normalize": False}
        with torch.no_grad():
            sizes = kernel_weights(phi_q.abs(), phi_k.abs(), causal=causal, rows=rows, **signless)
        least = (floor * sizes.sum(dim=-1, keepdim=True)).clamp(min=given.eps)
        return scores / held(scores.sum(dim=-1, keepdim=True), least)
    return divide(torch.cat([scores, scores.sum(dim=-1, keepdim=True)], dim=-1), given.eps)
