"""List where other packages ask a model who it is: `python scripts/name_consumers.py [PACKAGE ...]`.

Prints, per kind of question and file, each comparison or look-up of `model_type`, `architectures`, a class's name, a
table of class names (`MODEL_FOR_..._MAPPING_NAMES`) or the class of a config, in the installed packages' source. Run it
after an upgrade and compare with the list before: tests/modeling/test_names.py and test_pipelines.py try each kind.
Messages, which only print a name, are left out.
"""

from __future__ import annotations

import argparse
import ast
import collections
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("transformers", "peft", "sentence_transformers", "timm", "accelerate")
_DECIDES = (ast.Compare, ast.Subscript, ast.Call, ast.If, ast.IfExp, ast.BoolOp, ast.Assign)
_MESSAGES = ("warn", "warning", "warning_once", "info", "debug", "error", "print")


def kind_of(node: ast.AST) -> str | None:
    """Return what a node asks for; None if it asks for no name."""
    match node:
        case ast.Attribute(value=ast.Attribute(attr="__class__"), attr="__name__"):
            return "class name"
        case ast.Attribute(value=ast.Call(func=ast.Name("type")), attr="__name__"):
            return "class name"
        case ast.Call(func=ast.Attribute(attr="_get_name")):
            return "class name"
        case ast.Attribute(attr="model_type" | "architectures" as name) | ast.Constant(
            "model_type" | "architectures" as name
        ):
            return name
        case ast.Name(name) if name.endswith("_MAPPING_NAMES"):
            return "table of names"
    return None


def consumers(file: Path) -> Iterator[tuple[str, int, str]]:
    """Yield kind, line number and source line of each question in a file; one per line and kind."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    seen = set()

    def visit(node: ast.AST, decides: bool) -> Iterator[tuple[str, int, str]]:
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            return
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _MESSAGES:
            return
        kind = kind_of(node)
        if kind is not None and decides and (kind, node.lineno) not in seen:  # type: ignore[attr-defined]
            seen.add((kind, node.lineno))  # type: ignore[attr-defined]
            yield kind, node.lineno, lines[node.lineno - 1].strip()  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from visit(child, decides or isinstance(node, _DECIDES))

    yield from visit(ast.parse(text), decides=False)


def skipped(file: Path) -> bool:
    """Tell whether a file never meets a loaded model: converters of checkpoints, sources of generated files, tests."""
    return file.name.startswith(("convert_", "modular_", "test")) or file.name == "testing_utils.py"


def main() -> None:
    """Print all consumers, grouped by package and kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="packages to search")
    for package in parser.parse_args().packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            print(f"{package}: not installed")
            continue
        root = Path(spec.origin).parent
        groups = collections.defaultdict(list)
        for file in sorted(root.rglob("*.py")):
            for kind, line, source in () if skipped(file) else consumers(file):
                groups[kind].append(f"    {file.relative_to(root)}:{line}  {source[:110]}")
        print(f"{package} {version(package)}")
        for kind, found in sorted(groups.items()):
            print(f"  {kind} ({len(found)})", *found, sep="\n")


if __name__ == "__main__":
    main()
