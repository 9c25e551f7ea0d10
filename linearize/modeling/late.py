"""Act after another package's module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder(importlib.abc.MetaPathFinder):
    """Finds only one module, through the other finders, and acts after its import."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the ordinary spec; its loader acts after it has run the module."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                # Modules of a zip file share their loader.
                if module.__name__ == self.name:
                    self.act()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call `act` now if the module of this name is already imported, otherwise once, after its import."""
    if name in sys.modules:
        act()
    elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, act))
