"""Attention inside non-overlapping blocks of w tokens: linear in T, and decoding remembers one block.

Token n, counted from 0 without padding, is in block n // w and sees only that block (and, if causal, no later token).
The weights are the softmax of the scores, or their ReLU (not normalised).

Paper: Qin et al. 2022, "The Devil in Linear Transformer" (TransNormer), https://arxiv.org/abs/2210.10340, section 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.state import FLOOR, keys_up_to, put_back, real_first, real_tokens, take, weigh, without_padding


@dataclass(frozen=True)
class Blocks:
    """The form of the attention.

    Attributes:
        size: tokens per block, w.
        causal: whether query i sees only keys up to its own position.
        softmax: softmax of the scores; otherwise their ReLU.
    """

    size: int
    causal: bool
    softmax: bool = True


class BlockState(NamedTuple):
    """The tokens of the block that is not full yet.

    Attributes:
        block_k: [B, K, w, D], filled from the front.
        block_v: [B, K, w, V].
        filled: [B], the number of these tokens; less than w.
    """

    block_k: Tensor
    block_v: Tensor
    filled: Tensor


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    *,
    scaling: float,
    key_padding_mask: Tensor | None = None,
    initial_state: BlockState | None = None,
) -> tuple[Tensor, BlockState]:
    """Attend inside blocks.

    Args:
        q: [B, H, T, D].
        k: [B, K, T, D], K divides H.
        v: [B, K, T, V].
        blocks: their size, direction and weights.
        scaling: factor of the scores.
        key_padding_mask: [B, T], true or 1 at tokens; None if there is no padding.
        initial_state: the state before these tokens (causal only).

    Returns:
        Output [B, H, T, V] in fp32 and the state after the last token, from which a causal attention continues.
    """
    tokens, size = q.shape[2], blocks.size
    mask = real_tokens(q, key_padding_mask)
    q, k, v = (without_padding(x, key_padding_mask) for x in (q, k, v))
    order = None
    if initial_state is not None:
        k, v = torch.cat([initial_state.block_k, k], dim=2), torch.cat([initial_state.block_v, v], dim=2)
        q = F.pad(q, (0, 0, size, 0))
        before = torch.arange(size, device=q.device) < initial_state.filled[:, None]
        mask = torch.cat([before, mask], dim=1)
    if initial_state is not None or key_padding_mask is not None:
        order = real_first(mask)
        q, k, v, mask = take(q, order), take(k, order), take(v, order), mask.gather(1, order)
    out = _attend(q.float() * scaling, k, v, mask, blocks)
    if order is not None:
        out = put_back(out, order)
    # The block that is not full; padding comes last.
    count = mask.sum(dim=1)
    index = (count // size * size)[:, None] + torch.arange(size, device=k.device)
    absent = (index >= count[:, None])[:, None, :, None]
    index = index.clamp(max=k.shape[2] - 1)
    last_k, last_v = (take(x, index).masked_fill(absent, 0.0) for x in (k, v))
    return out[:, :, -tokens:], BlockState(last_k, last_v, count % size)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, blocks: Blocks) -> Tensor:
    """Attend inside blocks of tokens without gaps: shapes as in `block_attention`, q scaled, mask [B, T]."""
    batch, heads, tokens, _ = q.shape
    key_heads = k.shape[1]
    size = min(blocks.size, tokens)
    rest = -tokens % size
    count = (tokens + rest) // size
    q, k, v = (F.pad(x.float(), (0, 0, 0, rest)) for x in (q, k, v))
    q = q.reshape(batch, key_heads, heads // key_heads, count, size, -1)
    k, v = (x.reshape(batch, key_heads, 1, count, size, -1) for x in (k, v))
    visible = F.pad(mask, (0, rest)).reshape(batch, 1, 1, count, 1, size)
    if blocks.causal:
        visible = visible & torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    weights = _activate(q @ k.transpose(-1, -2), visible, blocks.softmax)
    out = weigh(weights[..., None, :, :], v, ~visible)[..., 0, :, :]
    return out.reshape(batch, heads, count * size, -1)[:, :, :tokens]


def _activate(scores: Tensor, visible: Tensor, softmax: bool) -> Tensor:
    """Turn scores into weights, 0 for keys that are not visible."""
    if not softmax:
        return scores.relu().masked_fill(~visible, 0.0)
    # A row that sees no key must be zero, not an average: FLOOR minus FLOOR is 0.
    return scores.masked_fill(~visible, FLOOR).softmax(dim=-1).masked_fill(~visible, 0.0)


def block_weights(
    q: Tensor,
    k: Tensor,
    blocks: Blocks,
    *,
    scaling: float,
    key_padding_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Return the weights [B, H, T, T] of `block_attention` in fp32, for the same arguments: the quadratic reference.

    With `rows` [R], only those of the queries of these tokens: [B, H, R, T].
    """
    real = real_tokens(k, key_padding_mask)
    q, k = without_padding(q, key_padding_mask), without_padding(k, key_padding_mask)
    number = (real.long().cumsum(dim=-1) - 1).clamp(min=0) // blocks.size
    of_queries = number
    if rows is not None:
        q, of_queries = q[:, :, rows], number[:, rows]
    visible = (of_queries[:, :, None] == number[:, None, :]) & real[:, None]
    if blocks.causal:
        visible = visible & keys_up_to(k, rows)
    scores = (q.float() * scaling) @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    return _activate(scores, visible[:, None], blocks.softmax)
