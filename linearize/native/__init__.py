"""The native op: linear attention on the CPU in C, map included. Optional; `linearize native --build` compiles it.

Of this room only what needs no compiled code travels with a checkpoint: there, and wherever nothing was built, `engine`
says None and the ops in PyTorch do the work.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

SWITCH = "LINEARIZE_NATIVE"
"""Environment variable: 0 leaves the native op alone though it is built."""

WEIGHTS = ("first", "second", "bias", "tau", "bank", "magnitude")
"""The tensors of a `NativeMap`."""


class NativeMap(NamedTuple):
    """A feature map in terms of what the native op has. Weights are those of `FeatureMap`, heads first.

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


def engine() -> Any:
    """Return the `linearize.native.calls.Engine` that was built for this machine, or None; None while compiling too."""
    return None if torch.compiler.is_compiling() or os.environ.get(SWITCH) == "0" else _engine()


@functools.lru_cache(maxsize=1)
def _engine() -> Any:
    # By name, and only if it is there: code that travels with a checkpoint comes without the package.
    try:
        module = importlib.import_module("linearize.native.calls")
    except ImportError:
        return None
    return module.load()


def forget() -> None:
    """Look again at the next call: something was built or removed."""
    _engine.cache_clear()
