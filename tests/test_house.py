"""Rules of the house that a machine can check: imports point one way, importing is quick and does nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import linearize

PACKAGE = Path(linearize.__file__).parent
CHECKOUT = PACKAGE.parent

# From the ground up: a room may import those before it, and itself.
ROOMS = [
    "errors",
    "parsing",
    "registry",
    "heads",
    "ops",
    "kernels",
    "native",
    "attention",
    "modeling",
    "surgery",
    "checkpoint",
    "loading",
    "data",
    "fidelity",
    "trackers",
    "adapters",
    "distillation",
    "alignment",
    "finetune",
    "synthetic",
    "bench",
    "report",
    "conversion_options",
    "workflow",
    "demo",
    "examples",
    "experiments",
    "cli",
]
# A seam that the order cannot show: looked up by name, so that neither room is loaded with the other.
ALLOWED = {
    ("registry", "kernels"),  # the registry lists the kernels' folder when it is asked for all of them
    ("", "modeling"),  # the package's front door registers with transformers
}
RUNTIME = ["errors", "registry", "ops", "kernels", "native", "attention", "modeling"]
RUNTIME_PACKAGES = {"torch", "transformers", "linearize", "timm", "safetensors", "huggingface_hub"}


def sources():
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield path, parts[0] if parts[0] not in ("__init__", "_hook") else ""
    for path in (CHECKOUT / "cli").glob("*.py"):
        yield path, "cli"


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import; write it out"
            yield node.module or ""


def test_imports_point_down():
    bad = []
    for path, room in sources():
        for name in imports_of(path):
            if not name.startswith("linearize."):
                continue
            target = name.split(".")[1]
            if room == "" or target == room or (room, target) in ALLOWED:
                continue
            if target not in ROOMS or room not in ROOMS or ROOMS.index(target) > ROOMS.index(room):
                bad.append(f"{path.relative_to(CHECKOUT)}: {room} imports {name}")
    assert bad == []


def test_every_room_is_in_the_order():
    found = {room for _, room in sources()} - {""}
    assert found <= set(ROOMS)


def test_runtime_needs_torch_and_transformers_only():
    bad = []
    for path, room in sources():
        if room not in RUNTIME:
            continue
        for name in imports_of(path):
            top = name.split(".")[0]
            if top not in RUNTIME_PACKAGES and top not in sys.stdlib_module_names:
                bad.append(f"{path.relative_to(CHECKOUT)} imports {name}")
    assert bad == []


def test_importing_is_quick_and_loads_nothing():
    code = (
        "import json, sys, time; start = time.process_time(); import linearize; "
        "heavy = [m for m in ('torch', 'transformers', 'numpy', 'datasets', 'rich') if m in sys.modules]; "
        "print(json.dumps([time.process_time() - start, heavy]))"
    )
    best = 9.0
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, heavy = json.loads(done.stdout)
        assert heavy == []
        best = min(best, seconds)
    assert best < 0.5


def test_every_module_says_what_it_is():
    missing = [p.name for p, _ in sources() if ast.get_docstring(ast.parse(p.read_text(encoding="utf-8"))) is None]
    assert missing == []


def test_public_names_exist():
    for name in linearize.__all__:
        assert getattr(linearize, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'convrt'"):
        linearize.convrt  # noqa: B018


@pytest.mark.parametrize("limit", [500])
def test_no_file_is_a_god_file(limit):
    long = {str(p.relative_to(CHECKOUT)): n for p, _ in sources() if (n := len(p.read_text().splitlines())) > limit}
    assert long == {}


def test_the_code_writes_no_path_of_a_machine():
    bad = []
    for path, _ in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                bad += [node.value for start in ("/home/", "/root/", "/work/", "/tmp/") if node.value.startswith(start)]
    assert bad == []


def test_every_package_is_installed():
    """A folder that pyproject.toml does not name would be missing from the wheel, and only there."""
    import tomllib

    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {".".join(path.parent.relative_to(CHECKOUT).parts) for path in PACKAGE.rglob("__init__.py")}
    assert set(settings["packages"]) == found | {"linearize.cli", "linearize.recipes"}
