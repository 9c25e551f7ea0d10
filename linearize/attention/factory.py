"""Mixers by the name of their kernel, and what a kernel can be asked for before one is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from linearize.attention.block import BlockMixer
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.mixer import Mixer
from linearize.attention.shape import HeadShape
from linearize.errors import ConfigError
from linearize.kernels.base import BlockKernel, Kernel
from linearize.registry import KernelInfo, kernel_info, make_config

NUMBER = 4
"""Bytes of a number of a state."""


def build_mixer(
    kernel: str, arguments: Mapping[str, object], shape: HeadShape, window: int | None = None, sinks: int = 0
) -> Mixer:
    """Build an uninitialised mixer for a kernel name and its arguments.

    Args:
        kernel: name of the kernel; not that of a preset, which stands for a plan of several.
        arguments: the kernel's own arguments.
        shape: sizes and direction of the attention.
        window: W of the softmax window joined to the kernel (see `linearize.ops.window`), or None.
        sinks: first tokens that get softmax's weights beside the window.

    Raises:
        ConfigError: for an unknown kernel or argument, a value out of range, or a kernel that does not work in this
            direction, with this head size or with a window.
    """
    info = kernel_info(kernel)
    config = make_config(info, arguments)
    check_shape(info, shape)
    check_window(info, window, sinks)
    assert info.build is not None
    build: Any = info.build
    if issubclass(build, Kernel):
        build = BlockMixer if issubclass(build, BlockKernel) else FeatureMapMixer
    return build(info, config, shape, window, sinks) if window is not None else build(info, config, shape)


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


def check_window(info: KernelInfo, window: int | None, sinks: int = 0) -> None:
    """Refuse a window that is no length, or that a kernel cannot be joined with, and sinks without a window.

    Raises:
        ConfigError: saying what to choose instead.
    """
    if not isinstance(sinks, int) or isinstance(sinks, bool) or sinks < 0:
        raise ConfigError(f"sinks: got {sinks!r}, expected a number of tokens, 0 or more")
    if window is None:
        if sinks:
            raise ConfigError(f"sinks: got {sinks} without a window, expected both; add one, such as window=64")
        return
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ConfigError(f"window: got {window!r}, expected a number of tokens, 1 or more; leave it out for none")
    if not info.windowed:
        raise ConfigError(
            f"kernel {info.name!r} takes no window: it has no feature map with a denominator that softmax could share; "
            "choose another kernel or leave window out"
        )


def state_bytes(info: KernelInfo, config: Any, shapes: Iterable[HeadShape]) -> int | None:
    """Return the bytes of the sums over tokens that decoding keeps of one sequence, of attentions of these shapes.

    Of each key head [F, V + 1] numbers in fp32, whatever the model's type; None for kernels without features.
    """
    if info.feature_dim is None:
        return None
    return NUMBER * sum(
        shape.key_heads * info.feature_dim(config, shape.head_dim) * (shape.value_dim + 1) for shape in shapes
    )


def count_parameters(kernel: str, arguments: Mapping[str, object], shape: HeadShape, layers: int = 1) -> int:
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
