"""One call of an attention: what a mixer is asked, whichever backend answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linearize.ops import State
from linearize.ops.tracing import is_tracing

MixerState = dict[str, Tensor]
"""What a mixer remembers between decoding steps: named tensors, batch first, of a size that does not grow."""


# Not frozen, though nobody changes one: a frozen one takes three times as long to make, at every decoding step.
@dataclass(slots=True, eq=False)
class AttentionCall:
    """Queries, keys and values, and what the host says about them. Decoding is a call of one token with a state.

    Attributes:
        q: queries [B, H, T, D].
        k: keys of the same tokens [B, K, T, D], K divides H.
        v: values of the same tokens [B, K, T, V].
        scaling: what the host multiplies scores with.
        key_padding_mask: [B, T], true where there is a token; None: everywhere.
        positions: [B, T], counted from 0 without padding, where the kernel is positional; the mixer counts them.
        state: what was seen before these tokens (causal only). It is given away: decoding without a gradient writes
            the state after into the same memory.
        needs_state: whether the state after these tokens is asked for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    key_padding_mask: Tensor | None = None
    positions: Tensor | None = None
    state: MixerState | None = None
    needs_state: bool = False

    @property
    def one_step(self) -> bool:
        """Whether this is a decoding step that may write into the state's memory."""
        return self.state is not None and self.k.size(2) == 1 and not torch.is_grad_enabled() and not is_tracing()

    def part(self, tokens: slice) -> AttentionCall:
        """Return the same for some of the tokens, without a state."""
        mask, positions = self.key_padding_mask, self.positions
        return AttentionCall(
            self.q[:, :, tokens],
            self.k[:, :, tokens],
            self.v[:, :, tokens],
            self.scaling,
            None if mask is None else mask[:, tokens],
            None if positions is None else positions[:, tokens],
        )

    def with_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        """Return the same call of other queries, keys and values."""
        return replace(self, q=q, k=k, v=v)


def linear_state(call: AttentionCall) -> State | None:
    """Return the state of a linear attention that a call comes with."""
    return None if call.state is None else State(call.state["kv"], call.state["log_scale"])
