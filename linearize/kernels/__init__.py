"""Kernels: one file each, found by listing this folder; `base` and names with a leading underscore are shared parts."""

from __future__ import annotations

import importlib
import pkgutil


def load_all() -> None:
    """Import every kernel file, so that each registers itself."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_") and module.name != "base":
            importlib.import_module(f"{__name__}.{module.name}")
