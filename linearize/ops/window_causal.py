"""Softmax near, a feature map far, causally: what lies beyond the window is summed up by a causal op, token by token.

See `linearize.ops.window` for the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.compact import take
from linearize.ops.exact_keys import Contest, contest, places_of
from linearize.ops.recurrent import recurrent_attention
from linearize.ops.state import (
    LinearOp,
    State,
    empty_state,
    group_queries,
    masked_log_scale,
    with_ones,
    without_padding,
)
from linearize.ops.tracing import overlapping, running_max
from linearize.ops.window_parts import Keys, Queries, Window, WindowState, collect, exact, pick, weigh


def causal_parts(
    queries: Queries, keys: Keys, window: Window, initial_state: WindowState | None, op: LinearOp
) -> tuple[list[tuple[Tensor, Tensor]], WindowState]:
    """Return what lies beyond the window and inside it, as `join` takes them, and the state after."""
    tokens = queries.q.shape[2]
    ring, kept, past = _resume(keys, window, initial_state)
    whole = ring.then(keys)
    # The key that leaves the window when a token enters it; padding at the end lets none leave.
    leaving = whole.part(slice(0, tokens))
    leaving = leaving._replace(mask=leaving.mask & keys.mask)
    parts, sinks = [], None
    if window.sinks:
        sinks = collect(keys, window.sinks, initial_state)
        place = sinks.before[:, None] + torch.arange(tokens, device=keys.mask.device)
        leaving = leaving._replace(mask=leaving.mask & (place - window.size >= window.sinks))
        behind = place[:, :, None] - torch.arange(window.sinks, device=place.device) >= window.size
        parts.append(exact(queries.q, sinks, (behind & sinks.mask[:, None])[:, None], window.scaling))
    found = None
    if window.exact_keys:
        candidates = kept.then(leaving)
        found = contest(candidates.scale, candidates.mask, window.exact_keys, _block(tokens, window.size))
        kept = candidates.picked(found.kept[:, :, -1], found.is_kept[:, -1])
        leaving = candidates.picked(found.loser, found.has_loser)
    far, after = _linear(queries, leaving, past, op)
    chosen = None if found is None else (candidates, found)
    near = _softmax(queries.q, whole.part(slice(1, None)), window.size, window.scaling, chosen)
    count = keys.mask.sum(dim=1)
    end = count[:, None] + torch.arange(window.size, device=keys.mask.device)
    state = WindowState(*after, *whole.taken(end))
    if sinks is not None:
        state = state._replace(sink_k=sinks.k, sink_v=sinks.v, tokens=sinks.before + count)
    if window.exact_keys:
        state = _keeping(state, kept)
    return [far, near, *parts], state


def state_after(
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    window: Window,
    past: State,
    features: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    kept: Tensor | None = None,
) -> WindowState:
    """Return the state after the tokens k [B, K, T, D], v [B, K, T, V] of a whole sequence.

    Args:
        k: keys; the real ones of `mask` lie in front.
        v: values.
        mask: [B, T] bool, or None.
        window: its form.
        past: of the tokens that have left the window.
        features: maps keys [B, K, W, D] -> features [B, K, W, F] and log-scales [B, K, W] or None.
        kept: [B, K, T] bool, which are exact keys now, equally many for all heads; None without exact keys.
    """
    if mask is None:
        mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    k, v = without_padding(k, mask), without_padding(v, mask)
    count = mask.sum(dim=1)
    place = count[:, None] - window.size + torch.arange(window.size, device=k.device)
    there, order = place >= 0, place.clamp(min=0)

    def remember(k: Tensor, v: Tensor, there: Tensor) -> Keys:
        k, v = without_padding(k, there), without_padding(v, there)
        phi, scale = features(k)
        phi = without_padding(phi.float(), there)
        scale = torch.zeros(phi.shape[:3], device=k.device) if scale is None else scale.float()
        return Keys(k, v, phi, scale.masked_fill(~there[:, None], 0.0), there)

    state = WindowState(*past, *remember(take(k, order), take(v, order), there))
    if kept is not None:
        index = F.pad(places_of(kept, window.exact_keys), (0, max(0, window.exact_keys - kept.shape[-1])))
        there = torch.arange(window.exact_keys, device=k.device) < kept[:, 0].sum(dim=-1, keepdim=True)
        state = _keeping(state, remember(pick(k, index), pick(v, index), there))
    if not window.sinks:
        return state
    sinks = collect(Keys(k, v, k, k[..., 0], mask), window.sinks, None)
    return state._replace(sink_k=sinks.k, sink_v=sinks.v, tokens=count)


def _keeping(state: WindowState, kept: Keys) -> WindowState:
    return state._replace(**{f"kept_{name}": tensor for name, tensor in kept._asdict().items()})


def _resume(keys: Keys, window: Window, state: WindowState | None) -> tuple[Keys, Keys, State]:
    """Return the ring, the exact keys and the linear state to start from."""
    none = keys.part(slice(0, 0))
    if state is None:
        past = empty_state(keys.phi, keys.v, scaled=True)
        return none.padded(window.size, 0), none.padded(window.exact_keys, 0), past
    ring = (state.ring_k, state.ring_v, state.ring_phi, state.ring_scale, state.ring_mask)
    kept = (state.kept_k, state.kept_v, state.kept_phi, state.kept_scale, state.kept_mask)
    given = [x for x in kept if x is not None]
    return Keys(*ring), Keys(*given) if given else none, State(state.kv, state.log_scale)


def _linear(queries: Queries, keys: Keys, past: State | None, op: LinearOp) -> tuple[tuple[Tensor, Tensor], State]:
    """Sum over the keys up to each query's place: ([B, H, T, V + 1], its log-scale [B, H, T]) and the state."""
    values = with_ones(keys.v, True)
    past = empty_state(keys.phi, keys.v, scaled=True) if past is None else past
    mixed, after = (recurrent_attention if values.shape[2] == 1 else op)(
        queries.phi,
        keys.phi,
        values,
        key_padding_mask=keys.mask,
        log_scale=keys.scale,
        initial_state=past,
        normalize=False,
    )
    scale = masked_log_scale(keys.phi, keys.scale, keys.mask)
    assert scale is not None
    # The op's own stabiliser, which it does not return.
    shift = torch.maximum(running_max(scale.detach()), past.log_scale[..., None])
    groups = queries.phi.shape[1] // shift.shape[1]
    return (mixed, queries.scale + shift.repeat_interleave(groups, dim=1)), after


def _block(tokens: int, span: int) -> int:
    """Return how many queries are taken together."""
    return max(span, 32) if isinstance(tokens, torch.SymInt) else min(tokens, max(span, 32))


def _softmax(
    q: Tensor, keys: Keys, span: int, scaling: float, chosen: tuple[Keys, Contest] | None = None
) -> tuple[Tensor, Tensor]:
    """Sum softmax's weights over `span` keys per query, in blocks, and over the exact keys.

    Query t [B, H, T, D] sees the keys t to t + span - 1 of the T + span - 1 given. An exact key that left the window
    before a block is a further column of it; one that leaves during the block is a column already.

    Returns:
        Sums [B, H, T, V + 1] and their log-scale [B, H, T].
    """
    tokens, key_heads = q.shape[2], keys.k.shape[1]
    block = _block(tokens, span)
    # In a graph always several: of one, the length would be taken for a constant.
    count = (tokens + block - 1) // block + int(isinstance(tokens, torch.SymInt))
    seen, rest = block + span - 1, count * block - tokens
    keys = keys.padded(0, rest)
    queries = F.pad(q.float(), (0, 0, 0, rest)) * scaling
    queries = group_queries(queries, key_heads).unflatten(3, (count, block)).transpose(2, 3)
    shape = queries.shape[:5]
    near = overlapping(keys.k.float(), 2, count, seen, block)
    values = overlapping(with_ones(keys.v, True), 2, count, seen, block)
    distance = torch.arange(seen, device=q.device) - torch.arange(block, device=q.device)[:, None]
    visible = (distance >= 0) & (distance < span)
    visible = visible & overlapping(keys.mask, 1, count, seen, block)[:, None, :, None, None]
    if chosen is not None:
        candidates, found = chosen
        slots = found.kept.shape[-1]
        step = torch.arange(count * block, device=q.device).view(count, 1, block, 1)
        # Key w of the ring and the tokens leaves at step w, and the first of `keys` is number 1.
        lost = F.pad(found.lost[:, :, slots + 1 :], (0, span + rest))
        lost = overlapping(lost, 2, count, seen, block)[:, :, :, None, None]
        visible = visible | ((distance < 0) & (step < lost))
        places = found.kept[:, :, :count].flatten(2)
        older = candidates.picked(places, found.is_kept[:, :count].flatten(1))
        near = torch.cat([near, older.k.float().unflatten(2, (count, slots))], dim=3)
        values = torch.cat([values, with_ones(older.v, True).unflatten(2, (count, slots))], dim=3)
        lost = found.lost.gather(2, places).unflatten(2, (count, slots))[:, :, :, None, None]
        still = (step < lost) & found.is_kept[:, None, :count, None, None]
        visible = torch.cat([visible.expand(*still.shape[:-1], -1), still], dim=-1)
    # A matrix product for each key head and block, all queries of the group at once.
    scores = torch.bmm(queries.flatten(3, 4).flatten(0, 2), near.flatten(0, 2).transpose(1, 2))
    weights, top = weigh(scores.view(*shape, -1), visible)
    mixed = torch.bmm(weights.view(scores.shape), values.flatten(0, 2)).view(*shape, -1)
    # [B, K, blocks, G, block] -> [B, H, T].
    mixed, top = (x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :tokens] for x in (mixed, top))
    return mixed, top
