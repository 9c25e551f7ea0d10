"""Linear attention whose denominators cannot cross zero: for feature maps whose products can be negative.

A row's weights are divided by max(|sum_j w_ij|, c a_i), with the sum's sign, where a_i = |phi(q_i)| . sum_j |phi(k_j)|
is what they would add up to were no feature negative. As |w_ij| is at most |phi(q_i)| . |phi(k_j)|, no row's magnitudes
add up to more than 1 / c; a row that the floor meets adds up to less than one, and where no feature is negative none
meets it. The floor is a constant to the gradient, as the guard of the plain ops is.

It streams: the state [B, K, F, V + 2] has sum_j |phi(k_j)| in a column more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.ops.state import EPS, LinearOp, State, with_ones


@dataclass(frozen=True)
class Floor:
    """How small a row's sum may be.

    Attributes:
        share: c, between 0 and 1.
        eps: smallest magnitude of the sum, whatever c is.
    """

    share: float
    eps: float = EPS


def floored_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    floor: Floor,
    *,
    op: LinearOp,
    key_padding_mask: Tensor | None = None,
    log_scale: Tensor | None = None,
    initial_state: State | None = None,
) -> tuple[Tensor, State]:
    """Attend with the floor described above; the other arguments and results as in `naive_attention`.

    Args:
        phi_q: [B, H, T, F].
        phi_k: [B, K, T, F], K divides H.
        v: [B, K, T, V].
        floor: the smallest denominators.
        op: sums up the weighted values, bidirectionally or causally.
        key_padding_mask: [B, T], true or 1 where there is a token.
        log_scale: [B, K, T] or None, see `linearize.ops.state`.
        initial_state: what this op returned for the tokens before, or None.
    """
    before: tuple[State | None, State | None] = (None, None)
    if initial_state is not None:
        kv, shift = initial_state
        before = State(kv[..., :-1], shift), State(kv[..., -1:].detach(), shift)

    def summed(
        phi_q: Tensor, phi_k: Tensor, values: Tensor, scale: Tensor | None, state: State | None
    ) -> tuple[Tensor, State]:
        return op(
            phi_q,
            phi_k,
            values,
            key_padding_mask=key_padding_mask,
            log_scale=scale,
            initial_state=state,
            normalize=False,
        )

    mixed, after = summed(phi_q, phi_k, with_ones(v, True), log_scale, before[0])
    # Of the same log-scales, so that each row is in the same unit.
    scale = None if log_scale is None else log_scale.detach()
    ones = v.new_ones(*v.shape[:3], 1, dtype=torch.float32)
    most, absolute = summed(phi_q.detach().float().abs(), phi_k.detach().float().abs(), ones, scale, before[1])
    out = mixed[..., :-1] / held(mixed[..., -1:], (floor.share * most).clamp(min=floor.eps))
    return out.to(v.dtype), State(torch.cat([after.kv, absolute.kv], dim=-1), after.log_scale)


def held(total: Tensor, least: Tensor) -> Tensor:
    """Return sums with their magnitude held at `least` or more, which is then a constant; zero counts as positive."""
    guard = torch.where(total < 0, -least, least)
    return torch.where(total.abs() < least, guard, total)
