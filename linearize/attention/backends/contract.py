"""What a backend is, what it may ask of a mixer, and what an op on given features is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Unpack

import torch
from torch import Tensor, nn

from linearize.attention.call import AttentionCall, MixerState
from linearize.attention.scale import LogScale, Scales
from linearize.attention.shape import HeadShape
from linearize.kernels.base import FeatureMap, Features, Inputs, Output
from linearize.ops import LinearOptions, State, Window
from linearize.registry import Hybrid, KernelInfo


class MappingMixer(Protocol):
    """A mixer of a feature-map kernel, as backends see it.

    Attributes:
        info: the kernel's facts.
        shape: sizes and direction.
        inputs: what precedes the maps and knows queries from keys, or None.
        keys: the map of the keys.
        queries: the map of the queries; None where it is the keys' one.
        output: what follows the sums, or None.
        hybrid: what the layer has in addition to the kernel.
        key_scale: learned log-scales of the keys, or None.
        query_scale: those of the queries, or None.
        window: W of a softmax window, or None.
        floor: c of `linearize.ops.floored`, 0 for none.
        eps: smallest magnitude of a denominator.
        feature_dim: size F of the features.
        symmetric: whether queries are mapped as keys are, so that both can be mapped at once.
        memory: what a backend worked out for this mixer and wants to find again, by a name that begins with its own.
    """

    info: KernelInfo
    shape: HeadShape
    inputs: Inputs | None
    keys: FeatureMap
    queries: FeatureMap | None
    output: Output | None
    hybrid: Hybrid
    key_scale: LogScale | None
    query_scale: LogScale | None
    window: int | None
    floor: float
    eps: float
    feature_dim: int
    symmetric: bool
    memory: dict[str, object]

    def form(self, scaling: float) -> Window | None:
        """Return the form of the window as the ops take it; None without a window."""

    def input_scale(self, scaling: float) -> float:
        """Return what the map wants queries and keys multiplied with."""

    def features(self, call: AttentionCall, scales: Scales | None = None) -> tuple[Features, Features]:
        """Map queries and keys -> the features of both, [B, H, T, F] and [B, K, T, F].

        `scales` is what `log_scales` gives, if it is known.
        """

    def log_scales(self, call: AttentionCall) -> Scales:
        """Return the learned log-scales of queries and keys."""

    def key_features(self, k: Tensor, scaling: float, positions: Tensor | None) -> Features:
        """Map keys [B, K, T, D]."""

    def query_features(self, q: Tensor, scaling: float, positions: Tensor | None) -> Features:
        """Map queries [B, H, T, D]."""

    def cast_output(self, mixed: Tensor, dtype: torch.dtype) -> Tensor:
        """Do what follows the sums [B, H, T, V] in fp32, and cast the output to the host's dtype."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what is learned."""


class Backend(Protocol):
    """One way to carry out a call.

    Attributes:
        name: for reports and tests.
    """

    name: str

    def supports(self, mixer: MappingMixer, call: AttentionCall) -> bool:
        """Tell whether it can, in a few quick checks: it is asked at every decoding step."""

    def run(self, mixer: MappingMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Attend -> [B, H, T, V] in the dtype of the values, and the state after, None where `needs_state` is not set.

        It may be asked only what it supports.
        """


class CausalOp(Protocol):
    """Causal attention on given features, as the backends that map in PyTorch use it.

    Attributes:
        name: for reports and tests.
        through_states: the op to take where the gradient goes through states.
    """

    name: str

    @property
    def through_states(self) -> CausalOp:
        """Return the op to take where a gradient goes through states: usually itself."""

    def supports(self, x: Tensor, v: Tensor, *, normalize: bool) -> bool:
        """Tell whether it takes tensors such as x and v, and divides as `normalize` says."""

    def attend(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> tuple[Tensor, State]:
        """Attend as `linearize.ops.causal_attention` does."""

    def output(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        """Attend where the state after is not asked for."""
