"""Write linearize/jobs/verbs.pyi, from which editors and type checkers know every verb's options.

`python scripts/write_stub.py` reads the signatures of the functions in linearize/jobs/verbs.py, which come from the
options of the jobs. Run it after an option was added or changed; a test fails if the file is not up to date.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from pathlib import Path

from linearize.jobs import verbs

SOURCE = Path(inspect.getfile(verbs))
STUB = SOURCE.with_suffix(".pyi")
LONGEST = 60
"""Characters of a default that is written out; a longer one, or one without a literal, is `...`."""


def stub() -> str:
    """Return the text of the stub."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    written = [function(node, inspect.signature(getattr(verbs, node.name))) for node in functions]
    text = "\n".join(written)
    imports = ["from collections.abc import Mapping, Sequence"] * ("Mapping[" in text) + [""]
    places = {name: module for name, module in imported(tree).items() if re.search(rf"\b{name}\b", text)}
    imports += sorted(f"from {module} import {name}" for name, module in places.items())
    return "\n".join(imports) + f"\n\n{text}"


def imported(tree: ast.Module) -> Mapping[str, str]:
    """Return the module of every name of ours that the source imports, and of the classes that options hold."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name: str(node.module) for node in froms for alias in node.names if alias.asname is None}
    for name, thing in vars(verbs).items():
        if inspect.isfunction(thing) and thing.__module__ == verbs.__name__:
            shown = " ".join(str(parameter.annotation) for parameter in inspect.signature(thing).parameters.values())
            names |= {name: module for module, name in re.findall(r"\b(linearize[\w.]*)\.(\w+)", shown)}
    return {name: module for name, module in names.items() if module.startswith("linearize")}


def function(node: ast.FunctionDef, signature: inspect.Signature) -> str:
    """Return one function of the stub."""
    lines, named = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            lines, named = [*lines, "*"], True
        annotation = parameter.annotation
        text = annotation.__name__ if inspect.isclass(annotation) else re.sub(r"[\w.]+\.(\w+)", r"\1", str(annotation))
        lines.append(f"{parameter.name}: {text}{default(parameter.default)}")
    parameters = "".join(f"    {line},\n" for line in lines)
    assert node.returns is not None
    return f"""\
def {node.name}(
{parameters}) -> {ast.unparse(node.returns)}:
    \"\"\"{ast.get_docstring(node)}\"\"\"
"""


def default(value: object) -> str:
    """Return a parameter's default as written after it."""
    if value is inspect.Parameter.empty:
        return ""
    shown = repr(value).replace("'", '"')
    literal = value is None or isinstance(value, bool | int | float | str | tuple)
    return f" = {shown}" if literal and len(shown) <= LONGEST else " = ..."


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
