"""Builds mixers by the name of their kernel, and answers questions about a kernel without building one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from linearize.attention.backends.choose import LinearMixer
from linearize.attention.cache import nbytes
from linearize.attention.call import AttentionCall
from linearize.attention.mixer import BlockMixer, Mixer
from linearize.attention.shape import HeadShape
from linearize.core.errors import ConfigError
from linearize.core.registry import PLAIN, SCALES, Hybrid, KernelInfo, kernel_info, make_config
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


def check_hybrid(info: KernelInfo, config: Any, hybrid: Hybrid, shape: HeadShape) -> None:
    """Check the sizes of a layer's additions, and that the kernel supports them.

    Raises:
        ConfigError: if a size is wrong or an addition is not supported; the message says what to choose instead.
    """
    window = hybrid.window
    for name in ("sinks", "exact_keys"):
        count, shown = getattr(hybrid, name), name.replace("_", "-")
        if type(count) is not int or count < 0:
            raise ConfigError(f"{shown}: got {count!r}, expected a number of tokens, 0 or more")
        if count and window is None:
            raise ConfigError(f"{shown}: got {count} without a window, expected both; add one, such as window=64")
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigError(f"window: got {window!r}, expected a number of tokens, 1 or more; leave it out for none")
    if hybrid != PLAIN and not info.windowed:
        addition = "window" if window is not None else next(iter(hybrid.changed)).replace("_", "-")
        raise ConfigError(
            f"kernel {info.name!r} takes no {addition}: it has no feature map with a denominator that softmax could "
            "share; choose another kernel or leave it out"
        )
    if info.needs_window and window is None:
        raise ConfigError(f"kernel {info.name!r}: got no window, so no key would have any weight; add window=64")
    if hybrid.scale not in SCALES:
        raise ConfigError(f"scale: got {hybrid.scale!r}, expected one of {', '.join(SCALES)}")
    if hybrid.scale != SCALES[0] and (info.needs_window or not info.is_positive(config)):
        reason = "has no features to scale" if info.needs_window else "can have negative weights"
        raise ConfigError(f"scale: got {hybrid.scale!r}, but kernel {info.name!r} {reason}; leave the scale out")
    if hybrid.exact_keys and hybrid.scale == SCALES[0] and info.needs_window:
        raise ConfigError(
            f"exact-keys: got {hybrid.exact_keys}, but kernel {info.name!r} has no scale by which to choose keys; "
            "choose another kernel, or use sinks"
        )
    length = hybrid.trained_length
    if length is not None and not (hybrid.can_fade(shape.causal) and type(length) is int and length > 0):
        raise ConfigError(
            f"trained-length: got {length!r}, expected a number of tokens, 1 or more, for a causal layer with a window "
            "and scales; leave it out"
        )
    heads = hybrid.softmax_heads
    if not all(type(h) is int and 0 <= h < shape.heads for h in heads) or sorted(set(heads)) != list(heads):
        raise ConfigError(
            f"softmax-heads: got {list(heads)}, expected numbers of heads from 0 to {shape.heads - 1}, each once and "
            "in order"
        )


def check_exact_keys(info: KernelInfo, config: Any, hybrid: Hybrid) -> None:
    """Check that exact keys of a new layer have learned scales, by which they are chosen; older checkpoints may not.

    Raises:
        ConfigError: if they have none; the message says what to choose instead.
    """
    if hybrid.exact_keys and hybrid.window is not None and hybrid.scale == SCALES[0]:
        usual = default_scale(info, config, hybrid.window)
        other = "choose another kernel" if usual == SCALES[0] else f"use scale={usual}"
        raise ConfigError(
            f"exact-keys: got {hybrid.exact_keys} for kernel {info.name!r} without learned scales, by which the keys "
            f"are chosen; {other}, or use sinks"
        )


def default_scale(info: KernelInfo, config: Any, window: object) -> str:
    """Return the default kind of a new layer's learned log-scales: linear with a window."""
    takes = info.windowed and not info.needs_window and info.is_positive(config)
    return "linear" if takes and window is not None else "none"


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
        sizes = {"q": (shape.heads, shape.head_dim), "k": (shape.key_heads, shape.head_dim)}
        sizes["v"] = (shape.key_heads, shape.value_dim)
        inputs: Any = {name: torch.zeros(1, heads, tokens, size, dtype=dtype) for name, (heads, size) in sizes.items()}
        return nbytes(mixer(AttentionCall(**inputs, scaling=1.0, needs_state=True))[1])


def sums_bytes(info: KernelInfo, config: Any, shapes: Iterable[HeadShape]) -> int | None:
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
