"""The picture: time and memory of softmax and kernels against length, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from linearize.core.parsing import check_file, write_file
from linearize.evaluation.bench.rows import Row, ratio
from linearize.fidelity.plots_style import LINEAR, SOFTMAX, THIRD, new_figure, tidy, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = ((LINEAR, "s", "--"), ("#56b4e9", "^", "-."), ("#009e73", "D", ":"), ("#cc79a7", "v", (0, (5, 1))))
"""Colour, marker and dashes of kernels; they repeat after four."""


def check_picture(path: str, *, overwrite: bool) -> None:
    """Refuse a file that no picture can be written to, before anything is measured.

    Raises:
        ConfigError: if it is not the name of a new PNG file.
    """
    check_file(path, "--plot", (".png",), overwrite=overwrite)


def write_plot(rows: Sequence[Row], path: str) -> None:
    """Draw rows and write the PNG."""
    write_file(path, "--plot", to_png(time_and_memory(rows))[0])


def time_and_memory(rows: Sequence[Row]) -> Figure:
    """Draw seconds and peak memory against length: the reference once, and ours of every kind.

    Args:
        rows: of one suite; a variant that did not run has no point.
    """
    figure = new_figure(8.0, 3.4)
    panels = figure.subplots(1, 2)
    for axes, label, value in (
        (panels[0], "seconds", lambda row, variant: row.seconds(variant)),
        (panels[1], "peak memory, MiB", lambda row, variant: ratio(row.memory(variant), 2**20)),
    ):
        _panel(axes, rows, value)
        axes.set_xscale("log", base=2)
        plain_decades(axes)
        lengths = sorted({row.tokens for row in rows})
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
        tidy(axes, label, "tokens")
        if axes.has_data():
            axes.legend(fontsize=7, frameon=False)
        else:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", fontsize=8)
    return figure


def plain_decades(axes: Axes) -> None:
    """Make the y axis logarithmic with plain numbers, at 1, 2 and 5 if there are only few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    drawn = [float(y) for line in axes.get_lines() for y in np.asarray(line.get_ydata())]
    narrow = bool(drawn) and max(drawn) < 300 * min(drawn)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _panel(axes: Axes, rows: Sequence[Row], value: Callable[[Row, str], float | None]) -> None:
    kinds = list(dict.fromkeys(row.what for row in rows))
    names = short_names(kinds)
    drawn: set[str] = set()
    for number, kind in enumerate(kinds):
        mine = sorted((row for row in rows if row.what == kind), key=lambda row: row.tokens)
        reference, ours = mine[0].pair
        for variant in mine[0].variants:
            points = [(row.tokens, value(row, variant)) for row in mine]
            points = [(tokens, y) for tokens, y in points if y]
            if not points or variant in drawn:
                continue
            if variant == ours:
                colour, marker, dashes = OURS[number % len(OURS)]
                name = names[number] or ours
            else:
                # The other variants are the same for every kernel.
                drawn.add(variant)
                colour, marker, dashes = (SOFTMAX, "o", "-") if variant == reference else (THIRD, ".", "-")
                name = variant
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=dashes, label=name)


def short_names(kinds: Sequence[str]) -> list[str]:
    """Remove from each name the parts (between commas) that all names share; a single name becomes empty."""
    parts = [kind.split(", ") for kind in kinds]
    shared = set(parts[0]).intersection(*parts[1:]) if parts else set()
    return [", ".join(part for part in mine if part not in shared) for mine in parts]
