"""The code saved with a checkpoint: the package's runtime modules in one folder, with only the kernels in use.

transformers copies a checkpoint's modules, and their relative imports, from one flat folder. So each module
`linearize/a/b.py` becomes `linearize_a_b.py`, and only the names in its import statements change. The `auto_map` of
config.json points to one more small module, `modeling_linearize.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from linearize.attention.parts import PARTS
from linearize.core.errors import CheckpointError
from linearize.core.registry import kernel_info
from linearize.modeling.plan import Plan

ENTRY = "modeling_linearize"
"""Name of the module in a checkpoint's folder that loads the checkpoint if linearize is not installed."""

TRANSFORMERS = "5.17"
"""The oldest version of transformers that runs a converted model."""
ROOTS = ("linearize.modeling.config", "linearize.modeling.auto", "linearize.modeling.model")
PACKAGES = ("core", "ops", "kernels", "attention", "modeling")
"""The runtime: the packages that a converted model needs to run."""

_IMPORT = re.compile(r"^(\s*from\s+)(linearize(?:\.\w+)*)(\s+import\b)", re.MULTILINE)


def code_files(plan: Plan) -> dict[str, str]:
    """Return the code that runs a converted model if linearize is not installed.

    Args:
        plan: the plan, which names the kernels in use.

    Returns:
        The source text by file name.

    Raises:
        CheckpointError: if the code of a kernel cannot be saved.
    """
    if reason := why_not(plan):
        raise CheckpointError(reason)
    kernels = sorted({f"linearize.kernels.{layer.kernel}" for layer in plan.converted})
    files = {f"{flat_name(name)}.py": flat_text(source_of(name)) for name in _closure([*ROOTS, *kernels])}
    # The module that `auto_map` names. Importing a kernel registers it. Older versions of transformers copy only the
    # files that this one imports, so it names all of them: otherwise they would end before the version is checked.
    entry = [
        '"""Loads this checkpoint where linearize is not installed; written by linearize from its own modules."""',
        "",
        "from typing import TYPE_CHECKING",
        "",
        "import transformers",
        "from packaging.version import Version",
        "",
        f'if Version(transformers.__version__).release < Version("{TRANSFORMERS}").release:',
        "    raise ImportError(",
        f'        f"got transformers {{transformers.__version__}}, but this checkpoint needs {TRANSFORMERS} "',
        '        "or newer: pip install -U transformers"',
        "    )",
        "",
        "if TYPE_CHECKING:",
        *(f"    from .{name.removesuffix('.py')} import __name__ as _  # noqa: F401" for name in sorted(files)),
        "",
        f"from .{flat_name('linearize.modeling.auto')} import register_architecture",
        f"from .{flat_name('linearize.modeling.config')} import LinearizeConfig, on_config_class  # noqa: F401",
        *(f"from .{flat_name(module)} import __name__ as _  # noqa: F401" for module in kernels),
        "",
        "on_config_class(register_architecture)",
    ]
    return {f"{ENTRY}.py": "".join(f"{line}\n" for line in entry)} | files


def why_not(plan: Plan) -> str:
    """Return why the code cannot be saved in a checkpoint (a kernel or addition is the user's own); empty if it can."""
    own = frozenset(part.name for part in PARTS if type(part).__module__.startswith("linearize."))
    for added in sorted({name for layer in plan.converted for name in layer.hybrid.changed} - own):
        return f"addition {added!r} is not part of linearize, so its code does not travel with the checkpoint"
    for name in filter(_is_outside, (layer.kernel for layer in plan.converted)):
        origin, cure = "a script", "run the code that registers it before loading"
        if package := _package(name):
            origin, cure = f"package {package}", f"install {package} to load it, and import it first"
        return (
            f"kernel {name!r} of {origin} is not part of linearize, so its code does not travel with the checkpoint: "
            f"{cure}"
        )
    return ""


def outside_packages(plan: Plan) -> dict[str, str]:
    """Return the packages that register kernels from outside linearize, by kernel.

    A kernel registered by a script (`__main__`) has no package and is left out.
    """
    kernels = sorted({layer.kernel for layer in plan.converted})
    return {name: _package(name) for name in kernels if _is_outside(name) and _package(name)}


def _is_outside(name: str) -> bool:
    return find_spec(f"linearize.kernels.{name}") is None


def _package(name: str) -> str:
    """Return the package that registers a kernel; empty if a script does."""
    info = kernel_info(name)
    package = (info.build or info.config).__module__.partition(".")[0]
    return "" if package in ("__main__", "linearize") else package


def flat_name(module: str) -> str:
    """Return the name of a package module in a checkpoint's folder."""
    return module.replace(".", "_")


def flat_text(source: str) -> str:
    """Rewrite a module's imports to point to the flat files."""
    return _IMPORT.sub(lambda match: f"{match[1]}.{flat_name(match[2])}{match[3]}", source)


@functools.cache
def source_of(module: str) -> str:
    """Return a module's source text.

    Raises:
        CheckpointError: if there is no source file (a zipped or compiled installation).
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise CheckpointError(f"the source of {module!r} is missing, so the checkpoint's code cannot be saved")
    return Path(spec.origin).read_text(encoding="utf-8")


def _closure(roots: Iterable[str]) -> list[str]:
    """Return `roots` and all modules that they import, directly or not."""
    reached: set[str] = set()
    pending = list(roots)
    while pending:
        module = pending.pop()
        if module in reached:
            continue
        if module.split(".")[1:2] and module.split(".")[1] not in PACKAGES:
            raise CheckpointError(f"the runtime imports {module!r}, which is not in {', '.join(PACKAGES)}")
        reached.add(module)
        pending.extend(_imports(module))
    return sorted(reached)


@functools.cache
def _imports(module: str) -> tuple[str, ...]:
    """Return the package modules that a module imports, including inside functions; cached, as every save asks."""
    return tuple(name for _, name, _ in _IMPORT.findall(source_of(module)))
