"""Walk the two T x T matrices, softmax's weights and the kernel's, in blocks of rows: they never exist as a whole.

Queries are grouped by the key/value head that they read: [B, K, G, R, D] with G = H / K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_NUMBERS = 1 << 19
"""Numbers in one block of one matrix (2 MiB of fp32): small enough to stay in the cache, large enough to be fast."""


@dataclass(frozen=True)
class Rows:
    """One block of rows.

    Attributes:
        part: which of the given queries.
        places: [C] their positions among the keys, ascending.
        seen: how many keys any of them sees: the first `seen`.
        causal: whether a row sees only keys up to its place.
        mask: [B, seen] key padding mask, or None.
    """

    part: slice
    places: Tensor
    seen: int
    causal: bool
    mask: Tensor | None = None

    @property
    def visible(self) -> Tensor | None:
        """Which keys each row sees, [1 or B, 1, 1, C or 1, seen] bool; None if all rows see all of them."""
        visible = None
        if self.causal:
            keys = torch.arange(self.seen, device=self.places.device)
            visible = (keys <= self.places[:, None])[None, None, None]
        if self.mask is None:
            return visible
        real = self.mask[:, None, None, None].bool()
        return real if visible is None else visible & real

    @property
    def edge(self) -> Tensor | None:
        """Which of the last E keys, those after the first row's place, each row does not see: [C, E]; None if none."""
        first = int(self.places[0]) + 1
        if not self.causal or first == self.seen:
            return None
        return torch.arange(first, self.seen, device=self.places.device) > self.places[:, None]


def row_blocks(
    places: Tensor, keys: int, size: int, *, causal: bool, key_padding_mask: Tensor | None = None
) -> Iterator[Rows]:
    """Cut queries into blocks of `size` rows.

    Args:
        places: [R] positions of the queries among the keys, ascending.
        keys: how many keys there are.
        size: rows of a block.
        causal: whether a query sees only keys up to its place; then a block contains no later key.
        key_padding_mask: [B, T], true at tokens, or None.
    """
    for start in range(0, len(places), size):
        part = slice(start, min(start + size, len(places)))
        seen = int(places[part][-1]) + 1 if causal else keys
        mask = None if key_padding_mask is None else key_padding_mask[:, :seen]
        yield Rows(part, places[part], seen, causal, mask)


def all_rows(q: Tensor, causal: bool, key_padding_mask: Tensor | None) -> Iterator[Rows]:
    """Cut the queries q [B, H, T, D] of all T tokens into blocks that stay in the cache."""
    batch, heads, tokens, _ = q.shape
    size = max(1, min(tokens, BLOCK_NUMBERS // max(1, batch * heads * tokens)))
    places = torch.arange(tokens, device=q.device)
    return row_blocks(places, tokens, size, causal=causal, key_padding_mask=key_padding_mask)


def softmax_rows(q: Tensor, k: Tensor, rows: Rows, scaling: float) -> Tensor:
    """Return softmax's weights of a block: q [B, K, G, R, D], k [B, K, T, D] -> [B, K, G, C, seen], fp32."""
    scores = (q[:, :, :, rows.part].float() * scaling) @ k[:, :, None, : rows.seen].float().transpose(-1, -2)
    visible = rows.visible
    if visible is None:
        return scores.softmax(dim=-1)
    # A row that sees nothing (left padding) is zero, not NaN.
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).nan_to_num(nan=0.0)


def pieces(key_padding_mask: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Sort a batch by its padding, so that padded tokens can be left out and cost nothing.

    Args:
        key_padding_mask: [B, T], true at tokens, or None.

    Yields:
        Batch entries [b] that have the same tokens, and those tokens [S], ascending. Both are None for the whole batch.
    """
    if key_padding_mask is None or bool(key_padding_mask.all()):
        yield None, None
        return
    kinds, kind = torch.unique(key_padding_mask.bool(), dim=0, return_inverse=True)
    for number, real in enumerate(kinds):
        yield (kind == number).nonzero()[:, 0], real.nonzero()[:, 0]


def take(x: Tensor, batch: Tensor | None, tokens: Tensor | None) -> Tensor:
    """Return a copy of some entries and tokens of x [B, H, T, ...]; with None for both, x itself."""
    x = x if batch is None else x[batch]
    return x if tokens is None else x.index_select(2, tokens)


def put(x: Tensor, batch: Tensor, tokens: Tensor | None, part: Tensor) -> None:
    """Write back what `take` returned; the other tokens of these entries become 0."""
    if tokens is not None:
        part = torch.zeros_like(x[batch]).index_copy_(2, tokens, part)
    x[batch] = part


def group(q: Tensor, key_heads: int) -> Tensor:
    """View [B, H, R, D] as [B, K, H / K, R, D]."""
    return q.reshape(q.shape[0], key_heads, -1, *q.shape[2:])
