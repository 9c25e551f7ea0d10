"""A recipe's table as CSV or LaTeX, and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from linearize.core.parsing import write_file
from linearize.jobs.recipes.results import CHANCE, Table, lines_of, notes_of, to_markdown
from linearize.jobs.recipes.schema import SOFTMAX

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSV = ("run", "row", "task", "mean", "deviation", "seeds", "seeds_wanted", "recovered_percent", "paper")
LATEX = {"\\": r"\textbackslash{}", "|": r"\textbar{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    sign: f"\\{sign}" for sign in "&%$#_{}"
}


def to_csv(tables: Sequence[Table]) -> str:
    """Write the entries of tables as CSV, one per line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV)
    for table in tables:
        run = table.title.partition(":")[0]
        for label, line in table.rows.items():
            for column in table.columns:
                entry = line[column]
                figures = (entry.ours, entry.deviation, entry.seeds, table.seeds, entry.recovered, entry.paper)
                writer.writerow([run, label, column, *figures])
    return out.getvalue()


def to_latex(tables: Sequence[Table]) -> str:
    """Write tables as LaTeX `tabular`s with booktabs' rules."""
    parts = []
    for table in tables:
        head, *body = [["", *table.columns], *lines_of(table, r"$\pm$")]
        lines = [f"% {text}" for text in (table.title, *notes_of(table))]
        lines += [rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule", _latex_row(head), r"\midrule"]
        lines += [*map(_latex_row, body), r"\bottomrule", r"\end{tabular}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _latex_row(texts: Sequence[str]) -> str:
    # The sign between mean and deviation is LaTeX already.
    sign = r"$\pm$"
    escaped = (sign.join("".join(LATEX.get(x, x) for x in part) for part in text.split(sign)) for text in texts)
    return " & ".join(escaped) + r" \\"


FORMATS: dict[str, Callable[[Sequence[Table]], str]] = {"md": to_markdown, "csv": to_csv, "latex": to_latex}


def write_results_plot(tables: Sequence[Table], path: str) -> None:
    """Draw tables and write the PNG."""
    from linearize.fidelity.plots_style import to_png

    write_file(path, "--plot", to_png(results_figure(tables))[0])


def results_figure(tables: Sequence[Table]) -> Figure:
    """Draw each task of each table: points with error bars (one standard deviation), and the paper's as crosses."""
    from linearize.fidelity import plots_style as style

    panels = [(table, column) for table in tables for column in table.columns]
    columns = min(4, len(panels))
    height = (0.9 + 0.22 * max(len(table.rows) for table in tables)) * -(-len(panels) // columns)
    figure = style.new_figure(max(3.2, 2.4 * columns), height)
    for axes, (table, column) in zip(style.axes_grid(figure, len(panels), columns), panels, strict=True):
        labels = [label for label in table.rows if label != CHANCE]
        chance = table.rows[CHANCE][column].ours if CHANCE in table.rows else None
        if chance is not None:
            axes.axvline(chance, color=style.THIRD, linestyle=":", linewidth=1.2, label=CHANCE)
        for place, label in enumerate(labels):
            entry = table.rows[label][column]
            color = style.SOFTMAX if label == SOFTMAX else style.LINEAR
            if entry.ours is not None:
                axes.errorbar(entry.ours, place, xerr=entry.deviation, fmt="o", color=color, markersize=4, capsize=2)
            if entry.paper is not None:
                axes.plot(entry.paper, place, "x", color=style.THIRD, markersize=5)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        style.tidy(axes, column if len(tables) == 1 else f"{table.title.partition(':')[0]}: {column}")
    figure.supxlabel(
        "ours: points, bars of one standard deviation; paper: crosses; dotted: chance",
        fontsize=7,
    )
    return figure
