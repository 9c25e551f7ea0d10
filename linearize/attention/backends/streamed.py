"""PyTorch backend for long inputs: one part of the tokens at a time.

The features of a part are used while they are in the processor's cache; the features of all T tokens never exist at
once. The backward pass recomputes them, part by part, from q, k and v and the state before the part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linearize.attention.backends.causal import causal_op
from linearize.attention.backends.eager import NO_FLOOR
from linearize.attention.call import AttentionCall, Kind, MixerState
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.parts import SCALED
from linearize.ops import LinearOptions, State, gather_keys, read_state
from linearize.ops.state import without_padding

RECOMPUTED = 8192
"""From this many tokens on, the backward pass recomputes features: 25 to 75 % slower, but with little memory."""

NUMBERS = {"cpu": 1 << 19}
"""Number of feature values in one part, by device: 2 MiB of fp32, about a core's cache."""

ELSEWHERE = 1 << 26
"""The same on all other devices, which need large products."""

UNIT = 64
"""Part lengths are multiples of this many tokens, the chunk of the causal op."""


def is_recomputed(tokens: int) -> bool:
    """Tell whether the backward pass recomputes the features of this many tokens."""
    return tokens >= RECOMPUTED


class Streamed:
    """The backend that processes one part of the tokens after the other."""

    name, uses_op, supports = "streamed", True, SCALED

    def why_not(self, mixer: FeatureMapMixer, kind: Kind) -> str:
        """Return why it declines such calls; empty if it can compute them."""
        if kind.tracing:
            return "a graph is being traced"
        if kind.tokens == 1:
            return "one token cannot be split into parts"
        if mixer.inputs is not None:
            return "the kernel processes queries and keys jointly before the map"
        if mixer.floor > 0.0:
            return NO_FLOOR
        if kind.gradient and not kind.long:
            return "gradients of short inputs are faster without mapping twice"
        return ""

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Return the output [B, H, T, V] and the state after, computed part by part."""
        if mixer.counts:
            # The parts of a row do not start at its first place.
            call = replace(call, positions=call.places)
        state, outputs, cut = call.linear_state, [], parts(call, mixer.feature_dim)
        op = causal_op(call.native, normalize=mixer.divides)

        if mixer.shape.causal:

            @_recomputed
            def attend(part: AttentionCall, state: State | None) -> tuple[Tensor, ...]:
                """Attend causally from a part of the tokens to those up to it; also return the state after them."""
                queries, keys = mixer.features(part)
                options: LinearOptions = {**mixer.options(part, keys.log_scale), "initial_state": state}
                out, after = op(queries.phi, keys.phi, part.v.float(), **options)
                return mixer.cast_output(out, part.v.dtype), *after

            for part in cut:
                out, *after = attend(part, state)
                state = State(*after)
                outputs.append(out)
        else:

            @_recomputed
            def gather(part: AttentionCall, state: State | None) -> State:
                """Add a part of the keys to a state."""
                k = without_padding(part.k, part.key_padding_mask)
                keys = mixer.map_tokens(k, part.scaling, part.positions, native=part.native)
                options: LinearOptions = {**mixer.options(part, keys.log_scale), "initial_state": state}
                return gather_keys(keys.phi, part.v, **options)

            @_recomputed
            def read(part: AttentionCall, state: State | None) -> Tensor:
                """Read the state with a part of the queries."""
                assert state is not None
                q = without_padding(part.q, part.key_padding_mask)
                queries = mixer.map_tokens(q, part.scaling, part.positions, queries=True, native=part.native)
                out = read_state(queries.phi, state, normalize=mixer.keys.normalize, eps=mixer.eps)
                return mixer.cast_output(out, part.v.dtype)

            for part in cut:
                state = gather(part, state)
            outputs = [read(part, state) for part in cut]
        # Put tokens first in memory, because that is how the host reads the output next.
        whole = torch.cat([out.transpose(1, 2) for out in outputs], dim=1).transpose(1, 2)
        return whole, state._asdict() if call.needs_state and state is not None else None


def parts(call: AttentionCall, features: int) -> list[AttentionCall]:
    """Cut the tokens of a call into parts."""
    batch, heads, tokens, _ = call.q.shape
    most = NUMBERS.get(call.q.device.type, ELSEWHERE) // max(1, batch * heads * features)
    size = max(UNIT, most // UNIT * UNIT)
    if tokens <= size:
        return [call]
    inputs = (x.split(size, dim=2) for x in (call.q, call.k, call.v))
    none = [None] * -(-tokens // size)
    more = (none if x is None else x.split(size, dim=1) for x in (call.key_padding_mask, call.positions))
    cuts = zip(*inputs, *more, strict=True)
    one = functools.partial(AttentionCall, native=call.native)
    return [one(q, k, v, call.scaling, mask, positions) for q, k, v, mask, positions in cuts]


Result = TypeVar("Result")
OfPart = Callable[[AttentionCall, State | None], Result]
"""Called with a part of the tokens and the state before it."""


def _recomputed(function: OfPart[Result]) -> OfPart[Result]:
    """Return a function that keeps only its inputs for the backward pass, which calls it again."""
    if not torch.is_grad_enabled():
        return function

    def keep_inputs(call: AttentionCall, state: State | None) -> Result:
        scaling, native = call.scaling, call.native

        def again(
            q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, positions: Tensor | None, *before: Tensor
        ) -> Result:
            part = AttentionCall(q, k, v, scaling, mask, positions, native=native)
            return function(part, State(*before) if before else None)

        # As tensors, so that they are dropped and recomputed too if the whole layer is checkpointed.
        tensors = (call.q, call.k, call.v, call.key_padding_mask, call.positions, *(state or ()))
        return checkpoint(again, *tensors, use_reentrant=False, preserve_rng_state=False)

    return keep_inputs
