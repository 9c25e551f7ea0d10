"""The native op: linear attention on the CPU in C, map included. Optional; `linearize native --build` compiles it.

The modules that call the compiled code are not saved in checkpoints. If they are missing, or nothing was built,
`engine` returns None and the ops in PyTorch do the work. The options and results of its calls are here too.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from linearize.ops.state import is_tracing

SWITCH = "LINEARIZE_NATIVE"
"""Environment variable: if it is 0, the native op is not used even if it is built."""


def engine() -> Any:
    """Return the engine (`native.calls.Engine`) built for this machine; None if it is not built, or while tracing."""
    return None if is_tracing() or os.environ.get(SWITCH) == "0" else loaded()


def absence() -> str:
    """Return why `engine` returns None."""
    if is_tracing():
        return "a graph is being traced"
    return f"{SWITCH} is 0" if os.environ.get(SWITCH) == "0" else "it is not built (linearize native --build)"


@functools.lru_cache(maxsize=1)
def loaded() -> Any:
    """Return the engine regardless of the environment variable: for callers that have just called `engine`."""
    # Import by name and only if installed: the code in a checkpoint lacks that module.
    try:
        module = importlib.import_module("linearize.attention.native.calls")
    except ImportError:
        return None
    return module.load()


def forget() -> None:
    """Make the next call load again, because a library was built or removed."""
    loaded.cache_clear()


def unreadable(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return why the op does not accept such tensors; empty if it does."""
    native = engine()
    if native is None:
        return absence()
    return "" if native.supports(q, k, v) else "it only reads plain tensors in fp32 or bf16 on the CPU"


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Switch the native op on (if it was built) or off within the block."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1" if on else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


class AttendOptions(NamedTuple):
    """Options of `Engine.attend` and of its gradient.

    Attributes:
        causal: whether a query sees only keys up to its own position.
        scale: factor of q and k before the map.
        eps: smallest magnitude of a denominator.
        mask: key padding mask [B, T] or None.
        log_scale: [B, K, T], added to the log-scale of the keys' features, or None.
        query_scale: [B, H, T], the same for the queries, or None; used only with a window.
        priority: [B, K, T], by which exact keys are chosen, or None.
        exact: whether to never round the weights; needed for gradients.
    """

    causal: bool
    scale: float
    eps: float
    mask: Tensor | None = None
    log_scale: Tensor | None = None
    query_scale: Tensor | None = None
    priority: Tensor | None = None
    exact: bool = False


class Attended(NamedTuple):
    """The result of `Engine.attend`.

    Attributes:
        out: [B, H, T, V] in the dtype of v.
        kv: sums of the state after the tokens, [B, K, F, V + 1] in fp32.
        log_scale: log-scale of that state, [B, K].
    """

    out: Tensor
    kv: Tensor
    log_scale: Tensor


class Gradients(NamedTuple):
    """The result of `Engine.gradients`.

    Attributes:
        q: the gradient of q.
        k: the gradient of k.
        v: the gradient of v.
        weights: the gradients of the `MAP_WEIGHTS` of every map, the keys' map first; None for absent weights.
        log_scale: the gradient of the options' `log_scale` [B, K, T], or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: tuple[Tensor | None, ...]
    log_scale: Tensor | None


NEVER = 2**31 - 1
"""Value in `WindowAttended.until` of a key that stays exact."""


class WindowAttended(NamedTuple):
    """The result of `Engine.window`.

    Attributes:
        out: [B, H, T, V] in the dtype of v.
        kv: sums over the tokens that have left the window, [B, K, F, V + 1] in fp32.
        log_scale: log-scale of these sums, [B, K].
        tops: [B, H, T] in fp32: the weights of a row are relative to exp(top).
        sums: [B, H, T] in fp32: the sum of a row's relative weights.
        until: [B, K, T] in int32: the query from which a key outside the window is no longer exact; `NEVER` or 0 if
            that does not depend on the query; None without exact keys.
    """

    out: Tensor
    kv: Tensor
    log_scale: Tensor
    tops: Tensor
    sums: Tensor
    until: Tensor | None


class Attending(NamedTuple):
    """The inputs of the gradient of a window, all in fp32; also their gradients.

    Attributes:
        q: queries [B, H, T, D], times the scaling.
        k: keys [B, K, T, D].
        v: values [B, K, T, V].
        phi_q: features [B, H, T, F], scaled so that their products are weights relative to the rows' levels.
        phi_k: features [B, K, T, F], zero for padding and sinks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    phi_q: Tensor
    phi_k: Tensor
