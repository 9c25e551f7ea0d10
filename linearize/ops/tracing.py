"""Whether a graph is being traced, in which nothing may depend on numbers; and replacements for ops that ONNX lacks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""How many numbers one step of a traced running maximum covers."""


def is_tracing() -> bool:
    """Tell whether torch.compile, torch.export or torch.jit.trace is tracing."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def overlapping(x: Tensor, dim: int, count: int, size: int, step: int) -> Tensor:
    """Cut windows of `size` every `step` numbers along a dimension, which becomes two, [count, size].

    There are exactly `count` of them; the dimension is (count - 1) step + size long.
    """
    if not isinstance(x.shape[dim], torch.SymInt):
        return x.unfold(dim, size, step).movedim(-1, dim + 1)
    # `unfold` needs a known length.
    place = step * torch.arange(count, device=x.device)[:, None] + torch.arange(size, device=x.device)
    return x.index_select(dim, place.flatten()).unflatten(dim, (count, size))


def running_max(x: Tensor) -> Tensor:
    """Return the largest number up to each one along the last dimension; without a gradient."""
    if not isinstance(x.shape[-1], torch.SymInt):
        return x if x.shape[-1] == 1 else x.cummax(dim=-1).values
    length = x.shape[-1]
    # One chunk more than needed, so that there are at least two: with one, the length would become a constant.
    count = (length + CHUNK - 1) // CHUNK + 1
    least = torch.finfo(x.dtype).min
    chunks = F.pad(x, (0, count * CHUNK - length), value=least).unflatten(-1, (count, CHUNK))
    inside = chunks[..., None, :].masked_fill(_later(CHUNK, 1, x), least).amax(dim=-1)
    before = chunks.amax(dim=-1)[..., None, :].masked_fill(_later(count, 0, x), least).amax(dim=-1)
    return torch.maximum(inside, before[..., None]).flatten(-2)[..., :length]


def _later(count: int, own: int, x: Tensor) -> Tensor:
    """Tell [count, count] which columns come after a row's own; with `own` 0 that one counts as later too."""
    place = torch.arange(count, device=x.device)
    return place >= place[:, None] + own
