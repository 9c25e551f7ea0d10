"""The native op: linear attention on the CPU in C, map included. Optional; `linearize native --build` compiles it.

The modules that call the compiled code are not saved in checkpoints. If they are missing, or nothing was built,
`engine` returns None and the ops in PyTorch do the work.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor

from linearize.ops.state import is_tracing
from linearize.ops.window_parts import Choose, choose_blocks

SWITCH = "LINEARIZE_NATIVE"
"""Environment variable: if it is 0, the native op is not used even if it is built."""


def engine() -> Any:
    """Return the engine (`native.calls.Engine`) built for this machine; None if it is not built, or while tracing."""
    return None if is_tracing() else enabled()


def enabled() -> Any:
    """Return what `engine` returns, for callers that know that nothing is being traced."""
    return None if os.environ.get(SWITCH) == "0" else loaded()


def chooser(x: Tensor) -> Choose:
    """Return what chooses routed blocks of keys on the device of `x`: the engine if it computes there, or PyTorch."""
    found = engine() if x.is_cpu else None
    return choose_blocks if found is None else cast(Choose, found.choose)


def absence() -> str:
    """Return why `engine` returns None."""
    if is_tracing():
        return "a graph is being traced"
    return f"{SWITCH} is 0" if os.environ.get(SWITCH) == "0" else "it is not built (linearize native --build)"


@functools.lru_cache(maxsize=1)
def loaded() -> Any:
    """Return the engine regardless of the environment variable."""
    # Import by name and only if installed: the code in a checkpoint lacks that module.
    try:
        module = importlib.import_module("linearize.attention.native.calls")
    except ImportError:
        return None
    return module.load()


def forget() -> None:
    """Make the next call load again, because a library was built or removed."""
    loaded.cache_clear()


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
