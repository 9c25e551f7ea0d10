"""What a kernel is: a module that maps the queries or keys of all heads at once, or attention inside blocks.

A kernel file holds a frozen config dataclass, a `FeatureMap` (or `BlockKernel`) and one `register_kernel` call.
Everything else (grouped heads, padding, causality, windows, states, caches, saving) is done around it.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linearize.registry import option


class Features(NamedTuple):
    """What a map gives for one set of tokens.

    Attributes:
        phi: [B, H, T, F] fp32.
        log_scale: [B, H, T] fp32 or None; the features are `exp(log_scale) * phi`. A query's is read only where a
            softmax window is joined to the kernel: otherwise a positive factor of a query cancels between numerator
            and denominator.
    """

    phi: Tensor
    log_scale: Tensor | None = None


MAP_WEIGHTS = ("first", "second", "bias", "tau", "bank", "magnitude")
"""The tensors of a `MapSpec`."""


class MapSpec(NamedTuple):
    """A feature map in terms that a compiled op can read. Weights are those of `FeatureMap`, heads first.

    Attributes:
        kind: name of a map of `linearize.native.structures.KINDS`.
        first: [H, n, D] projection.
        second: [H, n, D] another, or None.
        bias: [H, n] or None.
        tau: [H], where the log-scale is exp(-tau) |x|^2, or None.
        bank: [H, L, 3 hidden + 1] scalar functions relu(c + sum_j v_j relu(s_j u + t_j)), as [s, t, v, c], or None.
            It may be made of the kernel's parameters; then keys must not have a log-scale.
        magnitude: [H, D], where features are multiplied by exp(4 tanh(magnitude . x / 4)), or None.
        amplitude: factor of the features, where the map has one.
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
    """What follows the weighted sum of the values: a norm, a learned scale."""

    @abc.abstractmethod
    def reset_parameters(self) -> None:
        """Fill the parameters."""

    @abc.abstractmethod
    def forward(self, mixed: Tensor) -> Tensor:
        """Change the sums [B, H, T, V] in fp32."""


class Inputs(nn.Module, abc.ABC):
    """What precedes the map, and knows queries from keys."""

    @abc.abstractmethod
    def reset_parameters(self) -> None:
        """Fill parameters and buffers."""

    @abc.abstractmethod
    def forward(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Change q [B, H, T, D] and k [B, K, S, D] in fp32, token by token; mask [B, S]."""


class Kernel:
    """What all kernels may say about the way around them."""

    @classmethod
    def inputs(cls, config: Any, heads: int, key_heads: int, head_dim: int) -> Inputs | None:
        """Make what precedes the map; None: nothing does."""
        return None

    @classmethod
    def output(cls, config: Any, heads: int, value_dim: int) -> Output | None:
        """Make what follows the attention; None: nothing does."""
        return None


class BlockKernel(Kernel):
    """Attention inside blocks of `config.block` tokens: no features. Never built, only described.

    Attributes:
        softmax: softmax of the scores; otherwise their ReLU.
    """

    softmax = True


class FeatureMap(nn.Module, Kernel, abc.ABC):
    """One map with parameters of its own for each head (leading axis of every parameter and buffer; 1 where shared).

    Attributes:
        scale_inputs: whether inputs are multiplied by the square root of the host's score scaling first, so that
            `x . y` is the score that softmax would see. Maps whose definition contains sqrt(d) want that.
        normalize: whether weights are divided by their sum.
        floor: c of `linearize.ops.floored`, which keeps signed weights' denominators off zero; 0 for none.
    """

    scale_inputs = True
    normalize = True
    floor = 0.0

    def __init__(self, config: Any, heads: int, head_dim: int) -> None:
        super().__init__()
        self.config, self.heads, self.head_dim = config, heads, head_dim

    def add_parameter(self, *shape: int) -> nn.Parameter:
        """Make an uninitialised learnable tensor [H, *shape] in fp32."""
        return nn.Parameter(torch.empty(self.heads, *shape, dtype=torch.float32))

    def add_buffer(self, name: str, *shape: int) -> None:
        """Add a buffer [H, *shape] in fp32 for random numbers: drawn in `reset_parameters` only, and saved."""
        self.register_buffer(name, torch.empty(self.heads, *shape, dtype=torch.float32))

    @abc.abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill parameters and random buffers. Draw from `generator` (on the CPU) only: a seed gives one kernel."""

    @abc.abstractmethod
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys.

        Args:
            x: [B, H, T, D] fp32.
            positions: [B, T], counted from 0 without padding, where the kernel is positional; None otherwise.
        """

    def forward_queries(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries; as `forward` does, unless the kernel says otherwise."""
        features: Features = self(x, positions)
        return features

    def forward_keys(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map keys; as `forward` does, unless the kernel says otherwise."""
        features: Features = self(x, positions)
        return features

    @property
    def symmetric(self) -> bool:
        """Whether queries and keys are mapped alike."""
        own = type(self)
        return own.forward_queries is FeatureMap.forward_queries and own.forward_keys is FeatureMap.forward_keys

    def map_spec(self) -> MapSpec | None:
        """Describe the map to the native op; None: it does not have this one. Which, depends on the config alone."""
        return None


class FixedMap(FeatureMap):
    """Base of maps that have nothing to fill."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Do nothing."""


def floor_option(default: float) -> Any:
    """Declare the argument that a map with signed weights takes its `floor` from."""
    return option(
        default,
        "c: a denominator is at least c |phi(q)| . sum |phi(k)|, where weights can be negative",
        low=0.0,
        high=1.0,
    )


@dataclass(frozen=True)
class NoArguments:
    """Arguments of kernels that have none."""


def draw_normal(parameter: Tensor, generator: torch.Generator, std: float = 1.0) -> None:
    """Fill `parameter` with normal numbers drawn on the CPU, wherever it lies."""
    with torch.no_grad():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def draw_uniform(parameter: Tensor, generator: torch.Generator, bound: float) -> None:
    """Fill `parameter` with numbers between -bound and bound drawn on the CPU, wherever it lies."""
    with torch.no_grad():
        parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)


def orthonormal(heads: int, rows: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw unit vectors [heads, rows, size] in fp64, each orthogonal to the others of its block of `size` rows."""
    blocks = -(-rows // size)
    square = torch.randn(heads, blocks, size, size, generator=generator, dtype=torch.float64)
    basis, upper = torch.linalg.qr(square)
    # Without the signs of the diagonal the basis would not be uniformly distributed.
    basis = basis * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return basis.transpose(-1, -2).reshape(heads, blocks * size, size)[:, :rows]


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Apply per-head weights [H, F, D] to x [B, H, T, D] -> [B, H, T, F]."""
    return x @ weight.float().transpose(-1, -2)
