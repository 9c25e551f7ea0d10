"""The code that travels with a checkpoint: the package's own runtime modules, flat, and only the kernels in use.

transformers copies a checkpoint's modules and what they import relatively, from one flat folder. So each module
`linearize/a/b.py` becomes `linearize_a_b.py`, and nothing in it changes but the names in its import statements. A small
module more, `modeling_linearize.py`, is what config.json's `auto_map` points to.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from linearize.errors import CheckpointError
from linearize.modeling.plan import Plan
from linearize.registry import kernel_info

ENTRY = "modeling_linearize"
"""Name of the module in a checkpoint's folder that loads it where linearize is not installed."""

ROOTS = ("linearize.modeling.config", "linearize.modeling.auto", "linearize.modeling.model")
PACKAGES = ("errors", "registry", "native", "ops", "kernels", "attention", "modeling")
"""The runtime: what a converted model needs of the package to run."""

_IMPORT = re.compile(r"^(\s*from\s+)(linearize(?:\.\w+)*)(\s+import\b)", re.MULTILINE)


def code_files(plan: Plan) -> dict[str, str]:
    """Write the code that runs a converted model where linearize is not installed.

    Args:
        plan: says which kernels are used.

    Returns:
        Text by file name.

    Raises:
        CheckpointError: if a kernel's code cannot be taken along.
    """
    kernels = sorted({_kernel_module(layer.kernel) for layer in plan.converted})
    modules = _closure([*ROOTS, *kernels])
    files = {f"{flat_name(module)}.py": flat_text(source_of(module)) for module in modules}
    return {f"{ENTRY}.py": _entry(kernels)} | files


def why_not(plan: Plan) -> str:
    """Say why a checkpoint cannot carry its code: a kernel of the user's own. Empty if it can."""
    try:
        for name in {layer.kernel for layer in plan.converted}:
            _kernel_module(name)
    except CheckpointError as error:
        return str(error)
    return ""


def _kernel_module(name: str) -> str:
    """Return the module that registers a kernel: the file of its name."""
    module = f"linearize.kernels.{name}"
    if find_spec(module) is None:
        raise CheckpointError(
            f"kernel {name!r} ({kernel_info(name).build.__module__}) is not part of linearize, so its code cannot "
            "travel with the checkpoint; put it into linearize/kernels"
        )
    return module


def flat_name(module: str) -> str:
    """Return the name that a module of the package has in a checkpoint's folder."""
    return module.replace(".", "_")


def flat_text(source: str) -> str:
    """Point a module's imports to the flat files; nothing else changes."""
    return _IMPORT.sub(lambda match: f"{match[1]}.{flat_name(match[2])}{match[3]}", source)


def _entry(kernels: Iterable[str]) -> str:
    """Write the module that `auto_map` names. Importing a kernel registers it."""
    lines = [
        f"from .{flat_name('linearize.modeling.auto')} import register_architecture",
        f"from .{flat_name('linearize.modeling.config')} import LinearizeConfig, on_config_class  # noqa: F401",
        *(f"from .{flat_name(module)} import __name__ as _  # noqa: F401" for module in kernels),
        "",
        "on_config_class(register_architecture)",
    ]
    return (
        '"""Loads this checkpoint where linearize is not installed; written by linearize from its own modules."""\n\n'
        + "".join(f"{line}\n" for line in lines)
    )


@functools.cache
def source_of(module: str) -> str:
    """Read a module's source text.

    Raises:
        CheckpointError: if it has none (a zipped or compiled installation).
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise CheckpointError(f"the source of {module!r} is not at hand, so no code can travel with the checkpoint")
    return Path(spec.origin).read_text(encoding="utf-8")


def _closure(roots: Iterable[str]) -> list[str]:
    """Return all modules that `roots` import, directly or not, and the roots themselves."""
    found: set[str] = set()
    pending = list(roots)
    while pending:
        module = pending.pop()
        if module in found:
            continue
        if module.split(".")[1:2] and module.split(".")[1] not in PACKAGES:
            raise CheckpointError(
                f"the runtime imports {module!r}, which does not belong to it ({', '.join(PACKAGES)})"
            )
        found.add(module)
        pending.extend(_imports(source_of(module)))
    return sorted(found)


def _imports(source: str) -> list[str]:
    """List the package's modules that a source imports, inside functions too."""
    return [
        node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "linearize"
    ]
