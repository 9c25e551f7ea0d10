"""The base classes of kernels: a module that maps the queries or keys of all heads at once, or attention inside blocks.

A kernel file holds a frozen config dataclass, a `FeatureMap` (or `BlockKernel`) and one `register_kernel` call.
The rest (grouped heads, padding, causality, windows, states, caches, saving) is handled outside the kernel.
"""

from __future__ import annotations

import abc
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linearize.core.registry import option


class Features(NamedTuple):
    """The features of one set of tokens.

    Attributes:
        phi: [B, H, T, F] fp32.
        log_scale: [B, H, T] fp32 or None; the features are `exp(log_scale) * phi`. For queries it matters only with a
            softmax window: otherwise a positive factor of a query cancels between numerator and denominator.
    """

    phi: Tensor
    log_scale: Tensor | None = None


MAP_WEIGHTS = ("first", "second", "bias", "tau", "bank", "magnitude")
"""The tensors of a `MapSpec`."""
weights_of = operator.attrgetter(*MAP_WEIGHTS)
"""Return these tensors of a `MapSpec`."""


class MapSpec(NamedTuple):
    """A feature map, described for a compiled op. The weights are those of `FeatureMap`, heads first.

    Attributes:
        kind: name of a map in `linearize.attention.native.structures.KINDS`.
        first: [H, n, D], the first projection.
        second: [H, n, D], the second projection, or None.
        bias: [H, n] or None.
        tau: [H], for a log-scale of exp(-tau) |x|^2, or None.
        bank: [H, L, 3 hidden + 1] scalar functions relu(c + sum_j v_j relu(s_j u + t_j)), as [s, t, v, c], or None.
            It may be computed from the kernel's parameters; then keys must not have a log-scale.
        magnitude: [H, D], for features multiplied by exp(4 tanh(magnitude . x / 4)), or None.
        amplitude: factor of the features; for "relu" 1, or 0 for features that are zero whatever the input is.
        scaled: whether keys have a log-scale.
    """

    kind: str
    first: Tensor
    second: Tensor | None = None
    bias: Tensor | None = None
    tau: Tensor | None = None
    bank: Tensor | None = None
    magnitude: Tensor | None = None
    amplitude: float = 1.0
    scaled: bool = False


class Output(nn.Module, abc.ABC):
    """A module after the weighted sum of the values, such as a norm or a learned scale."""

    @abc.abstractmethod
    def reset_parameters(self) -> None:
        """Fill the parameters; called without gradients."""

    @abc.abstractmethod
    def forward(self, mixed: Tensor) -> Tensor:
        """Transform the sums [B, H, T, V] in fp32."""


class Inputs(nn.Module, abc.ABC):
    """A module before the map that treats queries and keys differently.

    Attributes:
        noted: where a module with running statistics puts the sums of a training batch, in fp64 on the CPU, while a
            trainer computes one step from several batches. If None, it learns from each batch at once.
    """

    noted: list[Tensor] | None = None

    def learn(self, sums: Tensor) -> None:
        """Learn from the sums of all batches of a step; a module without running statistics has none."""

    @abc.abstractmethod
    def reset_parameters(self) -> None:
        """Fill parameters and buffers; called without gradients."""

    @abc.abstractmethod
    def forward(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Transform q [B, H, T, D] and k [B, K, T, D] of the same tokens in fp32, token by token; mask [B, T]."""

    @abc.abstractmethod
    def keys(self, k: Tensor) -> Tensor:
        """Transform keys [B, K, T, D] that `forward` has already learned from."""


class Kernel:
    """Modules that a kernel may add before and after the attention."""

    @classmethod
    def inputs(cls, config: Any, heads: int, key_heads: int, head_dim: int) -> Inputs | None:
        """Return the module before the map, or None."""
        return None

    @classmethod
    def output(cls, config: Any, heads: int, value_dim: int) -> Output | None:
        """Return the module after the attention, or None."""
        return None


class BlockKernel(Kernel):
    """Attention inside blocks of `config.block` tokens, without features. The class is never instantiated.

    Attributes:
        softmax: softmax of the scores; otherwise their ReLU.
    """

    softmax = True


class FeatureMap(nn.Module, Kernel, abc.ABC):
    """A map with separate parameters for each head (leading axis of every parameter and buffer; 1 if shared).

    Attributes:
        scale_inputs: whether inputs are first multiplied by the square root of the original attention's score scaling,
            so that `x . y` is the softmax score. Maps whose definition contains sqrt(d) need that.
        normalize: whether weights are divided by their sum.
        floor: c of `linearize.ops.floored`, which keeps the denominators of signed weights away from zero; 0: no floor.
    """

    scale_inputs = True
    normalize = True
    floor = 0.0

    def __init__(self, config: Any, heads: int, head_dim: int) -> None:
        super().__init__()
        self.config, self.heads, self.head_dim = config, heads, head_dim

    def add_parameter(self, *shape: int) -> nn.Parameter:
        """Return an uninitialised learnable tensor [H, *shape] in fp32."""
        return nn.Parameter(torch.empty(self.heads, *shape, dtype=torch.float32))

    def add_buffer(self, name: str, *shape: int) -> None:
        """Add a buffer [H, *shape] in fp32 for random numbers, which are drawn only in `reset_parameters` and saved."""
        self.register_buffer(name, torch.empty(self.heads, *shape, dtype=torch.float32))

    @abc.abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill parameters and random buffers; called without gradients.

        Draw only from `generator` (on the CPU): one seed gives one kernel.
        """

    @abc.abstractmethod
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys.

        Args:
            x: [B, H, T, D] fp32.
            positions: [B, T], counted from 0 without padding, for positional kernels; otherwise None.
        """

    def forward_queries(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries [B, H, T, D] -> [B, H, T, F]; calls `forward` by default."""
        return self.forward(x, positions)

    def forward_keys(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map keys [B, K, T, D] -> [B, K, T, F]; calls `forward` by default."""
        return self.forward(x, positions)

    @property
    def symmetric(self) -> bool:
        """Whether queries and keys have the same map."""
        own = type(self)
        return own.forward_queries is FeatureMap.forward_queries and own.forward_keys is FeatureMap.forward_keys

    def map_spec(self) -> MapSpec | None:
        """Describe the map for the native op, or return None if the op lacks it; depends only on the config."""
        return None


class FixedMap(FeatureMap):
    """Base of maps without parameters."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Do nothing."""


def floor_option(default: float) -> Any:
    """Declare the argument `floor` of a map with signed weights."""
    return option(
        default, "c: denominators are at least c |phi(q)| . sum |phi(k)|, if weights can be negative", low=0.0, high=1.0
    )


@dataclass(frozen=True)
class NoArguments:
    """The config of kernels without arguments."""


def draw_normal(parameter: Tensor, generator: torch.Generator, std: float = 1.0) -> None:
    """Fill `parameter`, on any device, with normal numbers drawn on the CPU."""
    with torch.no_grad():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def draw_uniform(parameter: Tensor, generator: torch.Generator, bound: float) -> None:
    """Fill `parameter`, on any device, with uniform numbers between -bound and bound drawn on the CPU."""
    with torch.no_grad():
        parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)


def orthonormal(heads: int, rows: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw unit vectors [heads, rows, size] in fp64, each orthogonal to the others in its block of `size` rows."""
    blocks = -(-rows // size)
    square = torch.randn(heads, blocks, size, size, generator=generator, dtype=torch.float64)
    basis, upper = torch.linalg.qr(square)
    # Without the signs of the diagonal the basis would not be uniformly distributed.
    basis = basis * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return basis.transpose(-1, -2).reshape(heads, blocks * size, size)[:, :rows]


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Apply per-head weights [H, F, D] to x [B, H, T, D] -> [B, H, T, F]."""
    return x @ weight.float().transpose(-1, -2)
