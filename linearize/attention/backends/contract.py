"""The interface of a backend, and of a causal op on given features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Unpack

from torch import Tensor

from linearize.attention.call import AttentionCall, MixerState
from linearize.ops import LinearOptions, State, causal_attention

if TYPE_CHECKING:
    from linearize.attention.feature_map import FeatureMapMixer


class Backend(Protocol):
    """One way to carry out the call of a feature-map kernel.

    Attributes:
        name: for `--explain-backend` and tests.
    """

    name: str

    def why_not(self, mixer: FeatureMapMixer, call: AttentionCall) -> str:
        """Say why it declines a call; empty if it can carry it out.

        It is asked at every decoding step: check what is cheap first, and return constant texts.
        """

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Attend -> [B, H, T, V] in the dtype of the values, and the state after; None unless `call.needs_state`.

        It is called only after `why_not` returned an empty text.
        """


class CausalOp:
    """A causal op on given features; this one is `linearize.ops.causal_attention`, which takes every call.

    Attributes:
        name: for `--explain-backend` and tests.
    """

    name = "pytorch"

    def why_not(self, x: Tensor, v: Tensor, *, normalize: bool) -> str:
        """Say why it declines tensors such as x and v, or rows divided as `normalize` says; empty if it takes them."""
        return ""

    def attend(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> tuple[Tensor, State]:
        """Attend as `linearize.ops.causal_attention` does."""
        return causal_attention(phi_q, phi_k, v, **options)

    def output(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        """Attend when the state after is not needed."""
        return self.attend(phi_q, phi_k, v, **options)[0]

    @property
    def through_states(self) -> CausalOp:
        """The op to use when a gradient passes through states: usually this one."""
        return self


PYTORCH = CausalOp()
