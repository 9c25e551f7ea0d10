"""Several conversions in one picture: their figures as bars, and layer by layer as lines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from linearize.core.errors import DataError, printable
from linearize.fidelity.plots_style import FIGURES, axes_grid, new_figure, tidy, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.typing import ColorType as Colour

COLUMNS = 3
NAME = 100
"""Characters per line of a conversion's name."""
SIZE = 9
"""Points of all text, so that it can be read on a page 880 pixels wide."""
MARKERS = "os^Dv<>P"
DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
PER_LAYER = ("kl", "total_variation", "output_error")
"""Figures of single layers that are shown; the share of negative weights is zero for most kernels."""


def compare_conversions(names: Sequence[str], rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> Figure:
    """Show several conversions next to each other.

    Args:
        names: of the conversions; they are listed above the panels, which show their numbers.
        rows: their figures by key, None if a conversion lacks one; under "layers" the figures of every layer.
        labels: key -> title, of the figures to show as bars. Those of `PER_LAYER` are shown layer by layer too.

    Raises:
        DataError: if there is no conversion.
    """
    if not names:
        raise DataError("comparison: got no conversion, expected one or more; measure one first")
    single = [key for key in PER_LAYER if key in labels and any(_of_layers(row, key) for row in rows)]
    bar_rows, line_rows = -(-len(labels) // COLUMNS), -(-len(single) // COLUMNS)
    heights = [0.24 * len(names) + 0.8] * bar_rows + [2.6] * line_rows
    shown = [printable(name).replace("$", r"\$") for name in names]
    called = [textwrap.fill(f"{number}: {name}", NAME) for number, name in enumerate(shown, start=1)]
    lines_of_names = sum(text.count("\n") + 1 for text in called)
    figure = new_figure(9.5, 0.6 + 0.19 * lines_of_names + sum(heights))
    cells = axes_grid(figure, (bar_rows + line_rows) * COLUMNS, COLUMNS, heights)
    colours = _colours(len(names))
    for number, (key, label) in enumerate(labels.items()):
        _bars(cells[number], [row.get(key) for row in rows], colours)
        _title(cells[number], label)
    lines = cells[bar_rows * COLUMNS :]
    for axes, key in zip(lines, single, strict=False):
        _lines(axes, [_of_layers(row, key) for row in rows], colours)
        _title(axes, f"{labels[key]}, by layer", "converted layer")
    for empty in [*cells[len(labels) : bar_rows * COLUMNS], *lines[len(single) :]]:
        empty.set_axis_off()
    handles = [_line(number, colours) for number in range(len(names))]
    # Above all panels, where a name of any length has room.
    figure.legend(handles, called, loc="outside upper left", ncols=1, fontsize=SIZE, frameon=False, handlelength=3)
    return figure


def _title(axes: Axes, title: str, xlabel: str = "") -> None:
    tidy(axes, title, xlabel)
    axes.title.set_fontsize(SIZE)
    axes.xaxis.label.set_fontsize(SIZE)
    axes.tick_params(labelsize=SIZE)


def _line(number: int, colours: Sequence[Colour]) -> Line2D:
    """Return an empty line in a conversion's style."""
    from matplotlib.lines import Line2D

    return Line2D(
        [], [], color=colours[number], marker=MARKERS[number % len(MARKERS)], linestyle=DASHES[number % len(DASHES)],
        markersize=5, linewidth=1.4,
    )  # fmt: skip


def _of_layers(row: Mapping[str, Any], key: str) -> list[tuple[int, float]]:
    """Return (place, value) of the layers that have a figure."""
    values = [(place, layer.get(key)) for place, layer in enumerate(row.get("layers") or [])]
    return [(place, float(value)) for place, value in values if value is not None]


def _colours(count: int) -> list[Colour]:
    """Return colours from dark to light, which the colour-blind can tell apart and which differ in grey."""
    from matplotlib import colormaps

    return [colormaps[FIGURES](place) for place in np.linspace(0.05, 0.85, count)]


def _bars(axes: Axes, values: Sequence[float | None], colours: Sequence[Colour]) -> None:
    """Draw one bar per conversion with its number; a dash for a missing one."""
    places = range(len(values))
    axes.barh(places, [value or 0.0 for value in values], color=colours, height=0.7)
    for place, value in zip(places, values, strict=True):
        text = "-" if value is None else f"{value:.3g}"
        axes.annotate(
            text, (value or 0.0, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=SIZE
        )
    axes.set_yticks(places, [str(place + 1) for place in places])
    axes.invert_yaxis()
    if not any(values):
        axes.set_xlim(0, 1)
    axes.margins(x=0.25)
    axes.locator_params(axis="x", nbins=4)


def _lines(axes: Axes, lines: Sequence[Sequence[tuple[int, float]]], colours: Sequence[Colour]) -> None:
    """Draw one line over the layers per conversion that has the figure."""
    for number, points in enumerate(lines):
        if points:
            line = _line(number, colours)
            line.set_data(*np.array(points).T)
            axes.add_line(line)
    axes.autoscale_view()
    heights = [value for points in lines for _, value in points]
    # On a linear axis one distant conversion would press all others onto the axis.
    if min(heights) > 0 and max(heights) > 20 * min(heights):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    whole_numbers(axes)
