"""Attention inside non-overlapping blocks of w tokens: linear in T, and decoding remembers one block.

Token number n, counted from 0 without padding, is in block n // w and sees its own block only; causally only what is
not after it. Weights are softmax of the scores, or their ReLU (not normalised).

Paper: Qin et al. 2022, "The Devil in Linear Transformer" (TransNormer), https://arxiv.org/abs/2210.10340, section 4.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.compact import put_back, real_first, take
from linearize.ops.state import FLOOR, without_padding


class BlockState(NamedTuple):
    """The tokens of the block that is not full yet.

    Attributes:
        block_k: [B, K, w, D], filled from the front.
        block_v: [B, K, w, V].
        filled: [B], how many there are; less than w.
    """

    block_k: Tensor
    block_v: Tensor
    filled: Tensor


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    scaling: float,
    causal: bool,
    softmax: bool = True,
    key_padding_mask: Tensor | None = None,
    initial_state: BlockState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, BlockState]:
    """Attend inside blocks.

    Args:
        q: [B, H, T, D].
        k: [B, K, T, D], K divides H.
        v: [B, K, T, V].
        block: tokens per block, w.
        scaling: what scores are multiplied with.
        causal: whether query i sees keys up to its own position only.
        softmax: softmax of the scores; otherwise their ReLU.
        key_padding_mask: [B, T], true or 1 where there is a token.
        initial_state: what was seen before these tokens (causal only).
        return_state: whether to return the state after the last token as well (causal only).

    Returns:
        Output [B, H, T, V] in fp32; with `return_state` also the final state.
    """
    tokens = q.shape[2]
    mask = torch.ones(q.shape[0], tokens, dtype=torch.bool, device=q.device)
    mask = mask if key_padding_mask is None else key_padding_mask.bool()
    q, k, v = (without_padding(x, key_padding_mask) for x in (q, k, v))
    order = None
    if initial_state is not None:
        held, filled = block, initial_state.filled
        k, v = torch.cat([initial_state.block_k, k], dim=2), torch.cat([initial_state.block_v, v], dim=2)
        q = F.pad(q, (0, 0, held, 0))
        mask = torch.cat([torch.arange(held, device=q.device) < filled[:, None], mask], dim=1)
    if initial_state is not None or key_padding_mask is not None:
        order = real_first(mask)
        q, k, v, mask = take(q, order), take(k, order), take(v, order), mask.gather(1, order)
    out = _blocks(q, k, v, mask, block, scaling, causal, softmax)
    if order is not None:
        out = put_back(out, order)
    out = out[:, :, -tokens:]
    if not return_state:
        return out
    count = mask.sum(dim=1)
    # The tokens are in front now, so the block that is not full begins at a multiple of w.
    last = (count // block * block)[:, None] + torch.arange(block, device=q.device)
    k, v = (F.pad(x, (0, 0, 0, block)) for x in (k, v))
    return out, BlockState(take(k, last), take(v, last), count % block)


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, block: int, scaling: float, causal: bool, softmax: bool
) -> Tensor:
    """Attend inside blocks of tokens without gaps: shapes as in `block_attention`, mask [B, T]."""
    batch, heads, tokens, _ = q.shape
    key_heads = k.shape[1]
    size = min(block, tokens)
    rest = -tokens % size
    count = (tokens + rest) // size
    q, k, v = (F.pad(x.float(), (0, 0, 0, rest)) for x in (q, k, v))
    q = q.reshape(batch, key_heads, heads // key_heads, count, size, -1) * scaling
    k, v = (x.reshape(batch, key_heads, 1, count, size, -1) for x in (k, v))
    visible = F.pad(mask, (0, rest)).reshape(batch, 1, 1, count, 1, size)
    if causal:
        visible = visible & torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    out = _activate(q @ k.transpose(-1, -2), visible, softmax) @ v
    return out.reshape(batch, heads, count * size, -1)[:, :, :tokens]


def _activate(scores: Tensor, visible: Tensor, softmax: bool) -> Tensor:
    """Turn scores into weights that are 0 where nothing is visible."""
    if not softmax:
        return scores.relu().masked_fill(~visible, 0.0)
    # A row that sees nothing is zero, not an average: FLOOR minus FLOOR is 0.
    return scores.masked_fill(~visible, FLOOR).softmax(dim=-1).masked_fill(~visible, 0.0)


def block_weights(
    q: Tensor,
    k: Tensor,
    *,
    block: int,
    scaling: float,
    causal: bool,
    softmax: bool = True,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Write out the weights [B, H, T, S] of `block_attention` in fp32 (arguments as there); quadratic, the reference.

    The queries are the last T of the S tokens.
    """
    queries, keys = q.shape[2], k.shape[2]
    real = torch.ones(q.shape[0], keys, dtype=torch.bool, device=q.device)
    real = real if key_padding_mask is None else key_padding_mask.bool()
    number = (real.long().cumsum(dim=-1) - 1).clamp(min=0) // block
    visible = (number[:, -queries:, None] == number[:, None, :]) & real[:, None]
    if causal:
        visible = visible & torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    k = without_padding(k, key_padding_mask)
    q = without_padding(q, None if key_padding_mask is None else key_padding_mask[:, -queries:])
    scores = (q.float() * scaling) @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    return _activate(scores, visible[:, None], softmax)
