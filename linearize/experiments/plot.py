"""A recipe's table as a picture: the mean of each cell with its deviation, and the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from linearize.experiments.results import CHANCE, Table
from linearize.fidelity.plots_style import LINEAR, SOFTMAX, THIRD, axes_grid, new_figure, tidy, to_png
from linearize.parsing import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_results_plot(tables: Sequence[Table], path: str) -> None:
    """Draw tables and write the PNG."""
    write_file(path, "--plot", to_png(results_figure(tables))[0])


def results_figure(tables: Sequence[Table]) -> Figure:
    """Draw each task of each table: points with error bars (one standard deviation), and the paper's as crosses."""
    panels = [(table, column) for table in tables for column in table.columns]
    columns = min(4, len(panels))
    tallest = max(len(table.rows) for table in tables)
    height = (0.9 + 0.22 * tallest) * -(-len(panels) // columns)
    figure = new_figure(max(3.2, 2.4 * columns), height)
    for axes, (table, column) in zip(axes_grid(figure, len(panels), columns), panels, strict=True):
        labels = [label for label in table.rows if label != CHANCE]
        chance = table.rows[CHANCE][column].ours if CHANCE in table.rows else None
        if chance is not None:
            axes.axvline(chance, color=THIRD, linestyle=":", linewidth=1.2, label=CHANCE)
        for place, label in enumerate(labels):
            entry = table.rows[label][column]
            colour = SOFTMAX if label == "softmax" else LINEAR
            hollow = "white" if table.changes.marked(label, column) else colour
            if entry.ours is not None:
                axes.errorbar(
                    entry.ours,
                    place,
                    xerr=entry.deviation,
                    fmt="o",
                    color=colour,
                    markerfacecolor=hollow,
                    markersize=4,
                    capsize=2,
                )
            if entry.paper is not None:
                axes.plot(entry.paper, place, "x", color=THIRD, markersize=5)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        tidy(axes, column if len(tables) == 1 else f"{table.title.partition(':')[0]}: {column}")
    figure.supxlabel(
        "ours: points, bars of one standard deviation (hollow: not as the recipe says); paper: crosses; dotted: chance",
        fontsize=7,
    )
    return figure
