"""Exact keys: the S keys of each head, outside its window, that keep softmax's weights.

The keys with the largest log-scale are kept. Bidirectionally they are chosen from the whole row. Causally a key that
leaves the window competes with the S keys kept so far; the loser is folded into the linear state, so memory is
constant, and the choice depends on the past only. Of equal log-scales the older key is kept.

Related: Grigsby et al. 2025 (LoLA), https://arxiv.org/abs/2505.23666, keeps keys that the state recalls badly.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.window_parts import Window


class Contest(NamedTuple):
    """How the keys that leave the window compete, step by step. Candidates: the S kept before, then the T leaving.

    Attributes:
        loser: [B, K, T] the candidate that loses its place, or finds none, at each step.
        has_loser: [B, T] whether there is one; the same for all heads.
        lost: [B, K, S + T] the step at which a candidate loses; T if it does not, 0 if it is not there.
        kept: [B, K, N, S] the candidates kept after steps 0, `every`, 2 `every` ... and after the last one (N of them).
        is_kept: [B, N, S] whether there is one; the same for all heads.
    """

    loser: Tensor
    has_loser: Tensor
    lost: Tensor
    kept: Tensor
    is_kept: Tensor


@torch.compiler.disable
def contest(priority: Tensor, there: Tensor, slots: int, every: int) -> Contest:
    """Let candidates compete for `slots` places.

    Args:
        priority: [B, K, S + T].
        there: [B, S + T] bool: which candidates exist.
        slots: S.
        every: steps between the places that are reported.
    """
    batch, heads, count = priority.shape
    steps, device = count - slots, priority.device
    values, real = _ranks(priority).cpu().tolist(), there.cpu().tolist()
    losers, losts, kept = [], [], []
    for entry, head in ((b, h) for b in range(batch) for h in range(heads)):
        row, exists = values[entry][head], real[entry]
        heap = [(row[j], -j) for j in range(slots) if exists[j]]
        heapq.heapify(heap)
        lost, loser = [0 if not exists[j] else steps for j in range(count)], [-1] * steps
        for t in range(steps):
            j = slots + t
            if exists[j] and len(heap) < slots:
                heapq.heappush(heap, (row[j], -j))
            elif exists[j]:
                loser[t] = out = -heapq.heappushpop(heap, (row[j], -j))[1]
                lost[out] = t
            if t % every == 0 or t == steps - 1:
                # In their order, so that of equal ones the newest loses after a state was handed over, too.
                places = sorted(-j for _, j in heap)
                kept.append(places + [-1] * (slots - len(places)))
                if t == steps - 1 and t % every == 0:
                    kept.append(kept[-1])
        losers.append(loser)
        losts.append(lost)
    form = (batch, heads)
    loser_, lost_ = (torch.tensor(x, device=device).view(*form, -1) for x in (losers, losts))
    kept_ = torch.tensor(kept, device=device).view(*form, -1, slots)
    return Contest(loser_.clamp(min=0), loser_[:, 0] >= 0, lost_, kept_.clamp(min=0), kept_[:, 0] >= 0)


def strongest(priority: Tensor, candidates: Tensor, slots: int) -> Tensor:
    """Tell which keys are among the `slots` strongest candidates of their row: [..., T] bool from [..., T]."""
    priority = _ranks(priority).masked_fill(~candidates, -torch.inf)
    # A candidate comes before what is none, whatever its priority.
    order = priority.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, candidates.gather(-1, order).long().argsort(dim=-1, descending=True, stable=True))
    rank = torch.zeros_like(order).scatter(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return candidates & (rank < slots)


def places_of(chosen: Tensor, slots: int) -> Tensor:
    """Return the places of the chosen keys [B, K, T] in their order, [B, K, S]; other places where there are fewer."""
    return chosen.long().argsort(dim=-1, descending=True, stable=True)[..., :slots]


def _ranks(priority: Tensor) -> Tensor:
    return priority.detach().float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


class NearKeys:
    """Tells which keys get softmax's weights (window, sinks, exact keys), rows of queries at a time, without padding.

    Args:
        window: the form of the attention.
        priority: [b, K, T], the keys' log-scales.
    """

    def __init__(self, window: Window, priority: Tensor) -> None:
        self.window, self.kept = window, None
        slots, tokens = window.exact_keys, priority.shape[-1]
        if not slots:
            return
        there = torch.arange(tokens, device=priority.device) >= window.sinks
        if window.causal:
            nobody = F.pad(there.expand(priority.shape[0], -1), (slots, 0))
            self.kept = contest(F.pad(priority, (slots, 0)), nobody, slots, tokens).lost[..., slots:].flatten(0, 1)
        else:
            self.kept = strongest(priority, there.expand_as(priority), slots).flatten(0, 1)

    def rows(self, places: Tensor, seen: int) -> Tensor:
        """Return [n, 1, C, S] bool, or [C, S] without exact keys, for the queries at `places` and the first S keys."""
        keys = torch.arange(seen, device=places.device)
        distance = places[:, None] - keys
        window = self.window
        near = window.holds(distance) | (keys < window.sinks)
        if self.kept is None:
            return near
        kept = self.kept[:, None, None, :seen]
        if window.causal:
            # A key leaves the window of query i at step i - W.
            step = distance - window.size
            kept = (step >= 0) & (step + keys < kept)
        return near | kept
