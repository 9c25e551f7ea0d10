"""Linear attention whose denominators cannot cross zero: for feature maps whose products can be negative.

A row's weights are divided by max(|sum_j w_ij|, c a_i), with the sum's sign, where a_i = |phi(q_i)| . sum_j |phi(k_j)|
is what they would add up to were no feature negative. As |w_ij| is at most |phi(q_i)| . |phi(k_j)|, no row's magnitudes
add up to more than 1 / c; a row that the floor meets adds up to less than one, and where no feature is negative none
meets it. The floor is a constant to the gradient, as the guard of the plain ops is.

It streams: the state [B, K, F, V + 2] has sum_j |phi(k_j)| in a column more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.ops.bidirectional import bidirectional_attention
from linearize.ops.causal import causal_attention
from linearize.ops.recurrent import recurrent_attention
from linearize.ops.state import EPS, State, with_ones


def floored_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    *,
    floor: float,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    log_scale: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    eps: float = EPS,
) -> Tensor | tuple[Tensor, State]:
    """Attend with the floor described above; the other arguments and results as in `naive_attention`.

    Args:
        phi_q: [B, H, T, F].
        phi_k: [B, K, T, F], K divides H.
        v: [B, K, T, V].
        floor: c, between 0 and 1.
        causal: whether query i sees keys up to its own position only.
        key_padding_mask: [B, T], true or 1 where there is a token.
        log_scale: [B, K, T] or None, see `linearize.ops.state`.
        initial_state: what this op returned for the tokens before, or None.
        return_state: whether to return the state after the last token as well.
        eps: smallest magnitude of the sum, whatever the floor.
    """
    op: Any = bidirectional_attention
    if causal:
        op = recurrent_attention if phi_k.shape[2] == 1 else causal_attention
    before: tuple[State | None, State | None] = (None, None)
    if initial_state is not None:
        kv, shift = initial_state
        before = State(kv[..., :-1], shift), State(kv[..., -1:].detach(), shift)
    common = {"key_padding_mask": key_padding_mask, "return_state": True, "normalize": False}
    mixed, after = op(phi_q, phi_k, with_ones(v, True), log_scale=log_scale, initial_state=before[0], **common)
    # Of the same log-scales, so that each row is in the same unit.
    scale = None if log_scale is None else log_scale.detach()
    sizes, ones = (x.detach().float().abs() for x in (phi_q, phi_k)), v.new_ones(*v.shape[:3], 1, dtype=torch.float32)
    most, held_too = op(*sizes, ones, log_scale=scale, initial_state=before[1], **common)
    out = (mixed[..., :-1] / held(mixed[..., -1:], (floor * most).clamp(min=eps))).to(v.dtype)
    return (out, State(torch.cat([after.kv, held_too.kv], dim=-1), after.log_scale)) if return_state else out


def held(total: Tensor, least: Tensor) -> Tensor:
    """Return sums with their magnitude held at `least` or more, which is then a constant; zero counts as positive."""
    guard = torch.where(total < 0, -least, least)
    return torch.where(total.abs() < least, guard, total)
