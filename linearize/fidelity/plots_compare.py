"""Several conversions in one picture: their figures as bars, and layer by layer as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from linearize.errors import DataError
from linearize.fidelity.plots_style import FIGURES, axes_grid, new_figure, tidy, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType as Colour

COLUMNS = 3
MARKERS, DASHES = "os^Dv<>P", ("-", "--", ":", "-.")
PER_LAYER = ("kl", "total_variation", "output_error")
"""Figures of single layers that are shown; the share of negative weights is zero for most kernels."""


def compare_conversions(names: Sequence[str], rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> Figure:
    """Show several conversions beside each other.

    Args:
        names: of the conversions.
        rows: their figures by key, None where there is none; under "layers" a list with the figures of every layer.
        labels: key -> title, of the figures to show as bars. Those of `PER_LAYER` are shown layer by layer too.

    Raises:
        DataError: if there is no conversion.
    """
    if not names:
        raise DataError("comparison: got no conversion, expected one or more; measure one first")
    single = [key for key in PER_LAYER if key in labels and any(_of_layers(row, key) for row in rows)]
    bar_rows, line_rows = -(-len(labels) // COLUMNS), -(-len(single) // COLUMNS)
    heights = [0.3 * len(names) + 0.7] * bar_rows + [2.5] * line_rows
    figure = new_figure(9.0, 0.5 + sum(heights))
    cells = axes_grid(figure, (bar_rows + line_rows) * COLUMNS, COLUMNS, heights)
    colours = _colours(len(names))
    for number, (key, label) in enumerate(labels.items()):
        _bars(cells[number], names if number % COLUMNS == 0 else None, [row.get(key) for row in rows], colours)
        tidy(cells[number], label)
    lines = cells[bar_rows * COLUMNS :]
    for axes, key in zip(lines, single, strict=False):
        _lines(axes, names, [_of_layers(row, key) for row in rows], colours)
        tidy(axes, f"{labels[key]}, by layer", "converted layer")
    if single:
        lines[0].legend(fontsize=6, frameon=False)
    for empty in [*cells[len(labels) : bar_rows * COLUMNS], *lines[len(single) :]]:
        empty.set_axis_off()
    return figure


def _of_layers(row: Mapping[str, Any], key: str) -> list[tuple[int, float]]:
    """Return (place, value) of the layers that have a figure."""
    found = [(place, layer.get(key)) for place, layer in enumerate(row.get("layers") or [])]
    return [(place, float(value)) for place, value in found if value is not None]


def _colours(count: int) -> list[Colour]:
    """Return colours from dark to light: they stay apart for the colour-blind and in grey."""
    from matplotlib import colormaps

    return [colormaps[FIGURES](place) for place in np.linspace(0.05, 0.85, count)]


def _bars(axes: Axes, names: Sequence[str] | None, values: Sequence[float | None], colours: Sequence[Colour]) -> None:
    """Draw one bar per conversion with its number, a dash where there is none."""
    places = range(len(values))
    axes.barh(places, [value or 0.0 for value in values], color=colours, height=0.6)
    for place, value in zip(places, values, strict=True):
        text = "-" if value is None else f"{value:.3g}"
        axes.annotate(text, (value or 0.0, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(places, names or [""] * len(values), fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.2)


def _lines(
    axes: Axes, names: Sequence[str], lines: Sequence[Sequence[tuple[int, float]]], colours: Sequence[Colour]
) -> None:
    """Draw one line over the layers per conversion that has the figure."""
    for number, (name, points) in enumerate(zip(names, lines, strict=True)):
        if points:
            axes.plot(
                *zip(*points, strict=True), color=colours[number], marker=MARKERS[number % len(MARKERS)],
                linestyle=DASHES[number % len(DASHES)], markersize=4, linewidth=1.2, label=name,
            )  # fmt: skip
    heights = [value for points in lines for _, value in points]
    # One conversion that is far off would press all others onto the axis.
    if min(heights) > 0 and max(heights) > 20 * min(heights):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    whole_numbers(axes)
