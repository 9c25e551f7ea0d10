"""Write a report's folder: `index.html`, its pictures as PNG files, and the numbers as `report.json`.

The page has sections of text, pictures and tables, made from the gathered data.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from linearize.checkpoint.output import atomic_folder, claim
from linearize.checkpoint.provenance import STAGE_ONE, STAGE_TWO
from linearize.core.errors import DataError, printable
from linearize.core.events import Callback, Started, ignore
from linearize.core.figures import with_interval
from linearize.core.options import name_of, recorded
from linearize.core.parsing import finite
from linearize.evaluation.bench.rows import mebibytes, time_and_memory
from linearize.evaluation.options import ReportOptions
from linearize.evaluation.report.gather import Gathered, answer, gather
from linearize.fidelity import plots, plots_maps
from linearize.fidelity.plots_style import LEAST_WEIGHT, layer_names, to_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, TEMPLATE = "index.html", "page.html"
SCALES = {
    "weight": "All attention maps on this page share one weight scale: logarithmic, from 0.001 or less to 1.",
    "distance": "All maps of distances on this page share one scale: 0 (equal, dark) to 1 or more (bright).",
}


@dataclass(frozen=True)
class Picture:
    """One drawn picture: file name without the suffix, alternative text, caption, and the PNG with its size."""

    name: str
    alt: str
    caption: str
    png: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Section:
    """One section of the page: text, a table if it has rows, and pictures.

    The first column of the table names the row; `kind` is the kind of its cells: facts or numbers.
    """

    anchor: str
    title: str
    text: str
    pictures: Sequence[Picture] = ()
    caption: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    kind: str = "numbers"


def draw(name: str, figure: Figure, alt: str, caption: str = "") -> Picture:
    """Render a figure to a picture."""
    return Picture(name, alt, caption or alt, *to_png(figure))


def write_report(
    options: ReportOptions, target: str, *, overwrite: bool = False, on_event: Callback = ignore
) -> Gathered:
    """Gather, draw and write a report; on an error nothing is written.

    Args:
        options: the checkpoint, and what to measure.
        target: folder to create.
        overwrite: whether an existing folder may be replaced, if linearize wrote it and it holds nothing else.
        on_event: called with every event.

    Returns:
        All data of the report.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct; nothing is written then.
    """
    from linearize import __version__

    with claim(target, overwrite=overwrite, sources=[options.checkpoint, options.original, options.inputs.dataset]):
        found = gather(options, on_event)
        on_event(Started("drawing"))
        makers = (_checkpoint, _fidelity, _maps, _training, _speed)
        sections = [section for make in makers for section in make(found)]
        kernels = ", ".join(dict.fromkeys(layer.kernel for layer in found.fidelity.layers))
        architecture = found.info.architecture or found.info.model_type
        text = template().render(
            title=f"{Path(name_of(options.checkpoint)).name}: report",
            lead=answer(found),
            what=f"{architecture}: linear attention ({kernels}) compared with its softmax.",
            sections=sections,
            notes=found.notes,
            left_out=found.left_out,
            foot=f"Made by linearize {__version__}. The numbers are in report.json, the pictures in the folder images.",
        )
        numbers = found.to_dict() | {"options": recorded(options)}
        with atomic_folder(target, overwrite=overwrite) as folder:
            (folder / PAGE).write_text(text, encoding="utf-8")
            (folder / "report.json").write_text(json.dumps(finite(numbers), indent=2) + "\n", encoding="utf-8")
            (folder / "images").mkdir()
            for picture in (picture for section in sections for picture in section.pictures):
                (folder / "images" / f"{picture.name}.png").write_bytes(picture.png)
    return found


@functools.cache
def template() -> Template:
    """Return the page's template; every value inserted into it is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        # Removes control characters and those that change the text direction; jinja2 escapes markup after this.
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    return environment.get_template(TEMPLATE)


def _checkpoint(found: Gathered) -> Iterator[Section]:
    in_training = dict(found.info.provenance.training_rows())
    rows = [[label, value] for label, value in found.info.rows() if label not in in_training]
    # Reports are shared, and the layout of a user's disk is private.
    rows[0] = [rows[0][0], Path(name_of(found.info.name)).name]
    rows.append(["inputs of this report", found.inputs])
    text = "Facts about the checkpoint, from its own record."
    yield Section("checkpoint", "The checkpoint", text, (), "Facts", ["fact", "value"], rows, "facts")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


_CONTROLS = {"far_mass": "far mass", "window_error": "output error, window alone"}


def _fidelity(found: Gathered) -> Iterator[Section]:
    layers = found.fidelity.layers
    controls = {name: text for name, text in _CONTROLS.items() if found.fidelity.mean(name) is not None}
    titles = plots.FIDELITY_FIGURES | controls
    names = list(titles)
    rows = [
        [name, layer.kernel, *(_number(getattr(layer, figure)) for figure in names)]
        for name, layer in zip(layer_names([layer.module for layer in layers]), layers, strict=True)
    ]
    rows.append(["mean", "", *(_number(found.fidelity.mean(figure)) for figure in names)])
    columns = ["layer", "kernel", *titles.values()]
    if controls:
        columns.append("benefit of the kernel")
        for row, layer in zip(rows[:-1], layers, strict=True):
            alone = layer.window_error
            row.append("-" if alone is None else with_interval(alone - layer.output_error, layer.kernel_gain))
        rows[-1].append("-")
    caption = f"Kernel against softmax, layer by layer ({found.fidelity.queries:,} queries)"
    text = (
        "Every layer gets the hidden states of the frozen softmax model. KL divergence and total variation compare the "
        "weights (0: equal); the output error is the norm of the difference divided by the norm of softmax's output."
    )
    if controls:
        text += (
            " Far mass is softmax's weight outside the window. The window alone is the control: the benefit of a "
            "kernel is the difference between that error and its own, with a 95 % interval over rows."
        )
    if found.outputs is not None:
        text += (
            f" Whole models, last hidden states of {found.outputs.tokens:,} tokens compared with the original's: mean "
            f"cosine {found.outputs.cosine:.3f}, relative error {found.outputs.relative_error:.3f}."
        )
    alt = "Heat maps of KL divergence, total variation, negative share and output error per layer and head."
    picture = draw("fidelity", plots.fidelity_heatmaps(found.fidelity), alt, f"{alt} {SCALES['distance']}")
    yield Section("fidelity", "How close", text, [picture], caption, columns, rows)


def _maps(found: Gathered) -> Iterator[Section]:
    if not found.maps:
        return
    shown = "the first picture"
    if found.picture is None:
        shown = f"the first {found.maps[0].softmax.shape[-1]} tokens of the first text"
    text = (
        f"Attention of {shown}: softmax above, the kernel below. Queries run down, keys to the right. "
        f"{SCALES['weight']} Negative weights (below -{LEAST_WEIGHT:g}) are red."
    )
    alt = f"Attention maps of all {len(found.maps)} converted layers and their heads, softmax above linear."
    pictures = [draw("maps", plots_maps.attention_grid(found.maps), alt)]
    if found.picture is not None:
        try:
            figure = plots_maps.picture_maps(found.maps, found.picture)
            alt = "The class token's attention laid over the picture, per layer, softmax next to linear."
            pictures.append(draw("picture", figure, alt, f"{alt} Mean over heads; bright is high. {SCALES['weight']}"))
        except DataError as error:
            found.left_out.append(f"Maps over the picture: {error}.")
    yield Section("maps", "Attention maps", text, pictures)


def _training(found: Gathered) -> Iterator[Section]:
    pictures = []
    made = found.info.provenance
    chance = made.part("finetuning").number("chance")
    for stage, make, title in (
        (STAGE_ONE, plots.stage_one_curves, "Stage one's losses, step by step."),
        (STAGE_TWO, partial(plots.stage_two_curves, chance=chance), "Stage two's loss and score, step by step."),
    ):
        if not any(line["stage"] == stage for line in found.log):
            continue
        try:
            pictures.append(draw(stage, make(found.log), title))
        except DataError as error:
            found.left_out.append(f"{str(error).partition(';')[0]}.".capitalize())
    rows = [[label, value] for label, value in made.training_rows()]
    if pictures or rows:
        text, caption = "From the log in the checkpoint's folder.", "Training, from the checkpoint's record"
        yield Section("training", "Training", text, pictures, caption, ["", "value"], rows, "facts")


def _speed(found: Gathered) -> Iterator[Section]:
    if not found.speeds:
        return
    rows = [
        [
            f"{row.tokens:,}",
            *(_number(row.seconds(side)) for side in row.pair),
            "-" if row.speedup is None else f"{row.speedup:.2f}",
            *(mebibytes(row.memory(side)) for side in row.pair),
        ]
        for row in found.speeds
    ]
    columns = ["tokens", "softmax, s", "linear, s", "times faster", "softmax, MiB", "linear, MiB"]
    text = (
        "One forward pass of one input without the head, medians over turns in which the two sides alternate; the "
        "softmax side is the same checkpoint computing softmax (SDPA). Memory is the peak above the loaded model, in a "
        "separate process per side. Short inputs do not gain: the crossover depends on the model and the machine."
    )
    if found.noise is not None:
        text += f" The machine was {found.noise.text}."
    alt = "Seconds and peak memory against the length of the input, softmax next to linear."
    picture = draw("speed", time_and_memory(found.speeds), alt)
    yield Section("speed", "Time and memory", text, [picture], "Time and memory", columns, rows)
