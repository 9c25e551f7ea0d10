"""Backends, the ways to compute the call of a feature-map kernel: their interface.

To add one, write a file with a class that implements `Backend` and add an instance to `choose.BACKENDS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from linearize.attention.call import AttentionCall, MixerState

if TYPE_CHECKING:
    from linearize.attention.feature_map import FeatureMapMixer


class Backend(Protocol):
    """One way to compute the call of a feature-map kernel.

    Attributes:
        name: its name in `--explain-backend` and tests.
        uses_op: whether its causal calls go through one of `causal.CAUSAL_OPS`.
    """

    name: str
    uses_op: bool

    def why_not(self, mixer: FeatureMapMixer, call: AttentionCall) -> str:
        """Return why it declines a call; empty if it can compute it.

        This is called at every decoding step, so do the cheap checks first and return constant texts.
        """

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Return the output [B, H, T, V] in the dtype of the values, and the state after (None without `needs_state`).

        Called only after `why_not` returned an empty text.
        """
