"""Softmax near, a feature map far, in both directions: blocks of queries, whose near keys are written out.

See `linearize.ops.window` for the weights. Queries are cut into blocks of 2 R tokens, R at least half of the window.
The keys from R before a block to R behind it get weights one by one, softmax's or the kernel's; those farther away are
sums phi(k) [v, 1]^T of whole blocks, shifted by R, added up from both ends. Nothing is ever subtracted: a difference of
large sums would not be exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.exact_keys import places_of, strongest
from linearize.ops.state import FLOOR, with_ones
from linearize.ops.window_parts import Keys, Part, Queries, Sinks, Window, collect, exact, pick, weigh

LEAST = 32
"""R is at least this: smaller blocks would be slower."""


@dataclass(frozen=True)
class _Cut:
    """How tokens are cut into blocks.

    Attributes:
        tokens: how many there are, T.
        block: tokens of a block.
        reach: R, how many keys before and behind a block are near; 0: all are, in one block.
        count: how many blocks, N.
    """

    tokens: int
    block: int
    reach: int
    count: int

    @classmethod
    def of(cls, tokens: int, half: int) -> _Cut:
        reach = max(half, LEAST)
        block = 2 * reach
        if isinstance(tokens, torch.SymInt):
            # In a graph always several: of one, the length would be taken for a constant.
            return cls(tokens, block, reach, (tokens + block - 1) // block + 1)
        if tokens <= block:
            return cls(tokens, tokens, 0, 1)
        return cls(tokens, block, reach, -(-tokens // block))

    def queries(self, x: Tensor, key_heads: int) -> Tensor:
        """Cut x [B, H, T, D] -> [B K N, G block, D], G = H / K: the queries of a group are rows of one product."""
        x = F.pad(x, (0, 0, 0, self.count * self.block - self.tokens))
        x = x.unflatten(1, (key_heads, -1)).unflatten(3, (self.count, self.block))
        return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def back(self, x: Tensor, batch: int, key_heads: int) -> Tensor:
        """Undo `queries`: [B K N, G block, ...] -> [B, H, T, ...]."""
        x = x.view(batch, key_heads, self.count, -1, self.block, *x.shape[2:]).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2)[:, :, : self.tokens]

    def keys(self, x: Tensor) -> Tensor:
        """Cut x [B, K, T, D], padded by R, into blocks [B, K, N + 1, block, D]; one of all tokens where R is 0."""
        rest = self.count * self.block - self.tokens
        blocks = self.count + int(self.reach > 0)
        return F.pad(x, (0, 0, self.reach, rest + self.reach)).unflatten(2, (blocks, self.block))

    def near(self, blocks: Tensor) -> Tensor:
        """Put the two blocks of keys beside each other that a block of queries lies in: [..., N, 2 block, D]."""
        return torch.cat([blocks[:, :, :-1], blocks[:, :, 1:]], dim=3) if self.reach else blocks

    def inside(self, half: int, device: torch.device) -> Tensor:
        """Tell which near keys the window of a query holds: [block, 2 block], or [T, T] where R is 0."""
        query = torch.arange(self.block, device=device)[:, None] + self.reach
        key = torch.arange(2 * self.block if self.reach else self.tokens, device=device)
        return (key - query).abs() <= half


def bidirectional_parts(queries: Queries, keys: Keys, window: Window) -> list[Part]:
    """Return the sums of softmax's weights inside the window, of the kernel's outside, and of the sinks there."""
    tokens, half = queries.q.shape[2], window.size // 2
    batch, key_heads = keys.k.shape[:2]
    cut, far_keys, parts = _Cut.of(tokens, half), keys.mask[:, None], []
    place = torch.arange(tokens, device=keys.mask.device)
    if window.sinks:
        first = collect(keys, window.sinks, None)
        outside = (place[:, None] - place[: window.sinks]).abs() > half
        outside = F.pad(outside, (0, window.sinks - outside.shape[1]))
        parts.append(exact(queries.q, first, (outside & first.mask[:, None])[:, None], window.scaling))
        far_keys = far_keys & (place >= window.sinks)
    if window.exact_keys:
        chosen = strongest(keys.scale.detach(), far_keys.expand_as(keys.scale), window.exact_keys)
        index = places_of(chosen, window.exact_keys)
        kept = Sinks(pick(keys.k, index), pick(keys.v, index), keys.mask, place)
        outside = (place[:, None] - index[:, :, None]).abs() > half
        parts.append(exact(queries.q, kept, outside & chosen.gather(2, index)[:, :, None], window.scaling))
        far_keys = far_keys & ~chosen
    # One shift for all keys: those of far smaller scale are nothing beside the largest one.
    scale = keys.scale.masked_fill(~far_keys, FLOOR)
    top = scale.detach().amax(dim=-1)
    phi = (keys.phi.float() * torch.exp(scale - top[..., None])[..., None]).masked_fill(~far_keys[..., None], 0.0)
    phi_blocks, value_blocks = cut.keys(phi), cut.keys(with_ones(keys.v, True))
    near_values, inside = cut.near(value_blocks).flatten(0, 2), cut.inside(half, phi.device)

    q = cut.queries(queries.q.float() * window.scaling, key_heads)
    scores = torch.bmm(q, cut.near(cut.keys(keys.k.float())).flatten(0, 2).transpose(1, 2))
    # [B, K, N, G, block, near keys].
    form = (batch, key_heads, cut.count, -1, *inside.shape)
    real = cut.near(cut.keys(keys.mask[:, None, :, None])).flatten(3)
    weights, level = weigh(scores.view(form), inside & real[:, :, :, None, None])
    near = torch.bmm(weights.view(scores.shape), near_values)

    phi_q = cut.queries(queries.phi.float(), key_heads)
    products = torch.bmm(phi_q, cut.near(phi_blocks).flatten(0, 2).transpose(1, 2))
    far = torch.bmm(products.view(form).masked_fill(inside, 0.0).view(scores.shape), near_values)
    if cut.reach:
        far = far + torch.bmm(phi_q, _far_sums(phi_blocks, value_blocks).flatten(0, 2))
    groups = queries.phi.shape[1] // key_heads
    far_level = queries.scale + top[..., None].repeat_interleave(groups, dim=1)
    near, level, far = (cut.back(x, batch, key_heads) for x in (near, level.flatten(3).flatten(0, 2), far))
    return [(near, level), (far, far_level), *parts]


def _far_sums(phi: Tensor, values: Tensor) -> Tensor:
    """Sum up what lies before and behind the near keys of every block of queries.

    Args:
        phi: [B, K, N + 1, block, F].
        values: [B, K, N + 1, block, V + 1].

    Returns:
        [B, K, N, F, V + 1]: of block n all but blocks n and n + 1.
    """
    sums = phi.transpose(-1, -2) @ values
    before = F.pad(sums[:, :, :-2].cumsum(dim=2), (0, 0, 0, 0, 1, 0))
    behind = F.pad(sums[:, :, 2:].flip(2).cumsum(dim=2).flip(2), (0, 0, 0, 0, 0, 1))
    return before + behind
