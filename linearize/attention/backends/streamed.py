"""PyTorch backend for long inputs: one part of the tokens at a time.

The features of a part are used while they are in the processor's cache; the features of all T tokens never exist at
once. The backward pass recomputes them, part by part, from q, k and v; a causal pass keeps the state before every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linearize.attention.backends.causal import CausalOp, causal_op
from linearize.attention.backends.eager import NO_FLOOR, NO_WINDOW
from linearize.attention.call import AttentionCall, MixerState
from linearize.ops import LinearOptions, State, gather_keys, read_state
from linearize.ops.state import is_tracing, without_padding

if TYPE_CHECKING:
    from linearize.attention.feature_map import FeatureMapMixer

RECOMPUTED = 8192
"""From this many tokens on, the backward pass recomputes features: 25 to 75 % slower, but with little memory."""

NUMBERS = {"cpu": 1 << 19}
"""Number of feature values in one part, by device: 2 MiB of fp32, about a core's cache."""

ELSEWHERE = 1 << 26
"""The same on all other devices, which need large products."""

UNIT = 64
"""Part lengths are multiples of this many tokens, the chunk of the causal op."""


class Streamed:
    """The backend that processes one part of the tokens after the other."""

    name, uses_op = "streamed", True

    def why_not(self, mixer: FeatureMapMixer, call: AttentionCall) -> str:
        if is_tracing():
            # Check this first: reading the number of tokens would make it a constant of the graph.
            return "a graph is being traced"
        tokens = call.q.shape[2]
        if tokens == 1:
            return "one token cannot be split into parts"
        if mixer.window is not None:
            return NO_WINDOW
        if mixer.inputs is not None:
            return "the kernel processes queries and keys jointly before the map"
        if mixer.floor > 0.0:
            return NO_FLOOR
        if torch.is_grad_enabled():
            if tokens < RECOMPUTED:
                return "gradients of short inputs are faster without mapping twice"
            if call.state is not None or call.needs_state:
                return "its gradient does not pass through states"
        return ""

    def run(
        self, mixer: FeatureMapMixer, call: AttentionCall, before: list[Tensor] | None = None
    ) -> tuple[Tensor, MixerState | None]:
        """Attend as `Backend.run` does; for each causal part, append the state's two tensors to `before`, if given."""
        if torch.is_grad_enabled():
            return _Streamed.apply(mixer, call, call.q, call.k, call.v, *mixer.parameters()), None
        q, v, state = call.q, call.v, call.linear_state
        # Put tokens first in memory, because that is how the host reads the output next.
        out = v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
        cuts = parts(q, mixer.feature_dim)
        if mixer.shape.causal:
            op = causal_op(call.k, call.v, normalize=mixer.divides)
            for part in cuts:
                if before is not None and state is not None:
                    before += state
                out[:, :, part], state = _causal_part(mixer, op, call.part(part), state)
        else:
            for part in cuts:
                state = _gather_part(mixer, call.part(part), state)
            assert state is not None
            for part in cuts:
                out[:, :, part] = _read_part(mixer, call.part(part), state)
        return out, state._asdict() if call.needs_state and state is not None else None


def parts(q: Tensor, features: int) -> list[slice]:
    """Cut the tokens of q [B, H, T, D] into parts."""
    batch, heads, tokens, _ = q.shape
    most = NUMBERS.get(q.device.type, ELSEWHERE) // max(1, batch * heads * features)
    size = max(UNIT, most // UNIT * UNIT)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _causal_part(
    mixer: FeatureMapMixer, op: CausalOp, call: AttentionCall, state: State | None
) -> tuple[Tensor, State]:
    """Attend causally from a part of the tokens to those before and in it."""
    queries, keys = mixer.features(call)
    options: LinearOptions = {**mixer.options(call, keys.log_scale), "initial_state": state}
    out, after = op.attend(queries.phi, keys.phi, call.v.float(), **options)
    return mixer.cast_output(out, call.v.dtype), after


def _gather_part(
    mixer: FeatureMapMixer, call: AttentionCall, state: State | None, shift: Tensor | None = None
) -> State:
    """Add a part of the keys to a state."""
    keys = mixer.map_tokens(without_padding(call.k, call.key_padding_mask), call.scaling, call.positions)
    options: LinearOptions = {**mixer.options(call, keys.log_scale), "initial_state": state}
    return gather_keys(keys.phi, call.v, shift=shift, **options)


def _read_part(mixer: FeatureMapMixer, call: AttentionCall, state: State) -> Tensor:
    """Read the state with a part of the queries."""
    q = without_padding(call.q, call.key_padding_mask)
    queries = mixer.map_tokens(q, call.scaling, call.positions, queries=True)
    out = read_state(queries.phi, state, normalize=mixer.keys.normalize, eps=mixer.eps)
    return mixer.cast_output(out, call.v.dtype)


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixer: FeatureMapMixer, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor
    ) -> Tensor:
        before: list[Tensor] = []
        whole = replace(call, q=q, k=k, v=v, needs_state=not mixer.shape.causal)
        out, state = Streamed().run(mixer, whole, before)
        ctx.save_for_backward(q, k, v, *(before if state is None else state.values()))
        # Keep no other references to the inputs: under checkpointing they are dropped and recomputed.
        none = q.new_empty(0)
        ctx.mixer, ctx.call = mixer, replace(call, q=none, k=none, v=none)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *states = ctx.saved_tensors
        call = replace(ctx.call, q=q, k=k, v=v)
        # Read the parameters here: in a sharded model they are different tensors from those in the forward pass.
        total = _Gradients(ctx.mixer, (q, k, v), ctx.needs_input_grad[2:5])
        with torch.enable_grad(), torch.autocast(device_type=q.device.type, enabled=False):
            backward = _causal_backward if ctx.mixer.shape.causal else _bidirectional_backward
            backward(ctx.mixer, call, states, grad, total)
        return None, None, *total.inputs, *total.parameters


class _Gradients:
    """Sums up the gradients of the parts."""

    def __init__(self, mixer: FeatureMapMixer, inputs: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self.inputs = [torch.empty_like(x) if wanted else None for x, wanted in zip(inputs, needed, strict=True)]
        self.learned = list(mixer.parameters())
        self.parameters: list[Tensor | None] = [None] * len(self.learned)
        self.asked = [i for i, parameter in enumerate(self.learned) if parameter.requires_grad]

    def take(self, results: Sequence[Tensor], grads: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        """Differentiate a part; add up the parameters' gradients and return those of `leaves` (zeros if unused)."""
        wanted = [*leaves, *(self.learned[i] for i in self.asked)]
        pairs = [(x, g) for x, g in zip(results, grads, strict=True) if x.requires_grad]
        all_grads = torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        for i, new in zip(self.asked, all_grads[len(leaves) :], strict=True):
            if new is not None:
                old = self.parameters[i]
                self.parameters[i] = new if old is None else old.add_(new)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, all_grads, strict=False)]

    def put(self, which: int, part: slice, grad: Tensor) -> None:
        """Store the gradient of a part of q (0), k (1) or v (2)."""
        whole = self.inputs[which]
        if whole is not None:
            whole[:, :, part] = grad


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _leaves(call: AttentionCall, part: slice) -> AttentionCall:
    """Return a part of a call whose q, k and v are leaves of a new graph."""
    piece = call.part(part)
    return replace(piece, q=_leaf(piece.q), k=_leaf(piece.k), v=_leaf(piece.v))


def _bidirectional_backward(
    mixer: FeatureMapMixer, call: AttentionCall, states: Sequence[Tensor], grad: Tensor, total: _Gradients
) -> None:
    """Go through the queries to compute the state's gradient, then use it to go through the keys."""
    state = State(*states)
    grad_kv = torch.zeros_like(state.kv)
    cuts = parts(call.q, mixer.feature_dim)
    for part in cuts:
        piece, kv = _leaves(call, part), _leaf(state.kv)
        out = _read_part(mixer, piece, State(kv, state.log_scale))
        grads = total.take([out], [grad[:, :, part]], [piece.q, kv])
        total.put(0, part, grads[0])
        grad_kv += grads[1]
    for part in cuts:
        piece = _leaves(call, part)
        added = _gather_part(mixer, piece, None, state.log_scale)
        grads = total.take([added.kv], [grad_kv], [piece.k, piece.v])
        total.put(1, part, grads[0])
        total.put(2, part, grads[1])


def _causal_backward(
    mixer: FeatureMapMixer, call: AttentionCall, states: Sequence[Tensor], grad: Tensor, total: _Gradients
) -> None:
    """Go through the parts from the last to the first, carrying the gradient of the state before each part."""
    grad_kv: Tensor | None = None
    cuts, op = parts(call.q, mixer.feature_dim), causal_op(call.k, call.v, normalize=mixer.divides)
    for number, part in reversed(list(enumerate(cuts))):
        piece = _leaves(call, part)
        leaves, before = [piece.q, piece.k, piece.v], None
        if number:
            before = State(_leaf(states[2 * number - 2]), states[2 * number - 1])
            leaves.append(before.kv)
        out, after = _causal_part(mixer, op, piece, before)
        results, grads = [out], [grad[:, :, part]]
        if grad_kv is not None:
            results, grads = [*results, after.kv], [*grads, grad_kv]
        input_grads = total.take(results, grads, leaves)
        for which in range(3):
            total.put(which, part, input_grads[which])
        grad_kv = input_grads[3] if before is not None else None
