"""The native op: linear attention on the CPU in C, map included. Optional; `linearize native --build` compiles it.

The modules that call the compiled code do not travel with checkpoints. If they are missing, or nothing was built,
`engine` returns None and the ops in PyTorch do the work.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from linearize.ops.state import is_tracing

SWITCH = "LINEARIZE_NATIVE"
"""Environment variable: with 0 the native op is not used even if it is built."""


def engine() -> Any:
    """Return the engine (`native.calls.Engine`) that was built for this machine; None without one or while tracing."""
    return None if is_tracing() or os.environ.get(SWITCH) == "0" else loaded()


def absence() -> str:
    """Say why `engine` returns None."""
    if is_tracing():
        return "a graph is being traced"
    return f"{SWITCH} is 0" if os.environ.get(SWITCH) == "0" else "it is not built (linearize native --build)"


@functools.lru_cache(maxsize=1)
def loaded() -> Any:
    """Return the engine whatever the environment variable is: for callers that have just called `engine`."""
    # By name and only if it is installed: code that travels with a checkpoint comes without that module.
    try:
        module = importlib.import_module("linearize.attention.native.calls")
    except ImportError:
        return None
    return module.load()


def forget() -> None:
    """Load again at the next call: something was built or removed."""
    loaded.cache_clear()


def unreadable(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Say why the op does not take such tensors; empty if it does."""
    native = engine()
    if native is None:
        return absence()
    return "" if native.supports(q, k, v) else "it reads plain tensors in fp32 or bf16 on the CPU only"


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
