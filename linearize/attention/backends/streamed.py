"""PyTorch, a part of the tokens at a time: for long inputs.

Features are made part by part and used up while they are in the processor's cache: none of T rows is ever kept. The
backward makes them again, part by part, from q, k and v; a causal pass keeps the state before every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linearize.attention.backends.contract import CausalOp, MappingMixer
from linearize.attention.backends.eager import PYTORCH
from linearize.attention.call import AttentionCall, MixerState, linear_state
from linearize.ops import State, gather_keys, read_state
from linearize.ops.state import without_padding
from linearize.ops.tracing import is_tracing

RECOMPUTED = 8192
"""From this many tokens on, the backward makes features again: a quarter to three quarters slower, little memory."""

NUMBERS = {"cpu": 1 << 19}
"""Numbers in the features of one part: 2 MiB of fp32, about a core's cache."""

ELSEWHERE = 1 << 26
"""The same on devices that want large products."""

UNIT = 64
"""Parts are multiples of this many tokens, the causal op's chunk."""


class Streamed:
    """See `contract.Backend`."""

    def __init__(self, op: CausalOp) -> None:
        self.op, self.name = op, f"streamed, {op.name}"

    def supports(self, mixer: MappingMixer, call: AttentionCall) -> bool:
        """See `contract.Backend`: not where q and k meet before the map, nor while tracing."""
        if is_tracing():
            # First: asking for the number of tokens would make a number of it.
            return False
        tokens = call.q.shape[2]
        if tokens == 1 or mixer.window is not None or mixer.inputs is not None or mixer.floor > 0.0:
            return False
        if torch.is_grad_enabled() and (tokens < RECOMPUTED or call.state is not None or call.needs_state):
            return False
        if not mixer.shape.causal:
            return self.op is PYTORCH
        return self.op.supports(call.k, call.v, normalize=mixer.keys.normalize)

    def run(self, mixer: MappingMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """See `contract.Backend`."""
        if torch.is_grad_enabled():
            return _Streamed.apply(mixer, self.op, call, call.q, call.k, call.v, *mixer.parameters()), None
        out, state = stream(mixer, self.op, call)
        return out, state._asdict() if call.needs_state else None


def parts(q: Tensor, features: int) -> list[slice]:
    """Cut the tokens of q [B, H, T, D] into parts."""
    batch, heads, tokens, _ = q.shape
    most = NUMBERS.get(q.device.type, ELSEWHERE) // max(1, batch * heads * features)
    size = max(UNIT, most // UNIT * UNIT)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def stream(
    mixer: MappingMixer, op: CausalOp, call: AttentionCall, before: list[Tensor] | None = None
) -> tuple[Tensor, State]:
    """Attend without a gradient -> [B, H, T, V] and the state.

    A list given as `before` gets the two tensors of the state before every causal part that has one.
    """
    q, v, state = call.q, call.v, linear_state(call)
    # Tokens first in memory: that is how the host goes on with it.
    out = v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    cuts = parts(q, mixer.feature_dim)
    if mixer.shape.causal:
        for part in cuts:
            if before is not None and state is not None:
                before += state
            out[:, :, part], state = causal_part(mixer, op, call.part(part), state)
    else:
        for part in cuts:
            state = gather_part(mixer, call.part(part), state)
        assert state is not None
        for part in cuts:
            out[:, :, part] = read_part(mixer, call.part(part), state)
    assert state is not None
    return out, state


def causal_part(mixer: MappingMixer, op: CausalOp, call: AttentionCall, state: State | None) -> tuple[Tensor, State]:
    """Attend causally from a part of the tokens to those before and in it."""
    mask = call.key_padding_mask
    queries = mixer.query_features(without_padding(call.q, mask), call.scaling, call.positions)
    keys = mixer.key_features(without_padding(call.k, mask), call.scaling, call.positions)
    out, after = op.attend(
        queries.phi,
        keys.phi,
        call.v.float(),
        key_padding_mask=mask,
        log_scale=keys.log_scale,
        initial_state=state,
        normalize=mixer.keys.normalize,
        eps=mixer.eps,
    )
    return mixer.cast_output(out, call.v.dtype), after


def gather_part(mixer: MappingMixer, call: AttentionCall, state: State | None, shift: Tensor | None = None) -> State:
    """Add a part of the keys to a state."""
    keys = mixer.key_features(without_padding(call.k, call.key_padding_mask), call.scaling, call.positions)
    return gather_keys(
        keys.phi,
        call.v,
        key_padding_mask=call.key_padding_mask,
        log_scale=keys.log_scale,
        initial_state=state,
        normalize=mixer.keys.normalize,
        shift=shift,
    )


def read_part(mixer: MappingMixer, call: AttentionCall, state: State) -> Tensor:
    """Read the state with a part of the queries."""
    queries = mixer.query_features(without_padding(call.q, call.key_padding_mask), call.scaling, call.positions)
    out = read_state(queries.phi, state, normalize=mixer.keys.normalize, eps=mixer.eps)
    return mixer.cast_output(out, call.v.dtype)


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixer: MappingMixer,
        op: CausalOp,
        call: AttentionCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        before: list[Tensor] = []
        out, state = stream(mixer, op, call.with_inputs(q, k, v), before)
        states = before if mixer.shape.causal else state
        ctx.save_for_backward(q, k, v, *states)
        # No tensor of the inputs beside those: under checkpointing they are dropped and made again.
        none = q.new_empty(0)
        ctx.mixer, ctx.op, ctx.call = mixer, op.through_states, call.with_inputs(none, none, none)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *states = ctx.saved_tensors
        call = ctx.call.with_inputs(q, k, v)
        # Fetched now: a sharded model's parameters are other tensors than at the forward.
        total = _Gradients(ctx.mixer, (q, k, v), ctx.needs_input_grad[3:6])
        with torch.enable_grad(), torch.autocast(device_type=q.device.type, enabled=False):
            if ctx.mixer.shape.causal:
                _causal_backward(ctx.mixer, ctx.op, call, states, grad, total)
            else:
                _bidirectional_backward(ctx.mixer, call, states, grad, total)
        return None, None, None, *total.inputs, *total.parameters


class _Gradients:
    """Sums up the gradients of the parts."""

    def __init__(self, mixer: MappingMixer, inputs: Sequence[Tensor], needed: Sequence[bool]) -> None:
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
        """Store the gradient to a part of q (0), k (1) or v (2)."""
        whole = self.inputs[which]
        if whole is not None:
            whole[:, :, part] = grad


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _leaves(call: AttentionCall) -> AttentionCall:
    """Return the call of the same numbers, with gradients of their own."""
    return call.with_inputs(_leaf(call.q), _leaf(call.k), _leaf(call.v))


def _bidirectional_backward(
    mixer: MappingMixer, call: AttentionCall, states: Sequence[Tensor], grad: Tensor, total: _Gradients
) -> None:
    """Go through the queries for the state's gradient, then through the keys with it."""
    state = State(*states)
    grad_kv = torch.zeros_like(state.kv)
    cuts = parts(call.q, mixer.feature_dim)
    for part in cuts:
        piece, kv = _leaves(call.part(part)), _leaf(state.kv)
        out = read_part(mixer, piece, State(kv, state.log_scale))
        found = total.take([out], [grad[:, :, part]], [piece.q, kv])
        total.put(0, part, found[0])
        grad_kv += found[1]
    for part in cuts:
        piece = _leaves(call.part(part))
        added = gather_part(mixer, piece, None, state.log_scale)
        found = total.take([added.kv], [grad_kv], [piece.k, piece.v])
        total.put(1, part, found[0])
        total.put(2, part, found[1])


def _causal_backward(
    mixer: MappingMixer,
    op: CausalOp,
    call: AttentionCall,
    states: Sequence[Tensor],
    grad: Tensor,
    total: _Gradients,
) -> None:
    """Go through the parts from the last to the first, with the gradient to the state before each."""
    grad_kv: Tensor | None = None
    cuts = parts(call.q, mixer.feature_dim)
    for number, part in reversed(list(enumerate(cuts))):
        piece = _leaves(call.part(part))
        leaves, before = [piece.q, piece.k, piece.v], None
        if number:
            before = State(_leaf(states[2 * number - 2]), states[2 * number - 1])
            leaves.append(before.kv)
        out, after = causal_part(mixer, op, piece, before)
        results, grads = [out], [grad[:, :, part]]
        if grad_kv is not None:
            results, grads = [*results, after.kv], [*grads, grad_kv]
        found = total.take(results, grads, leaves)
        for which in range(3):
            total.put(which, part, found[which])
        grad_kv = found[3] if before is not None else None
