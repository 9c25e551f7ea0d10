"""Chooses the backend for a call, in this one place.

To add a backend, write a file with a class that implements `Backend` and add an instance to `BACKENDS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from linearize.attention.backends.eager import Eager, OneStep, Windowed
from linearize.attention.backends.fused import Fused
from linearize.attention.backends.native import Native
from linearize.attention.backends.streamed import Streamed
from linearize.attention.call import AttentionCall, MixerState

if TYPE_CHECKING:
    from linearize.attention.feature_map import FeatureMapMixer


class Backend(Protocol):
    """One way to compute the call of a feature-map kernel.

    Attributes:
        name: its name in tests.
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


BACKENDS: tuple[Backend, ...] = (Native(), Fused(), OneStep(), Windowed(), Streamed(), Eager())
"""All backends; the first that accepts a call computes it. Every call is accepted by one of the last three."""


def choose(mixer: FeatureMapMixer, call: AttentionCall) -> Backend:
    """Return the backend that computes a call."""
    return next(backend for backend in BACKENDS if not backend.why_not(mixer, call))
