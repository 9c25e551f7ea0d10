"""Scripts of the checkout as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str, folder: Path = SCRIPTS) -> ModuleType:
    """Import scripts/NAME.py, or the file of that name in another folder."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Where dataclasses look for their module.
    sys.path.insert(0, str(folder))  # Where a script that runs finds others.
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
