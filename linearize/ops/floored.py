"""Linear attention whose denominators cannot cross zero: for feature maps whose products can be negative.

A row's weights are divided by max(|sum_j w_ij|, c a_i), with the sum's sign. a_i = |phi(q_i)| . sum_j |phi(k_j)| is
what the sum would be if no feature were negative. |w_ij| is at most |phi(q_i)| . |phi(k_j)|, so the magnitudes of a row
never add up to more than 1 / c. A row to which the floor applies adds up to less than one; it applies to no row if no
feature is negative. Like the guard of the plain ops, the floor is a constant for the gradient.

The op can stream: its state [B, K, F, V + 2] has one more column, for sum_j |phi(k_j)|.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from linearize.ops.state import EPS, LinearOp, LinearOptions, State, held, with_ones


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
