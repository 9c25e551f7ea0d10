"""What takes softmax's place in one layer: a mixer. Feature-map kernels are the largest family of mixers."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linearize.attention.call import AttentionCall, MixerState
from linearize.errors import ConfigError
from linearize.kernels.base import BlockKernel, Kernel, Output
from linearize.registry import KernelInfo, kernel_info, make_config

IMPLEMENTATION = "linearize"
"""The name under which transformers knows the attention function of converted models."""


@dataclass(frozen=True)
class HeadShape:
    """Sizes of one attention.

    Attributes:
        heads: query heads H.
        key_heads: key/value heads K; divides H.
        head_dim: size D of a query or key.
        value_dim: size V of a value.
        causal: whether a query sees only keys up to its own position.
    """

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    causal: bool

    def __post_init__(self) -> None:
        sizes = (self.heads, self.key_heads, self.head_dim, self.value_dim)
        if not all(type(size) is int and 1 <= size <= 65536 for size in sizes):
            raise ConfigError(f"attention sizes: got {sizes}, expected whole numbers from 1 to 65536")
        if not isinstance(self.causal, bool):
            raise ConfigError(f"attention direction: got causal {self.causal!r}, expected true or false")
        if self.heads % self.key_heads:
            raise ConfigError(
                f"attention sizes: got {self.heads} query heads and {self.key_heads} key/value heads, "
                "expected a whole number of query heads per key/value head"
            )


class Mixer(nn.Module, abc.ABC):
    """Turns q, k, v into the heads' outputs at linear cost.

    Attributes:
        info: the kernel's facts.
        config: its arguments.
        shape: sizes and direction.
        positive: whether its weights can never be negative.
        output: what follows the weighted sum of the values, or None.
    """

    def __init__(self, info: KernelInfo, config: Any, shape: HeadShape) -> None:
        super().__init__()
        self.info, self.config, self.shape = info, config, shape
        self.positive = info.is_positive(config)
        self.output: Output | None = None
        if info.build is not None and issubclass(info.build, Kernel):
            self.output = info.build.output(config, shape.heads, shape.value_dim)

    @abc.abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill parameters and random buffers from `generator` (CPU)."""

    @abc.abstractmethod
    def forward(self, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Mix q [B, H, T, D], k [B, K, T, D], v [B, K, T, V] -> [B, H, T, V] in v's dtype, and the state after them.

        The state is None unless `call.needs_state`.
        """

    @abc.abstractmethod
    def weights(self, q: Tensor, k: Tensor, *, scaling: float, key_padding_mask: Tensor | None = None) -> Tensor:
        """Write out the weights [B, H, T, T] in fp32; quadratic, for reports and `output_attentions`.

        Rows sum to one where the registry says `normalized`; otherwise they are what multiplies the values before
        `finish`, with its sign and scale.
        """

    def finish(self, mixed: Tensor) -> Tensor:
        """Do what follows the weighted sum of the values [B, H, T, V] in fp32: nothing, unless the kernel says so.

        For every mixer, `forward` is `finish(weights @ v)`.
        """
        return mixed if self.output is None else self.output(mixed)


def build_mixer(kernel: str, arguments: Mapping[str, Any], shape: HeadShape, window: int | None = None) -> Mixer:
    """Build an uninitialised mixer for a kernel name and its arguments.

    Args:
        kernel: name of the kernel; not that of a preset, which stands for a plan of several.
        arguments: the kernel's own arguments.
        shape: sizes and direction of the attention.
        window: W of the softmax window joined to the kernel (see `linearize.ops.window`), or None.

    Raises:
        ConfigError: for an unknown kernel or argument, a value out of range, or a kernel that does not work in this
            direction, with this head size or with a window.
    """
    from linearize.attention.block import BlockMixer
    from linearize.attention.feature_map import FeatureMapMixer

    info = kernel_info(kernel)
    config = make_config(info, arguments)
    check_shape(info, shape)
    check_window(info, window)
    assert info.build is not None
    build: Any = info.build
    if issubclass(build, Kernel):
        build = BlockMixer if issubclass(build, BlockKernel) else FeatureMapMixer
    return build(info, config, shape, window) if window is not None else build(info, config, shape)


def check_shape(info: KernelInfo, shape: HeadShape) -> None:
    """Refuse an attention that a kernel cannot stand in for.

    Raises:
        ConfigError: saying what to choose instead.
    """
    kernel = info.name
    if info.preset is not None:
        raise ConfigError(
            f"kernel {kernel!r} is a plan for all layers of a model, not a kernel of one; give it as the model's kernel"
        )
    if info.max_head_dim is not None and shape.head_dim > info.max_head_dim:
        raise ConfigError(
            f"kernel {kernel!r}: got head size {shape.head_dim}, expected at most {info.max_head_dim}; "
            "choose another kernel"
        )
    if shape.causal and not info.causal:
        raise ConfigError(
            f"kernel {kernel!r} is bidirectional only, but this attention is causal; choose another kernel"
        )
    if not shape.causal and not info.bidirectional:
        raise ConfigError(
            f"kernel {kernel!r} is causal only, but this attention is bidirectional; choose another kernel"
        )


def check_window(info: KernelInfo, window: int | None) -> None:
    """Refuse a window that is no length, or that a kernel cannot be joined with.

    Raises:
        ConfigError: saying what to choose instead.
    """
    if window is None:
        return
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ConfigError(f"window: got {window!r}, expected a number of tokens, 1 or more; leave it out for none")
    if not info.windowed:
        raise ConfigError(
            f"kernel {info.name!r} takes no window: it has no feature map with a denominator that softmax could share; "
            "choose another kernel or leave window out"
        )


def count_parameters(kernel: str, arguments: Mapping[str, Any], shape: HeadShape, layers: int = 1) -> int:
    """Count a kernel's learnable numbers in `layers` attentions of one shape, from the registry's formulas alone.

    Raises:
        ConfigError: for an unknown kernel or argument, or a value out of range.
    """
    info = kernel_info(kernel)
    config = make_config(info, arguments)
    if info.preset is not None:
        return sum(count_parameters(name, values, shape) for name, values in info.preset(config, layers))
    per_head, shared = (f(config, shape.head_dim) for f in (info.parameters, info.shared_parameters))
    count = shape.key_heads * per_head + shared
    if not getattr(config, "tied", True):
        count += shape.heads * per_head + shared
    return layers * (count + shape.heads * info.output_parameters(config, shape.value_dim))
