"""How much of a model's activations is dropped while it is tuned, which its config says otherwise."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

SHARE = re.compile(r"(.+_)?dropout(_p|_prob)?")
"""Attributes that attention modules hand to a function, as they have no dropout layer. Whole layers that are dropped
(`layerdrop`, `drop_path`) are something else."""
LOW_RANK = "lora_"
"""Dropout of low-rank updates has an option of its own."""


@contextlib.contextmanager
def dropping(model: nn.Module, share: float | None) -> Iterator[None]:
    """Drop another share of the activations in the block, everywhere in a model; None: as it has it."""
    before: list[tuple[Any, str, float]] = []
    try:
        for module, name in places(model) if share is not None else ():
            before.append((module, name, getattr(module, name)))
            setattr(module, name, share)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where a model keeps the shares that it drops: modules, and the names of their attributes."""
    found: list[tuple[nn.Module, str]] = []
    for path, module in model.named_modules():
        if LOW_RANK in path:
            continue
        if isinstance(module, _DropoutNd):
            found.append((module, "p"))
        else:
            found += [(module, n) for n, v in vars(module).items() if isinstance(v, float) and SHARE.fullmatch(n)]
    return found
