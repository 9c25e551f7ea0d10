"""Pictures of how close linear attention is to softmax, as matplotlib figures that are neither shown nor saved.

    from linearize.fidelity import measure
    from linearize.fidelity.plots import fidelity_heatmaps
    fidelity_heatmaps(measure(original, converted, batches)).savefig("heads.png")

Maps of the attention itself are in `plots_maps`. matplotlib is imported when the first figure is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from linearize.checkpoint.provenance import STAGE_ONE, STAGE_TWO, Record
from linearize.core.errors import DataError
from linearize.core.registry import Values
from linearize.fidelity import plots_style as style
from linearize.fidelity.measure import Fidelity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIDELITY_FIGURES = {
    "kl": "KL divergence, nats per query",
    "total_variation": "total variation",
    "negative_share": "share of negative weights",
    "output_error": "error of the head's output",
}


def fidelity_heatmaps(fidelity: Fidelity) -> Figure:
    """Show KL, total variation, negative share and output error per layer and head; bright means far from softmax.

    All share one colour scale, which ends at 1; the numbers in the cells may be larger.

    Raises:
        DataError: if there is no converted layer.
    """
    shown = [name for name in FIDELITY_FIGURES if any(name in layer.heads for layer in fidelity.layers)]
    if not shown:
        raise DataError("fidelity heat maps: got no converted layer, expected at least one; measure a converted model")
    heads = max(len(layer.heads["output_error"]) for layer in fidelity.layers)
    names = style.layer_names([layer.module for layer in fidelity.layers])
    figure = style.new_figure(max(8.0, 1.0 * heads), 1.2 + 2 * max(1.5, 0.28 * len(names) + 0.5))
    for axes, name in zip(style.axes_grid(figure, len(shown), 2), shown, strict=True):
        table = np.full((len(names), heads), np.nan)
        for row, layer in enumerate(fidelity.layers):
            values = layer.heads.get(name, [])
            table[row, : len(values)] = values
        image = axes.imshow(table, cmap=style.FIGURES, aspect="auto", vmin=0.0, vmax=1.0)
        bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
        bar.set_ticks([0, 0.5, 1], labels=["0", "0.5", "≥1"])
        bar.ax.tick_params(labelsize=7)
        bar.set_label(style.DISTANCE_SCALE, fontsize=6.5)
        style.tidy(axes, FIDELITY_FIGURES[name], "head")
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_xticks(range(heads))
        # Numbers are written if there is room.
        for (row, column), value in np.ndenumerate(table if table.size <= 200 else table[:0]):
            if np.isfinite(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
                axes.text(column, row, _brief(float(value)), ha="center", va="center", fontsize=6.5, color=ink)
    return figure


def _brief(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) < 0.005:
        # Python writes 7e-05.
        return f"{value:.0e}".replace("e-0", "e-")
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def stage_one_curves(log: Sequence[Mapping[str, object]]) -> Figure:
    """Show stage one's losses from the lines of `log.jsonl`.

    Raises:
        DataError: if there is no line with losses.
    """
    lines = [(step, line) for step, line in _lines(log, STAGE_ONE) if line.numbers("losses")]
    if not lines:
        raise DataError("curves of stage one: got a log without losses; give the lines of log.jsonl")
    figure = style.new_figure(7.5, 3.2)
    axes = figure.subplots()
    steps, losses = [step for step, _ in lines], [line.numbers("losses") for _, line in lines]
    for number, layer in enumerate(losses[0]):
        known = [one.get(layer, np.nan) for one in losses]
        label = None if number else "single layers"
        axes.plot(steps, known, color=style.THIRD, linewidth=0.6, alpha=0.6, label=label)
    means = [np.mean(list(one.values())) for one in losses]
    axes.plot(steps, means, color=style.SOFTMAX, linewidth=1.6, label="training batches, mean of the layers")
    _measured(axes, lines, "held_out", "held out")
    style.tidy(axes, "Stage one: how far each layer is from softmax", "step", "loss")
    _finish(axes)
    return figure


def stage_two_curves(log: Sequence[Mapping[str, object]], chance: float | None = None) -> Figure:
    """Show stage two's loss and score from the lines of `log.jsonl`.

    Args:
        log: the lines.
        chance: the score of random guessing; None if unknown.

    Raises:
        DataError: if there is no line with a loss or a metric.
    """
    lines = _lines(log, STAGE_TWO)
    losses = _points(lines, "loss")
    if not (losses or _points(lines, "eval_loss") or _points(lines, "eval_score")):
        raise DataError("curves of stage two: got a log without losses; give the lines of log.jsonl")
    figure = style.new_figure(7.5, 3.2)
    left, right = figure.subplots(1, 2)
    if losses:
        left.plot(*zip(*losses, strict=True), color=style.SOFTMAX, linewidth=1.4, label="training")
    _measured(left, lines, "eval_loss", "validation")
    style.tidy(left, "Stage two: loss", "step", "loss")
    _measured(right, lines, "eval_score")
    if chance is not None:
        right.axhline(chance, color=style.THIRD, linestyle=":", linewidth=1.2, label="chance")
    style.tidy(right, "the task's score on validation rows", "step", "score")
    _finish(left)
    _finish(right)
    return figure


def _lines(log: Sequence[Mapping[str, object]], stage: str) -> list[tuple[float, Record]]:
    """Return the lines of one stage that have a step, with their steps; lines without a stage belong to any."""
    mine = (Record(line) for line in log if line.get("stage", stage) == stage)
    return [(step, line) for line in mine if (step := line.number("step")) is not None]


def _points(lines: Sequence[tuple[float, Record]], key: str) -> list[tuple[float, float]]:
    """Return step and figure of the lines that contain the figure."""
    return [(step, figure) for step, line in lines if (figure := line.number(key)) is not None]


def _measured(axes: Axes, lines: Sequence[tuple[float, Record]], key: str, label: str | None = None) -> None:
    """Draw one figure from the lines that contain it."""
    if points := _points(lines, key):
        look: Values = {"color": style.LINEAR, "linestyle": "--", "marker": "s", "markersize": 4}
        axes.plot(*zip(*points, strict=True), label=label, **look)


def _finish(axes: Axes) -> None:
    """Put ticks only at whole steps, and explain the lines that have a label."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)
