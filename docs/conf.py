"""How Sphinx builds these pages: `make docs`, warnings are errors, the result is build/docs/index.html."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import Any

import linearize

project = "linearize"
author = project_copyright = "The linearize authors"
release = version = linearize.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results"]
smartquotes = False  # `--resume` is no dash.
html_theme = "furo"
html_title = "linearize"
html_copy_source = False
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Notebooks show what they gave when they were run (`make notebooks`), or nothing; the tests run them anew.
nb_execution_mode = "off"

# A name in backticks is a link where it is one of ours.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 100


OF_VALUES: dict[str, list[str]] = {}
"""Docstrings of constants and attributes by their names."""


def prepare_docstring(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Show formulas and code (indented) as they stand, signs such as in `|x|^2` as signs, and the help of options."""
    shown: list[str] = []
    inside = False
    for before, line in pairwise(["", *lines]):
        indented = line.startswith("    ")
        section = bool(shown) and shown[-1].endswith(":") and shown[-1].strip()[:-1].istitle()
        if indented and not inside and not before.strip() and not section:
            shown += ["::", ""]
            inside = True
        elif line.strip() and not indented:
            inside = False
        shown.append(line if inside else escaped(line))
    lines[:] = [*shown, *helps(kind, thing)]
    if kind in ("data", "attribute"):
        OF_VALUES[name] = list(lines)


def restore_docstring(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Undo what napoleon does to the sentence behind a value: it takes all before a colon for a type."""
    lines[:] = OF_VALUES.get(name, lines)


def escaped(line: str) -> str:
    """Escape what reStructuredText would read as markup, but for what stands in backticks."""
    parts = line.split("`")
    return "`".join(re.sub(r"[*|]", r"\\\g<0>", part) if n % 2 == 0 else part for n, part in enumerate(parts))


def helps(kind: str, thing: Any) -> list[str]:
    """Return what the fields of a config say of themselves, which is what the command line prints of them."""
    if kind != "class" or not dataclasses.is_dataclass(thing):
        return []
    found = [(one.name, one.metadata["help"]) for one in dataclasses.fields(thing) if one.metadata.get("help")]
    return ["", "Attributes:", *(f"    {name}: {escaped(text)}" for name, text in found), ""] if found else []


def without_functions(app: Any, kind: str, name: str, thing: Any, options: Any, signature: str, returns: str) -> Any:
    """Leave out signatures that hold functions or factories: the fields say more."""
    return ("(...)", returns) if signature and "<f" in signature else (signature, returns)


def setup(app: Any) -> None:
    """Register the hooks, around napoleon's, which turns `Args:` and the like into lists."""
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)
    app.connect("autodoc-process-docstring", restore_docstring, priority=600)
    app.connect("autodoc-process-signature", without_functions)
