"""Compare several conversions in one picture, with their figures as bars."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from linearize.core.errors import DataError, printable
from linearize.fidelity.plots_style import FIGURES, axes_grid, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 3
NAME = 100
"""Characters per line of a conversion's name."""
SIZE = 9
"""Font size in points, so that text is readable on a page 880 pixels wide."""


def compare_conversions(names: Sequence[str], rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> Figure:
    """Show several conversions next to each other.

    Args:
        names: names of the conversions; they are listed and numbered above the panels, which show only the numbers.
        rows: figures of each conversion by key; None if a figure is missing.
        labels: the figures to show, as key -> title.

    Raises:
        DataError: if there is no conversion.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    if not names:
        raise DataError("comparison: got no conversion, expected one or more; measure one first")
    shown = [printable(name).replace("$", r"\$") for name in names]
    captions = [textwrap.fill(f"{number}: {name}", NAME) for number, name in enumerate(shown, start=1)]
    lines_of_names = sum(text.count("\n") + 1 for text in captions)
    panels = -(-len(labels) // COLUMNS)
    figure = new_figure(9.5, 0.6 + 0.19 * lines_of_names + panels * (0.24 * len(names) + 0.8))
    # From dark to light: distinguishable for the colour-blind and in greyscale.
    colours = [colormaps[FIGURES](place) for place in np.linspace(0.05, 0.85, len(names))]
    for axes, (key, label) in zip(axes_grid(figure, len(labels), COLUMNS), labels.items(), strict=True):
        values = [row.get(key) for row in rows]
        axes.barh(range(len(values)), [value or 0.0 for value in values], color=colours, height=0.7)
        for place, value in enumerate(values):
            # A dash stands for a missing figure.
            text, end = "-" if value is None else f"{value:.3g}", (value or 0.0, place)
            axes.annotate(text, end, xytext=(3, 0), textcoords="offset points", va="center", fontsize=SIZE)
        axes.set_yticks(range(len(values)), [str(number) for number in range(1, len(values) + 1)])
        axes.invert_yaxis()
        if not any(values):
            axes.set_xlim(0, 1)
        axes.margins(x=0.25)
        axes.locator_params(axis="x", nbins=4)
        tidy(axes, label)
        axes.title.set_fontsize(SIZE)
        axes.tick_params(labelsize=SIZE)
    # Put the legend above all panels, where there is room for a name of any length.
    handles = [Patch(color=colour) for colour in colours]
    figure.legend(handles, captions, loc="outside upper left", ncols=1, fontsize=SIZE, frameon=False, handlelength=3)
    return figure
