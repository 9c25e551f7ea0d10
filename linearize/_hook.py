"""Register with transformers once its Auto classes are used.

`import linearize` must be quick, but `AutoModel.from_pretrained` must know converted checkpoints afterwards. So a
finder waits until transformers' config registry is imported, and then adds an entry to it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

TARGET = "transformers.models.auto.configuration_auto"


def _register() -> None:
    from linearize.modeling.auto import register

    register()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds only `TARGET`, through the other finders, and runs `_register` after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the ordinary spec; its loader registers after it has run the module."""
        if fullname != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                # Modules of a zip file share their loader.
                if module.__name__ == TARGET:
                    _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Register now if the Auto classes are already loaded, otherwise when they are loaded."""
    if TARGET in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
