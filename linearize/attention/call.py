"""One attention call: the inputs of a mixer, whichever backend computes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.ops import State
from linearize.ops.state import is_tracing, without_padding

MixerState = dict[str, Tensor]
"""The state of a mixer between decoding steps: named tensors of constant size, batch first."""


# Not frozen, because creating a frozen instance takes three times as long, at every decoding step. Treat it as frozen.
@dataclass(slots=True, eq=False)
class AttentionCall:
    """Queries, keys and values, with their scaling, mask and state. Decoding is a call of one token with a state.

    The queries, keys and values are always those of the same T tokens, so `places` and the mask hold for all three.

    Attributes:
        q: queries [B, H, T, D].
        k: keys [B, K, T, D], K divides H.
        v: values [B, K, T, V].
        scaling: the host's scaling factor of the scores.
        key_padding_mask: [B, T], true at tokens; None if there is no padding.
        positions: what `places` returns; None until it is read for the first time.
        state: the state before these tokens (causal only). Decoding without a gradient overwrites it.
        needs_state: whether the caller needs the state after these tokens.
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
    def places(self) -> Tensor:
        """The places of the tokens [B, T], counted from 0 without padding, over all calls of one state."""
        if self.positions is None:
            seen = None if self.state is None else self.state["seen"]
            self.positions = (running_count(self.k, self.key_padding_mask, seen) - 1).clamp(min=0)
        return self.positions

    @property
    def one_step(self) -> bool:
        """Whether this is a decoding step that may update the state in place."""
        if self.state is None or self.k.size(2) != 1 or torch.is_grad_enabled() or is_tracing():
            return False
        # A state from `torch.inference_mode()` may only be overwritten in that mode.
        return torch.is_inference_mode_enabled() or not next(iter(self.state.values())).is_inference()

    @property
    def linear_state(self) -> State | None:
        """The state of the linear attention before these tokens, or None."""
        return None if self.state is None else State(self.state["kv"], self.state["log_scale"])

    def without_padding(self) -> tuple[Tensor, Tensor]:
        """Return queries [B, H, T, D] and keys [B, K, T, D] with zeros at padding."""
        return without_padding(self.q, self.key_padding_mask), without_padding(self.k, self.key_padding_mask)

    def part(self, tokens: slice) -> AttentionCall:
        """Return the call for some of the tokens, without a state."""
        q, k, v = (x[:, :, tokens] for x in (self.q, self.k, self.v))
        mask, positions = (None if x is None else x[:, tokens] for x in (self.key_padding_mask, self.positions))
        return AttentionCall(q, k, v, self.scaling, mask, positions)


def running_count(k: Tensor, mask: Tensor | None, seen: Tensor | None) -> Tensor:
    """Return the running count [B, T] of tokens without padding, starting after `seen` [B] earlier tokens."""
    real = torch.ones(k.shape[0], k.shape[2], device=k.device) if mask is None else mask.float()
    counted = real if k.shape[2] == 1 else real.cumsum(dim=-1)
    return counted if seen is None else seen[:, None] + counted
