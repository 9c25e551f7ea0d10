"""A feature-map kernel over a long input, a part of the tokens at a time.

Features are made part by part and used up while they are in the processor's cache: none of T rows is ever kept. The
backward makes them again, part by part, from q, k and v; a causal pass keeps the state before every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from linearize.ops import State, causal_attention, gather_keys, read_state
from linearize.ops.state import without_padding

if TYPE_CHECKING:
    from linearize.attention.feature_map import FeatureMapMixer

NUMBERS = {"cpu": 1 << 19}
"""Numbers in the features of one part: 2 MiB of fp32, about a core's cache."""

ELSEWHERE = 1 << 26
"""The same on devices that want large products."""

UNIT = 64
"""Parts are multiples of this many tokens, the causal op's chunk."""


class Call(NamedTuple):
    """What belongs to one call and has no gradient.

    Attributes:
        scaling: what scores are multiplied with.
        mask: key padding mask [B, T] or None.
        positions: [B, T] or None.
    """

    scaling: float
    mask: Tensor | None
    positions: Tensor | None

    def cut(self, part: slice) -> Call:
        """Return the same for a part of the tokens."""
        mask = None if self.mask is None else self.mask[:, part]
        return Call(self.scaling, mask, None if self.positions is None else self.positions[:, part])


def parts(q: Tensor, features: int) -> list[slice]:
    """Cut the tokens of q [B, H, T, D] into parts."""
    batch, heads, tokens, _ = q.shape
    room = NUMBERS.get(q.device.type, ELSEWHERE) // max(1, batch * heads * features)
    size = max(UNIT, room // UNIT * UNIT)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def stream(
    mixer: FeatureMapMixer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    state: State | None,
    before: list[Tensor] | None = None,
) -> tuple[Tensor, State]:
    """Attend without a gradient: q [B, H, T, D], k [B, K, T, D], v [B, K, T, V] -> [B, H, T, V] and the state.

    A list given as `before` gets the two tensors of the state before every causal part that has one.
    """
    # Tokens first in memory: that is how the host goes on with it.
    out = v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    cuts = parts(q, mixer.feature_dim)
    if mixer.shape.causal:
        for part in cuts:
            if before is not None and state is not None:
                before += state
            out[:, :, part], state = causal_part(
                mixer, q[:, :, part], k[:, :, part], v[:, :, part], call.cut(part), state
            )
    else:
        for part in cuts:
            state = gather_part(mixer, k[:, :, part], v[:, :, part], call.cut(part), state)
        assert state is not None
        for part in cuts:
            out[:, :, part] = read_part(mixer, q[:, :, part], state, call.cut(part), v.dtype)
    assert state is not None
    return out, state


def causal_part(
    mixer: FeatureMapMixer, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
) -> tuple[Tensor, State]:
    """Attend causally from a part of the tokens to those before and in it."""
    queries = mixer.query_features(without_padding(q, call.mask), call.scaling, call.positions)
    keys = mixer.key_features(without_padding(k, call.mask), call.scaling, call.positions)
    found: Any = causal_attention(
        queries.phi,
        keys.phi,
        v.float(),
        key_padding_mask=call.mask,
        log_scale=keys.log_scale,
        initial_state=state,
        return_state=True,
        normalize=mixer.keys.normalize,
        eps=mixer.eps,
    )
    return mixer.close(found[0], v.dtype), found[1]


def gather_part(
    mixer: FeatureMapMixer,
    k: Tensor,
    v: Tensor,
    call: Call,
    state: State | None,
    shift: Tensor | None = None,
) -> State:
    """Add a part of the keys to a state."""
    keys = mixer.key_features(without_padding(k, call.mask), call.scaling, call.positions)
    return gather_keys(
        keys.phi,
        v,
        key_padding_mask=call.mask,
        log_scale=keys.log_scale,
        initial_state=state,
        normalize=mixer.keys.normalize,
        shift=shift,
    )


def read_part(mixer: FeatureMapMixer, q: Tensor, state: State, call: Call, dtype: torch.dtype) -> Tensor:
    """Read the state with a part of the queries."""
    queries = mixer.query_features(without_padding(q, call.mask), call.scaling, call.positions)
    return mixer.close(read_state(queries.phi, state, normalize=mixer.keys.normalize, eps=mixer.eps), dtype)


def stream_with_gradient(mixer: FeatureMapMixer, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Attend, with a gradient to q, k, v and the mixer's parameters that makes the features again."""
    return _Streamed.apply(mixer, call, q, k, v, *mixer.parameters())


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixer: FeatureMapMixer, call: Call, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        ctx.mixer, ctx.call = mixer, call
        before: list[Tensor] = []
        out, state = stream(mixer, q, k, v, call, None, before)
        states = before if mixer.shape.causal else state
        ctx.save_for_backward(q, k, v, *states)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, *states = ctx.saved_tensors
        mixer, call = ctx.mixer, ctx.call
        # Fetched now: a sharded model's parameters are other tensors than at the forward.
        total = _Gradients(mixer, (q, k, v), ctx.needs_input_grad[2:5])
        walk = _causal_backward if mixer.shape.causal else _bidirectional_backward
        with torch.enable_grad(), torch.autocast(device_type=q.device.type, enabled=False):
            walk(mixer, call, (q, k, v), states, grad, total)
        return None, None, *total.inputs, *total.parameters


class _Gradients:
    """Sums up the gradients of the parts."""

    def __init__(self, mixer: FeatureMapMixer, inputs: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self.inputs = [torch.empty_like(x) if wanted else None for x, wanted in zip(inputs, needed, strict=True)]
        self.learned = list(mixer.parameters())
        self.parameters: list[Tensor | None] = [None] * len(self.learned)
        self.asked = [i for i, parameter in enumerate(self.learned) if parameter.requires_grad]

    def take(self, results: Sequence[Tensor], grads: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        """Differentiate a part; add up the parameters' gradients and return those of `leaves` (zeros where unused)."""
        wanted = [*leaves, *(self.learned[i] for i in self.asked)]
        pairs = [(x, g) for x, g in zip(results, grads, strict=True) if x.requires_grad]
        found = torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        for i, new in zip(self.asked, found[len(leaves) :], strict=True):
            if new is not None:
                old = self.parameters[i]
                self.parameters[i] = new if old is None else old.add_(new)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=False)]

    def put(self, which: int, part: slice, grad: Tensor) -> None:
        """Keep the gradient to a part of q (0), k (1) or v (2)."""
        kept = self.inputs[which]
        if kept is not None:
            kept[:, :, part] = grad


def _leaf(x: Tensor, part: slice | None = None) -> Tensor:
    return (x if part is None else x[:, :, part]).detach().requires_grad_()


def _bidirectional_backward(
    mixer: FeatureMapMixer,
    call: Call,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    grad: Tensor,
    total: _Gradients,
) -> None:
    """Go through the queries for the state's gradient, then through the keys with it."""
    q, k, v = inputs
    state = State(*states)
    grad_kv = torch.zeros_like(state.kv)
    cuts = parts(q, mixer.feature_dim)
    for part in cuts:
        query, kv = _leaf(q, part), _leaf(state.kv)
        out = read_part(mixer, query, State(kv, state.log_scale), call.cut(part), v.dtype)
        found = total.take([out], [grad[:, :, part]], [query, kv])
        total.put(0, part, found[0])
        grad_kv += found[1]
    for part in cuts:
        key, value = _leaf(k, part), _leaf(v, part)
        added = gather_part(mixer, key, value, call.cut(part), None, state.log_scale)
        found = total.take([added.kv], [grad_kv], [key, value])
        total.put(1, part, found[0])
        total.put(2, part, found[1])


def _causal_backward(
    mixer: FeatureMapMixer,
    call: Call,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    grad: Tensor,
    total: _Gradients,
) -> None:
    """Go through the parts from the last to the first, with the gradient to the state before each."""
    q, k, v = inputs
    grad_kv: Tensor | None = None
    cuts = parts(q, mixer.feature_dim)
    for number, part in reversed(list(enumerate(cuts))):
        leaves = [_leaf(x, part) for x in (q, k, v)]
        before = None
        if number:
            before = State(_leaf(states[2 * number - 2]), states[2 * number - 1])
        query, key, value = leaves
        out, after = causal_part(mixer, query, key, value, call.cut(part), before)
        results, grads = [out], [grad[:, :, part]]
        if grad_kv is not None:
            results, grads = [*results, after.kv], [*grads, grad_kv]
        found = total.take(results, grads, leaves if before is None else [*leaves, before.kv])
        for which in range(3):
            total.put(which, part, found[which])
        grad_kv = found[3] if before is not None else None
