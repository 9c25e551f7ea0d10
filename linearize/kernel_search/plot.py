"""The picture of a search: error of the whole model against time of its attentions, one point per choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from linearize.fidelity.plots_style import LINEAR, SOFTMAX, THIRD, new_figure, tidy, to_png
from linearize.kernel_search.result import SearchResult
from linearize.parsing import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_plot(result: SearchResult, path: str) -> None:
    """Draw the points and write the PNG."""
    write_file(path, "--plot", to_png(error_against_time(result))[0])


def error_against_time(result: SearchResult) -> Figure:
    """Draw all points by name; those that no other one beats are joined by a line."""
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    front = sorted((one for one in result.points if one.efficient), key=lambda one: one.seconds)
    axes.plot([one.seconds for one in front], [one.error for one in front], color=THIRD, linestyle=":", zorder=1)
    for one in result.points:
        plan = one.name.startswith("the plan")
        softmax = one.name.startswith("softmax")
        colour, marker = (LINEAR, "*") if plan else (SOFTMAX, "o") if softmax else (THIRD, "s")
        size, above = (160, 3) if plan else (40, 2)
        axes.scatter(one.seconds, one.error, color=colour, marker=marker, s=size, zorder=above)
        place = (6, 8) if plan else (6, -10)
        axes.annotate(one.name, (one.seconds, one.error), xytext=place, textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.margins(0.18)
    title = f"Whole model against its original ({result.figure})"
    tidy(axes, title, f"seconds of all attentions, {result.length:,} tokens", f"error, {result.figure}")
    return figure
