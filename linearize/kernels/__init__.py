"""Kernels: one file each, found by listing this folder; `base` and files with a leading underscore hold shared code."""

from __future__ import annotations

import importlib
import pkgutil


def load_all() -> None:
    """Import every kernel file, so that each kernel registers itself."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_") and module.name != "base":
            importlib.import_module(f"{__name__}.{module.name}")
