"""Register with transformers when, and only when, somebody uses its Auto classes.

`import linearize` must be quick and do nothing, yet `AutoModel.from_pretrained` must know converted checkpoints after
it. So a finder waits for transformers' own config registry to be imported and adds one entry to it then.
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
    """Finds only `TARGET`, through the other finders, and runs `_register` after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the ordinary spec with a loader that registers afterwards."""
        if fullname != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, wrapped: importlib.abc.Loader) -> None:
        self.wrapped = wrapped

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.wrapped.exec_module(module)
        _register()

    def __getattr__(self, name: str) -> object:
        # get_source and friends, for inspect and debuggers.
        return getattr(self.wrapped, name)


def install() -> None:
    """Register now if the Auto classes are loaded already, otherwise when they are."""
    if TARGET in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
