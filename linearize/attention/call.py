"""One attention call: the inputs of a mixer, whichever backend computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linearize.ops import State
from linearize.ops.state import without_padding

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
        native: the native op for what a backend in PyTorch calls; None if it is absent or off. `choose` sets it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    key_padding_mask: Tensor | None = None
    positions: Tensor | None = None
    state: MixerState | None = None
    needs_state: bool = False
    native: Any = None

    @property
    def places(self) -> Tensor:
        """The places of the tokens [B, T], counted from 0 without padding, over all calls of one state."""
        if self.positions is None:
            seen = None if self.state is None else self.state["seen"]
            self.positions = (running_count(self.k, self.key_padding_mask, seen) - 1).clamp(min=0)
        return self.positions

    @property
    def one_step(self) -> bool:
        """Whether this is a decoding step that may update the state in place, while nothing is being traced."""
        if self.state is None or self.k.size(2) != 1 or torch.is_grad_enabled():
            return False
        # A state from `torch.inference_mode()` may only be overwritten in that mode.
        return torch.is_inference_mode_enabled() or not next(iter(self.state.values())).is_inference()

    @property
    def linear_state(self) -> State | None:
        """The state of the linear attention before these tokens, or None."""
        return None if self.state is None else State(self.state["kv"], self.state["log_scale"])

    def without_padding(self) -> tuple[Tensor, Tensor]:
        """Return queries [B, H, T, D] and keys [B, K, T, D] with zeros at padding."""
        if self.key_padding_mask is None:
            return self.q, self.k
        return without_padding(self.q, self.key_padding_mask), without_padding(self.k, self.key_padding_mask)

    def part(self, tokens: slice) -> AttentionCall:
        """Return the call for some of the tokens, without a state."""
        q, k, v = (x[:, :, tokens] for x in (self.q, self.k, self.v))
        mask, positions = (None if x is None else x[:, tokens] for x in (self.key_padding_mask, self.positions))
        return AttentionCall(q, k, v, self.scaling, mask, positions, native=self.native)


class Kind(NamedTuple):
    """All that the choice of a layer's backend depends on. It is made once for each kind of call, then remembered.

    Attributes:
        tracing: whether a graph is traced; all else is then left at its default.
        device: the device of the inputs.
        types: the dtypes of queries, keys and values.
        plain: whether these are plain tensors.
        rows: whether there are any rows.
        tokens: 0, 1, or 2 for any number of tokens above 1.
        long: whether there are so many that features are computed again for the gradient.
        gradient: whether gradients are recorded.
        one_step: `AttentionCall.one_step`.
        has_state: whether there is a state before the tokens.
        needs_state: whether the state after them is needed.
        native: the native op; None if it is absent, switched off or not for this device.
        reads: whether it reads these tensors.
        writes: whether a step may write into the state.
        uneven: whether the rows of a step fade differently. Only known if there is a native op.
        offloaded: `FeatureMapMixer.is_offloaded`.
        switches: what the Triton kernels are switched by; empty on other devices.
    """

    tracing: bool
    device: torch.device | None = None
    types: tuple[torch.dtype, ...] = ()
    plain: bool = False
    rows: bool = True
    tokens: int = 2
    long: bool = False
    gradient: bool = False
    one_step: bool = False
    has_state: bool = False
    needs_state: bool = False
    native: Any = None
    reads: bool = False
    writes: bool = False
    uneven: bool = False
    offloaded: bool = False
    switches: tuple[str | None, ...] = ()


def running_count(k: Tensor, mask: Tensor | None, seen: Tensor | None) -> Tensor:
    """Return the running count [B, T] of tokens without padding, starting after `seen` [B] earlier tokens."""
    real = torch.ones(k.shape[0], k.shape[2], device=k.device) if mask is None else mask.float()
    counted = real if k.shape[2] == 1 else real.cumsum(dim=-1)
    return counted if seen is None else seen[:, None] + counted
