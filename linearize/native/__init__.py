"""The native op: linear attention on the CPU in C, map included. Optional; `linearize native --build` compiles it.

Of this package only what needs no compiled code travels with a checkpoint: there, and wherever nothing was built,
`engine` says None and the ops in PyTorch do the work.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from linearize.ops.tracing import is_tracing

SWITCH = "LINEARIZE_NATIVE"
"""Environment variable: 0 leaves the native op alone though it is built."""


def engine() -> Any:
    """Return the `linearize.native.calls.Engine` that was built for this machine, or None; None while compiling too."""
    return None if is_tracing() or os.environ.get(SWITCH) == "0" else loaded()


@functools.lru_cache(maxsize=1)
def loaded() -> Any:
    """Return the same whatever the environment variable says: for who has just asked `engine`."""
    # By name, and only if it is there: code that travels with a checkpoint comes without the package.
    try:
        module = importlib.import_module("linearize.native.calls")
    except ImportError:
        return None
    return module.load()


def forget() -> None:
    """Look again at the next call: something was built or removed."""
    loaded.cache_clear()
