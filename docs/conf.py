"""How Sphinx builds these pages: `make docs`, warnings are errors, the result is build/docs/index.html."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import linearize
from linearize.cli.main import VERBS, build_parser

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
html_static_path = ["_static"]
html_favicon = "images/icon.svg"
html_css_files = ["site.css"]
html_js_files = ["filter.js"]  # The search field above the table of models.
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# The notebook stored with outputs (`make notebooks`) shows them; the others run here, except the one of minutes.
nb_execution_mode = "auto"
nb_execution_excludepatterns = ["notebooks/long_documents.ipynb", "notebooks/convert_and_look.ipynb"]
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_output_stderr = "remove"

# A name in backticks becomes a link if it is one of ours.
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
    """Show formulas and code (indented) verbatim, signs such as in `|x|^2` as signs, and the help of options."""
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
    """Undo napoleon's change to the sentence after a value: it takes everything before a colon for a type."""
    lines[:] = OF_VALUES.get(name, lines)


def escaped(line: str) -> str:
    """Escape what reStructuredText would read as markup, except in backticks."""
    parts = line.split("`")
    return "`".join(re.sub(r"[*|]", r"\\\g<0>", part) if n % 2 == 0 else part for n, part in enumerate(parts))


def helps(kind: str, thing: Any) -> list[str]:
    """Return the help of a config's fields, as the command line prints it."""
    if kind != "class" or not dataclasses.is_dataclass(thing):
        return []
    found = [(one.name, one.metadata["help"]) for one in dataclasses.fields(thing) if one.metadata.get("help")]
    return ["", "Attributes:", *(f"    {name}: {escaped(text)}" for name, text in found), ""] if found else []


def verb_page(verb: str) -> str:
    """Return the page of a verb as Markdown: what it does, its options by group, and the end of its help."""
    parser = build_parser(verb)
    parts = [f"# linearize {verb}", parser.description or ""]
    for group in parser._action_groups:
        rows = [option_row(action) for action in group._group_actions if action.dest != "help"]
        if rows:
            parts += [f"## {(group.title or 'options').capitalize()}", "| | |\n|---|---|\n" + "\n".join(rows)]
    return "\n\n".join([*parts, f"```text\n{(parser.epilog or '').strip()}\n```", ""])


def option_row(action: argparse.Action) -> str:
    """Return the row of an option or argument."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    value = " ".join(value) if isinstance(value, tuple) else value
    names = ", ".join(action.option_strings)
    shown = f"{names} {value}".strip() if action.nargs != 0 else names
    text = re.sub(r"[*|<\[]", r"\\\g<0>", (action.help or "").replace("%%", "%"))
    return f"| `{shown.replace('|', chr(92) + '|')}` | {text} |"


def write_verb_pages(app: Any) -> None:
    """Write a page per verb into reference/cli, before Sphinx looks for pages."""
    folder = Path(app.srcdir) / "reference" / "cli"
    folder.mkdir(exist_ok=True)
    for old in set(folder.glob("*.md")) - {folder / f"{verb}.md" for verb in VERBS}:
        old.unlink()
    for verb in VERBS:
        page, text = folder / f"{verb}.md", verb_page(verb)
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def without_functions(app: Any, kind: str, name: str, thing: Any, options: Any, signature: str, returns: str) -> Any:
    """Omit signatures that contain functions or factories, and those of verbs: the fields, or their pages, say more."""
    long = name.startswith("linearize.jobs.verbs.") or "<f" in (signature or "")
    return ("(...)", returns) if signature and long else (signature, returns)


def setup(app: Any) -> None:
    """Register the hooks, around napoleon's, which turns `Args:` and the like into lists."""
    # For the kernels of the notebooks.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    app.connect("builder-inited", write_verb_pages)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)
    app.connect("autodoc-process-docstring", restore_docstring, priority=600)
    app.connect("autodoc-process-signature", without_functions)
