"""Compare the native op with the ops in PyTorch on this machine, right after it was compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from linearize.attention.call import AttentionCall
from linearize.attention.factory import build_mixer, default_scale
from linearize.attention.mixer import Mixer
from linearize.attention.native import SWITCH
from linearize.attention.shape import HeadShape
from linearize.core.errors import ConfigError
from linearize.core.registry import PLAIN, Hybrid, kernel_info, kernel_infos, make_config
from linearize.kernels.base import FeatureMap

MOST = 1e-4
"""Largest difference, relative to the largest output, that rounding can explain."""

TOKENS, HEADS, KEY_HEADS, SIZE = 150, 4, 2, 48

WINDOW = Hybrid(window=64, sinks=4, exact_keys=8)
"""A softmax window, sinks and exact keys."""


class Agreement(NamedTuple):
    """One kernel in one direction.

    Attributes:
        kernel: its name.
        direction: "bidirectional", "causal" or "one token"; with a window followed by ", window".
        error: largest difference over the largest output.
    """

    kernel: str
    direction: str
    error: float


def native_kernels() -> list[str]:
    """Return the kernels whose map the native op has."""
    builds = {info.name: getattr(info.build, "map_spec", FeatureMap.map_spec) for info in kernel_infos()}
    return [name for name, map_spec in builds.items() if map_spec is not FeatureMap.map_spec]


@torch.no_grad()
def agreement() -> list[Agreement]:
    """Compare outputs of random inputs, padding and grouped heads included, for every kernel that the op has."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, HEADS, TOKENS, SIZE, generator=generator)
    k, v = (torch.randn(2, KEY_HEADS, TOKENS, SIZE, generator=generator) for _ in range(2))
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[1, 100:] = False
    rows = []
    for name in native_kernels():
        for ending, hybrid in (("", PLAIN), (", window", WINDOW)):
            for causal in (False, True):
                mixer = _mixer(name, causal, generator, hybrid)
                ours, theirs = (_attend(mixer, q, k, v, mask, native) for native in (True, False))
                # Outputs at padding do not matter.
                ours, theirs = (x[mask[:, None].expand(-1, HEADS, -1)] for x in (ours, theirs))
                rows.append(Agreement(name, ("causal" if causal else "bidirectional") + ending, _error(ours, theirs)))
            ours, theirs = (_step(mixer, q, k, v, native) for native in (True, False))
            rows.append(Agreement(name, "one token" + ending, _error(ours, theirs)))
    return rows


def check_agreement(rows: list[Agreement]) -> None:
    """Check that the native op computes the same.

    Raises:
        ConfigError: naming the kernel and the difference.
    """
    worst = max(rows, key=lambda row: row.error, default=None)
    if worst is not None and not worst.error <= MOST:
        raise ConfigError(
            f"native op: {worst.kernel}, {worst.direction}, differs by {worst.error:.1e} from the op in PyTorch, "
            f"expected at most {MOST:g}; do not use it here: linearize native --remove"
        )


def _mixer(name: str, causal: bool, generator: torch.Generator, hybrid: Hybrid) -> Mixer:
    info = kernel_info(name)
    hybrid = replace(hybrid, scale=default_scale(info, make_config(info, {}), hybrid.window))
    mixer = build_mixer(name, {}, HeadShape(HEADS, KEY_HEADS, SIZE, SIZE, causal), hybrid)
    mixer.reset_parameters(torch.Generator().manual_seed(1))
    for parameter in mixer.parameters():
        # Some start at 0, so that their effect would not show.
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return mixer


def _attend(mixer: Mixer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, native: bool) -> Tensor:
    with switched(native):
        out: Tensor = mixer(AttentionCall(q, k, v, SIZE**-0.5, mask))[0]
        return out


def _step(mixer: Mixer, q: Tensor, k: Tensor, v: Tensor, native: bool) -> Tensor:
    """Process all tokens but the last, then decode the last."""
    with switched(native):
        call = AttentionCall(q, k, v, SIZE**-0.5)
        _, state = mixer(replace(call.part(slice(0, -1)), needs_state=True))
        out: Tensor = mixer(replace(call.part(slice(-1, None)), state=state, needs_state=True))[0]
        return out


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Switch the native op on, if it was built, or off, while the block runs."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1" if on else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def _error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
