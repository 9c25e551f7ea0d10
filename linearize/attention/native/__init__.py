"""The native op: linear attention on the CPU in C, map included. Optional; `linearize native --build` compiles it.

The modules that call the compiled code do not travel with checkpoints. If they are missing, or nothing was built,
`engine` returns None and the ops in PyTorch do the work.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from linearize.ops.tracing import is_tracing

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
