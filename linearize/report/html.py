"""The page of a report, from the template `page.html`: everything that goes into it is escaped."""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from linearize.errors import printable
from linearize.report.sections import Section

TEMPLATE = "page.html"


def page(
    title: str,
    lead: str,
    what: str,
    sections: Sequence[Section],
    notes: Sequence[str],
    left_out: Sequence[str],
    foot: str,
) -> str:
    """Write the page.

    Args:
        title: heading.
        lead: the sentence that the page opens with.
        what: one line below it.
        sections: what is shown.
        notes: what the reader has to know.
        left_out: what is not there, and why.
        foot: last line.
    """
    return _template().render(
        title=title, lead=lead, what=what, sections=sections, notes=notes, left_out=left_out, foot=foot
    )


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=_shown,
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    return environment.get_template(TEMPLATE)


def _shown(value: Any) -> Any:
    """Replace characters that would steer a terminal or turn a text's direction; jinja2 escapes markup after this."""
    return value if isinstance(value, Markup) else printable(str(value))
