"""Make the folder of a report: `index.html`, the pictures as PNG files, and the numbers as `report.json`."""

from __future__ import annotations

import json
from pathlib import Path

from linearize.events import Callback, Started, ignore
from linearize.options import recorded
from linearize.parsing import finite
from linearize.report.gather import Gathered, ReportOptions, gather

PAGE = "index.html"


def write_report(
    options: ReportOptions, target: str, *, overwrite: bool = False, on_event: Callback = ignore
) -> Gathered:
    """Gather, draw and write a report, all or nothing.

    Args:
        options: what to look at.
        target: folder to make.
        overwrite: whether a folder that linearize wrote, and that holds nothing else, may be replaced.
        on_event: called with what happens.

    Raises:
        LinearizeError: one of its children, for everything the user can put right; nothing is written then.
    """
    from linearize.checkpoint.output import claim

    with claim(target, overwrite=overwrite, sources=[options.checkpoint, options.original, options.inputs.dataset]):
        return _write(options, target, overwrite, on_event)


def _write(options: ReportOptions, target: str, overwrite: bool, on_event: Callback) -> Gathered:
    from linearize import __version__
    from linearize.checkpoint.output import atomic_folder
    from linearize.report.answer import answer
    from linearize.report.html import page
    from linearize.report.sections import make_sections

    found = gather(options, on_event)
    on_event(Started("drawing"))
    sections = make_sections(found)
    name = Path(options.checkpoint).name
    kernels = ", ".join(dict.fromkeys(layer.kernel for layer in found.fidelity.layers))
    what = f"{found.info.architecture or found.info.model_type}: linear attention ({kernels}) beside its softmax."
    foot = f"Made by linearize {__version__}. The numbers are in report.json, the pictures in the folder images."
    text = page(f"{name}: report", answer(found), what, sections, found.notes, found.left_out, foot)
    with atomic_folder(target, overwrite=overwrite) as folder:
        (folder / PAGE).write_text(text, encoding="utf-8")
        (folder / "report.json").write_text(
            json.dumps(finite(found.to_dict() | {"options": recorded(options)}), indent=2) + "\n", encoding="utf-8"
        )
        (folder / "images").mkdir()
        for picture in (picture for section in sections for picture in section.pictures):
            (folder / "images" / f"{picture.name}.png").write_bytes(picture.png)
    return found
