"""Is a graph being written down, in which nothing may depend on numbers?"""

from __future__ import annotations

import torch


def is_tracing() -> bool:
    """Tell whether torch.compile, torch.export or torch.jit.trace follows what is computed."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
