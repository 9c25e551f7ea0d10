"""Rules of the code that a machine can check: imports point one way, importing is quick and does nothing."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import linearize
from linearize.modeling.portable import ROOTS, _closure

PACKAGE = Path(linearize.__file__).parent
CHECKOUT = PACKAGE.parent

# From the ground up: a package or module may import those before it, and itself.
ORDER = [
    *("core", "ops", "kernels", "attention", "modeling", "conversion", "checkpoint", "data", "fidelity", "training"),
    *("evaluation", "export", "kernel_search", "jobs", "vllm", "cli"),
]
# The one arrow up: the registry imports the kernels' folder when it is asked for all of them.
ALLOWED = {("core", "kernels")}
RUNTIME_PACKAGES = {"torch", "transformers", "linearize", "timm", "safetensors", "huggingface_hub"}


def sources():
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield path, parts[0] if parts[0] not in ("__init__", "_hook") else ""
    for path in (CHECKOUT / "cli").glob("*.py"):
        yield path, "cli"


def module_name(path):
    base, start = (PACKAGE, "linearize") if path.is_relative_to(PACKAGE) else (CHECKOUT / "cli", "linearize.cli")
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join((start, *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_name(path): path for path, _ in sources()}


def typing_only(tree):
    """The nodes that only a type checker reads."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    return {id(inner) for block in blocks for statement in block.body for inner in ast.walk(statement)}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path, typing=False):
    """What a file imports, in functions too; beside import statements the modules that it names to `import_module`,
    `__import__` or a table of a lazy `__getattr__`, as a whole (`linearize.a.b`, `linearize.a.b:name`). With `typing`
    also what only a type checker reads."""
    return list(_imports(path, typing))


def _imports(path, typing):
    tree = parsed(path)
    unread = set() if typing else typing_only(tree)
    nodes = [node for node in ast.walk(tree) if id(node) not in unread]
    called = {getattr(node, "id", None) or getattr(node, "attr", None) for node in nodes}
    lazy = called & {"import_module", "__import__"} or any(getattr(n, "name", None) == "__getattr__" for n in nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import; write it out"
            wholes = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (whole if whole in MODULES else node.module or "" for whole in wholes)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if name in MODULES and (lazy or ":" in node.value):
                yield name


def graph(typing=False):
    """Which modules of the package a module imports: {name: {name}}."""
    return {
        name: {found for found in imports_of(path, typing) if found in MODULES} - {name, "linearize"}
        for name, path in MODULES.items()
    }


def circles(arrows):
    """The strongly connected parts of a graph that have more than one member (Tarjan 1972)."""
    order, low, stack, found = {}, {}, [], []

    def visit(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in arrows.get(node, ()):
            if other not in order:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in arrows:
        if node not in order:
            visit(node)
    return found


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}) == [["b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert sorted(map(tuple, circles({"a": {"b"}, "b": {"a"}, "c": {"d", "a"}, "d": {"c"}}))) == [
        ("a", "b"),
        ("c", "d"),
    ]


def test_hidden_imports_are_read(tmp_path):
    file, other = tmp_path / "lazy.py", tmp_path / "table.py"
    file.write_text(
        "import importlib\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import linearize.jobs.demo\n"
        "def one():\n    from linearize.core import errors\n"
        "    return importlib.import_module('linearize.core.parsing')\n"
        "TABLE = {'a': 'linearize.core.registry:kernel_info'}\nNOTE = 'linearize.core.parsing is a module'\n"
    )
    assert set(imports_of(file)) == {
        "importlib",
        "typing",
        "linearize.core.errors",
        "linearize.core.parsing",
        "linearize.core.registry",
    }
    other.write_text("TABLE = {'a': 'linearize.core.registry'}\ndef __getattr__(name):\n    return TABLE[name]\n")
    assert set(imports_of(other)) == {"linearize.core.registry"}


@pytest.mark.parametrize("typing", [False, True])
def test_no_import_circle(typing):
    """Whichever of two modules is read first, the other does not need it: imports in functions and of types count."""
    assert circles(graph(typing)) == []


@pytest.mark.slow
def test_a_module_can_be_the_first_to_be_imported():
    """Importing transformers' Auto classes runs our registration: modules that it needs must not be half read then."""
    subprocess.run([sys.executable, "-c", "import linearize.modeling.config"], check=True)


def test_imports_point_down():
    bad, used = [], set()
    for path, part in sources():
        for name in imports_of(path):
            if not name.startswith("linearize."):
                continue
            target = name.split(".")[1]
            if (part, target) in ALLOWED:
                used.add((part, target))
            elif part == "" or target == part:
                continue
            elif target not in ORDER or part not in ORDER or ORDER.index(target) > ORDER.index(part):
                bad.append(f"{path.relative_to(CHECKOUT)}: {part} imports {name}")
    assert bad == []
    assert used == ALLOWED, "an exception that nothing needs"


def test_every_package_is_in_the_order():
    found = {part for _, part in sources()} - {""}
    assert found <= set(ORDER)


def test_runtime_needs_torch_and_transformers_only():
    """What travels with checkpoints, and what calls the compiled op, runs without the other dependencies."""
    travels = {name for name in MODULES if name.startswith("linearize.kernels.")} | set(_closure(ROOTS))
    native = {name for name in MODULES if name.startswith("linearize.attention.native")}
    bad = []
    for module in sorted(travels | native):
        for name in imports_of(MODULES[module]):
            top = name.split(".")[0]
            if top not in RUNTIME_PACKAGES and top not in sys.stdlib_module_names:
                bad.append(f"{module} imports {name}")
    assert bad == []


def test_importing_is_quick_and_loads_nothing():
    code = (
        "import json, sys; before = set(sys.modules); import linearize; "
        "heavy = [m for m in ('torch', 'transformers', 'numpy', 'datasets', 'rich') if m in sys.modules]; "
        "print(json.dumps([len(set(sys.modules) - before), heavy]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, heavy = json.loads(done.stdout)
    assert heavy == [] and modules < 60


def test_interpreters_are_started_without_the_current_folder():
    """Without -P, `python -c` would import a downloaded folder's yaml.py in place of the library."""
    started = [
        (path.name, node.lineno, [getattr(x, "value", None) for x in node.elts[1:2]])
        for path, _ in sources()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable"
    ]
    assert started and [start for start in started if start[2] != ["-P"]] == []


def test_no_two_test_files_have_one_name():
    """Pytest cannot collect both of them in one run."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_every_module_says_what_it_is():
    missing = [p.name for p, _ in sources() if ast.get_docstring(parsed(p)) is None]
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
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                bad += [node.value for start in ("/home/", "/root/", "/work/", "/tmp/") if node.value.startswith(start)]
    assert bad == []


def test_every_package_is_installed():
    """A folder that pyproject.toml does not name would be missing from the wheel, and only there."""
    import tomllib

    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {".".join(path.parent.relative_to(CHECKOUT).parts) for path in PACKAGE.rglob("__init__.py")}
    assert set(settings["packages"]) == found | {"linearize.cli", "linearize.recipes"}


def test_every_file_is_installed():
    """Templates, style sheets and C sources are read at run time: one that pyproject.toml forgets is missing there."""
    import tomllib

    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    installed = set()
    for package, patterns in settings["package-data"].items():
        folder = CHECKOUT / settings["package-dir"].get(package, package.replace(".", "/"))
        installed |= {path for pattern in patterns for path in folder.glob(pattern)}
    read = (".md", ".html", ".css", ".c", ".h", ".inc", ".typed")
    assert [str(path) for path in PACKAGE.rglob("*") if path.suffix in read and path not in installed] == []


def parameters(function):
    """How many parameters a function has, without the object or class that it belongs to, * and **."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@pytest.mark.parametrize("part", ["ops", "kernels", "attention", "jobs"])
def test_no_function_has_many_parameters(part):
    functions = [
        (path, node)
        for path in (PACKAGE / part).rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    # What runs on a GPU gets pointers, strides and sizes one by one.
    functions = [pair for pair in functions if not any("triton" in ast.unparse(d) for d in pair[1].decorator_list)]
    assert functions
    assert [f"{path.name}: {node.name}" for path, node in functions if parameters(node) > 8] == []


def test_what_calls_the_compiled_op_does_not_travel_with_checkpoints():
    """Not even for a type: the folder of a checkpoint has no library beside its code."""
    found = _closure(ROOTS)
    assert "linearize.attention.native" in found and "linearize.attention.native.calls" not in found


@pytest.mark.parametrize("folder", ["scripts", "benchmarks", "tests/gpu", "examples"])
def test_what_is_rarely_run_imports_what_exists(folder):
    """`make gpu` imported a name that had moved: no other machine runs that line."""
    imported = [
        (node.module, alias.name)
        for path in (CHECKOUT / folder).rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "linearize"
        for alias in node.names
    ]
    missing = []
    for module, name in imported:
        if not hasattr(importlib.import_module(module), name) and f"{module}.{name}" not in MODULES:
            missing.append(f"{module}.{name}")
    assert imported
    assert not missing
