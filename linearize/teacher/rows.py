"""Walk the two T x T matrices, softmax's weights and the kernel's, in blocks of rows: never whole.

Queries are grouped by the key/value head that they read: [B, K, G, R, D] with G = H / K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.ops.state import FLOOR

BLOCK_NUMBERS = 1 << 19
"""Numbers in one block of one matrix (2 MiB of fp32): small enough to stay in the cache, large enough to be fast."""


@dataclass(frozen=True)
class Rows:
    """One block of rows.

    Attributes:
        part: which of the given queries.
        seen: how many keys any of them sees: the first `seen`.
        visible: [1 or B, 1, 1, C, S] bool, or None where all of them see all `seen` keys.
    """

    part: slice
    seen: int
    visible: Tensor | None


def row_blocks(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None = None,
) -> Iterator[Rows]:
    """Cut queries q [B, H, R, D] over keys k [B, K, T, D] into blocks.

    Args:
        q: the queries.
        k: all keys.
        causal: whether a query sees only keys up to its own position; then a block visits no later key.
        key_padding_mask: [B, T], true where there is a token.
    """
    batch, heads, queries, _ = q.shape
    tokens = k.shape[2]
    size = max(1, min(queries, BLOCK_NUMBERS // max(1, batch * heads * tokens)))
    places = torch.arange(tokens, device=q.device)
    for start in range(0, queries, size):
        part = slice(start, min(start + size, queries))
        seen = part.stop if causal else tokens
        visible = None
        if causal:
            visible = (places[:seen] <= places[part, None])[None, None, None]
        if key_padding_mask is not None:
            real = key_padding_mask[:, None, None, None, :seen].bool()
            visible = real if visible is None else visible & real
        yield Rows(part, seen, visible)


def softmax_rows(q: Tensor, k: Tensor, rows: Rows, scaling: float) -> Tensor:
    """Return softmax's weights of a block: q [B, K, G, R, D], k [B, K, T, D] -> [B, K, G, C, seen], fp32."""
    scores = (q[:, :, :, rows.part].float() * scaling) @ k[:, :, None, : rows.seen].float().transpose(-1, -2)
    if rows.visible is None:
        return scores.softmax(dim=-1)
    # A row that sees nothing (left padding) is zero, not NaN.
    return scores.masked_fill(~rows.visible, -torch.inf).softmax(dim=-1).nan_to_num(nan=0.0)


def kernel_rows(phi_q: Tensor, phi_k: Tensor, log_scale: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Return a block of plain products phi(q) . phi(k) and the exponents that scale them.

    Shapes: `phi_q` [B, K, G, R, F], `phi_k` [B, K, T, F], `log_scale` [B, K, T] -> products [B, K, G, C, seen] and
    exponents that broadcast to it (None: all 0). A row's weights are proportional to `products * exp(exponents)`;
    exponents are at most 0, and `FLOOR` at keys that are not seen.
    """
    products = phi_q[:, :, :, rows.part] @ phi_k[:, :, None, : rows.seen].transpose(-1, -2)
    if log_scale is None:
        if rows.visible is None:
            return products, None
        return products, torch.zeros_like(rows.visible, dtype=products.dtype).masked_fill(~rows.visible, FLOOR)
    scale = log_scale[:, :, None, None, : rows.seen]
    if rows.visible is not None:
        scale = scale.masked_fill(~rows.visible, FLOOR)
    return products, (scale - scale.amax(dim=-1, keepdim=True)).clamp(min=FLOOR)


def pieces(key_padding_mask: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Sort a batch by its padding, so that padded tokens can be left out and cost nothing.

    Args:
        key_padding_mask: [B, T], true where there is a token, or None.

    Yields:
        Batch entries [b] that have the same tokens, and those tokens [S], ascending. Both None: all of all.
    """
    if key_padding_mask is None or bool(key_padding_mask.all()):
        yield None, None
        return
    kinds, kind = torch.unique(key_padding_mask.bool(), dim=0, return_inverse=True)
    for number, real in enumerate(kinds):
        yield (kind == number).nonzero()[:, 0], real.nonzero()[:, 0]


def take(x: Tensor, batch: Tensor | None, tokens: Tensor | None) -> Tensor:
    """Return some entries and tokens of x [B, H, T, ...] as a copy; None takes all, and nothing is copied then."""
    x = x if batch is None else x[batch]
    return x if tokens is None else x.index_select(2, tokens)


def put(x: Tensor, batch: Tensor, tokens: Tensor | None, part: Tensor) -> None:
    """Write back what `take` gave; the other tokens of these entries become 0."""
    if tokens is not None:
        part = torch.zeros_like(x[batch]).index_copy_(2, tokens, part)
    x[batch] = part


def group(q: Tensor, key_heads: int) -> Tensor:
    """View [B, H, R, D] as [B, K, H / K, R, D]."""
    return q.reshape(q.shape[0], key_heads, -1, *q.shape[2:])
