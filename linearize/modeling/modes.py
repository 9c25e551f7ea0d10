"""Temporary evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Temporarily switch a model to evaluation mode, then restore every module's mode.

    `model.train(before)` would switch modules to training that are kept in evaluation mode, such as a frozen norm.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
