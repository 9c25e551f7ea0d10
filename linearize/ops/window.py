"""Softmax near, a feature map far: two kinds of weights under one denominator, linear in T.

The unnormalised weight of key j for query i is

    exp(scaling q_i . k_j)                               where j is in the window of i,
    exp(a_i + c_j) phi(q_i) . phi(k_j)                   where it is not (a, c: log-scales of query and key),

and every row is divided by its sum. Causally the window of i is the last W tokens, i - W < j <= i. Bidirectionally it
is |i - j| <= W // 2, so W tokens for odd W and W + 1 for even W. The first S tokens, the sinks, get softmax's weights
from everywhere (causally: from all tokens behind them). Tokens are counted without padding. All parts are computed
under one shift m_i, the largest of their magnitudes, which cancels.

Papers: the hybrid of Zhang et al. 2024 (LoLCATs), https://arxiv.org/abs/2410.10254, section 3.3; there the linear part
is not divided by exp(m_i). Sinks: Xiao et al. 2024, https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.ops.causal import causal_attention
from linearize.ops.compact import put_back, real_first
from linearize.ops.state import LinearOp, divide, without_padding
from linearize.ops.tracing import is_tracing
from linearize.ops.window_bidirectional import bidirectional_parts
from linearize.ops.window_causal import causal_parts
from linearize.ops.window_parts import Keys, Mapped, Queries, Window, WindowState, join

LONG = 1024
"""From this many tokens on, key heads take turns."""


def window_attention(
    queries: Mapped,
    keys: Mapped,
    v: Tensor,
    window: Window,
    *,
    key_padding_mask: Tensor | None = None,
    initial_state: WindowState | None = None,
    op: LinearOp = causal_attention,
) -> tuple[Tensor, WindowState | None]:
    """Attend with softmax inside a window and with a feature map outside it; no T x T matrix is made.

    Args:
        queries: of H heads.
        keys: of K heads, K divides H.
        v: values [B, K, T, V].
        window: its size and direction.
        key_padding_mask: [B, T], true or 1 where there is a token.
        initial_state: what was seen before these tokens (causal only).
        op: sums up what lies outside the window, causally.

    Returns:
        Output [B, H, T, V] in `v`'s dtype, and the state after the last token; None where not causal.
    """
    mask = torch.ones(v.shape[0], v.shape[2], dtype=torch.bool, device=v.device)
    mask = mask if key_padding_mask is None else key_padding_mask.bool()
    q, k, v, phi_k = (without_padding(x, key_padding_mask) for x in (queries.x, keys.x, v, keys.phi.float()))
    side = Queries(q, queries.phi, queries.scale())
    run = Keys(k, v, phi_k, keys.scale(), mask)
    order = real_first(mask) if key_padding_mask is not None and v.shape[2] > 1 else None
    if order is not None:
        side, run = side.taken(order), run.taken(order)
    state = None
    if window.causal:
        parts, state = causal_parts(side, run, window, initial_state, op)
        out = divide(join(parts), window.eps)
    else:
        turns = _turns(side, run)
        found = [divide(join(bidirectional_parts(*turn, window)), window.eps) for turn in turns]
        out = found[0] if len(found) == 1 else torch.cat(found, dim=1)
    return (out if order is None else put_back(out, order)).to(v.dtype), state


def _turns(queries: Queries, keys: Keys) -> list[tuple[Queries, Keys]]:
    """Cut long inputs on the CPU into key heads, one after the other, so that what is made of one fits into caches.

    With a gradient all of it is kept anyway.
    """
    tokens, key_heads = queries.q.shape[2], keys.k.shape[1]
    if torch.is_grad_enabled() or keys.k.device.type != "cpu" or is_tracing() or tokens < LONG:
        return [(queries, keys)]
    group = queries.q.shape[1] // key_heads
    return [(queries.heads(h * group, (h + 1) * group), keys.heads(h, h + 1)) for h in range(key_heads)]
