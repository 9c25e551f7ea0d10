"""Write the folder of a report: `index.html`, its pictures as PNG files, and the numbers as `report.json`."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from linearize.checkpoint.output import atomic_folder, claim
from linearize.core.errors import printable
from linearize.core.events import Callback, Started, ignore
from linearize.core.options import recorded
from linearize.core.parsing import finite
from linearize.evaluation.report.gather import Gathered, answer, gather
from linearize.evaluation.report.options import ReportOptions
from linearize.evaluation.report.sections import Section, make_sections

PAGE, TEMPLATE = "index.html", "page.html"


def write_report(
    options: ReportOptions, target: str, *, overwrite: bool = False, on_event: Callback = ignore
) -> Gathered:
    """Gather, draw and write a report, all or nothing.

    Args:
        options: the checkpoint, and what to measure.
        target: folder to make.
        overwrite: whether a folder that linearize wrote, and that holds nothing else, may be replaced.
        on_event: called with what happens.

    Returns:
        All data of the report.

    Raises:
        LinearizeError: one of its children, for everything the user can correct; nothing is written then.
    """
    from linearize import __version__

    with claim(target, overwrite=overwrite, sources=[options.checkpoint, options.original, options.inputs.dataset]):
        found = gather(options, on_event)
        on_event(Started("drawing"))
        sections = make_sections(found)
        kernels = ", ".join(dict.fromkeys(layer.kernel for layer in found.fidelity.layers))
        architecture = found.info.architecture or found.info.model_type
        text = page(
            f"{Path(options.checkpoint).name}: report",
            answer(found),
            f"{architecture}: linear attention ({kernels}) compared with its softmax.",
            sections,
            found.notes,
            found.left_out,
            f"Made by linearize {__version__}. The numbers are in report.json, the pictures in the folder images.",
        )
        numbers = found.to_dict() | {"options": recorded(options)}
        with atomic_folder(target, overwrite=overwrite) as folder:
            (folder / PAGE).write_text(text, encoding="utf-8")
            (folder / "report.json").write_text(json.dumps(finite(numbers), indent=2) + "\n", encoding="utf-8")
            (folder / "images").mkdir()
            for picture in (picture for section in sections for picture in section.pictures):
                (folder / "images" / f"{picture.name}.png").write_bytes(picture.png)
    return found


def page(
    title: str,
    lead: str,
    summary: str,
    sections: Sequence[Section],
    notes: Sequence[str],
    left_out: Sequence[str],
    foot: str,
) -> str:
    """Return the page as HTML; everything that is put into it is escaped.

    Args:
        title: heading.
        lead: the sentence that opens the page.
        summary: one line below it.
        sections: words, pictures and tables.
        notes: what the reader should know.
        left_out: what the page does not show, and why.
        foot: last line.
    """
    return _template().render(
        title=title, lead=lead, what=summary, sections=sections, notes=notes, left_out=left_out, foot=foot
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
