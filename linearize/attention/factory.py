"""Builds mixers by the name of their kernel, and answers questions about a kernel without building one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from linearize.attention.backends.choose import LinearMixer
from linearize.attention.cache import nbytes
from linearize.attention.call import AttentionCall
from linearize.attention.mixer import BlockMixer, Mixer
from linearize.attention.parts import check_hybrid
from linearize.attention.shape import HeadShape
from linearize.core.errors import ConfigError
from linearize.core.registry import PLAIN, Hybrid, KernelInfo, kernel_info, make_config
from linearize.kernels.base import BlockKernel, Kernel


def build_mixer(kernel: str, arguments: Mapping[str, object], shape: HeadShape, hybrid: Hybrid = PLAIN) -> Mixer:
    """Build an uninitialised mixer for a kernel name and its arguments.

    Args:
        kernel: name of the kernel; presets are not allowed, because they are layer plans.
        arguments: the kernel's own arguments.
        shape: sizes and direction of the attention.
        hybrid: the layer's additions to the kernel.

    Raises:
        ConfigError: for an unknown kernel or argument, a value out of range, or a kernel that does not work in this
            direction, with this head size or with these additions.
    """
    info = kernel_info(kernel)
    config = make_config(info, arguments)
    check_shape(info, shape)
    check_hybrid(info, config, hybrid, shape)
    build: Any = info.build
    if issubclass(build, Kernel):
        build = BlockMixer if issubclass(build, BlockKernel) else LinearMixer
    elif "rows" not in inspect.signature(build.weights).parameters:
        raise ConfigError(
            f"kernel {kernel!r}: {build.__name__}.weights takes no rows, expected an argument for the queries that are "
            "wanted, as in linearize.attention.mixer.Mixer.weights"
        )
    return build(info, config, shape, hybrid) if hybrid != PLAIN else build(info, config, shape)


def check_shape(info: KernelInfo, shape: HeadShape) -> None:
    """Check that a kernel can replace an attention of this shape.

    Raises:
        ConfigError: if it cannot; the message says what to choose instead.
    """
    kernel = info.name
    if info.preset is not None:
        raise ConfigError(
            f"kernel {kernel!r} is a plan for all layers of a model, not for one layer; give it as the model's kernel"
        )
    if info.max_head_dim is not None and shape.head_dim > info.max_head_dim:
        raise ConfigError(
            f"kernel {kernel!r}: got head size {shape.head_dim}, expected at most {info.max_head_dim}; "
            "choose another kernel"
        )
    if not (info.causal if shape.causal else info.bidirectional):
        own, only = ("causal", "bidirectional") if shape.causal else ("bidirectional", "causal")
        raise ConfigError(f"kernel {kernel!r} is {only} only, but this attention is {own}; choose another kernel")


@torch.no_grad()
def state_bytes(
    kernel: str,
    arguments: Mapping[str, object],
    shape: HeadShape,
    hybrid: Hybrid = PLAIN,
    *,
    dtype: torch.dtype = torch.float32,
    tokens: int = 1,
) -> int:
    """Return the bytes of one sequence's state in a causal attention of this shape, measured on the meta device.

    Args:
        kernel: as in `build_mixer`.
        arguments: as in `build_mixer`.
        shape: sizes of the attention.
        hybrid: the layer's additions to the kernel.
        dtype: type of the model's keys and values.
        tokens: tokens so far; the state grows with them only if some heads keep softmax.

    Raises:
        ConfigError: as in `build_mixer`.
    """
    with torch.device("meta"):
        mixer = build_mixer(kernel, arguments, replace(shape, causal=True), hybrid)
        keys = (shape.key_heads, shape.head_dim), (shape.key_heads, shape.value_dim)
        sizes = (shape.heads, shape.head_dim), *keys
        q, k, v = (torch.zeros(1, heads, tokens, size, dtype=dtype) for heads, size in sizes)
        return nbytes(mixer(AttentionCall(q, k, v, 1.0, needs_state=True))[1])


def sums_bytes(info: KernelInfo, config: object, shapes: Iterable[HeadShape]) -> int | None:
    """Return the bytes of the sums of one sequence in attentions of these shapes, from the registry's formula alone.

    Each key head has [F, V + 1] numbers in fp32, whatever the model's dtype. None for kernels without features.
    """
    if info.feature_dim is None:
        return None
    # Four bytes each.
    numbers = (one.key_heads * info.feature_dim(config, one.head_dim) * (one.value_dim + 1) for one in shapes)
    return 4 * sum(numbers)


def count_parameters(kernel: str, arguments: Mapping[str, object], shape: HeadShape, layers: int = 1) -> int:
    """Count a kernel's parameters in `layers` attentions of one shape, from the registry's formulas alone.

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
