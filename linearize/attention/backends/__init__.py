"""Ways to carry out the call of a feature-map kernel: their interface.

To add one, write a file with a class as `Backend` describes it and put an instance into `choose.BACKENDS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from linearize.attention.call import AttentionCall, MixerState

if TYPE_CHECKING:
    from linearize.attention.feature_map import FeatureMapMixer


class Backend(Protocol):
    """One way to carry out the call of a feature-map kernel.

    Attributes:
        name: for `--explain-backend` and tests.
        uses_op: whether its causal calls go through one of `causal.CAUSAL_OPS`.
    """

    name: str
    uses_op: bool

    def why_not(self, mixer: FeatureMapMixer, call: AttentionCall) -> str:
        """Say why it declines a call; empty if it can carry it out.

        It is asked at every decoding step: check what is cheap first, and return constant texts.
        """

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Attend -> [B, H, T, V] in the dtype of the values, and the state after; None unless `call.needs_state`.

        It is called only after `why_not` returned an empty text.
        """
