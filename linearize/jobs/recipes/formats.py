"""A recipe's table as Markdown, CSV or LaTeX, and as a picture."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from linearize.core.parsing import write_file
from linearize.jobs.recipes.results import CHANCE, Entry, Table
from linearize.jobs.recipes.schema import SOFTMAX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARK = "*"
"""Follows a figure that was not made as the recipe says."""
CSV = ("run", "row", "task", "mean", "deviation", "seeds", "seeds_wanted", "recovered_percent", "paper", "changed")
LATEX = {"\\": r"\textbackslash{}", "|": r"\textbar{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    sign: f"\\{sign}" for sign in "&%$#_{}"
}


def cell(entry: Entry, seeds: int, *, marked: bool = False, sign: str = "+-") -> str:
    """Write an entry: mean, deviation, number of seeds if some are missing, share of softmax, the paper's figure.

    Args:
        entry: the entry.
        seeds: how many seeds the table has.
        marked: whether it was not made as the recipe says.
        sign: between mean and deviation.
    """
    ours = "-" if entry.ours is None else f"{entry.ours:.2f}{MARK if marked else ''}"
    ours += "" if entry.deviation is None else f" {sign} {entry.deviation:.2f}"
    ours += f" n={entry.seeds}" if 0 < entry.seeds < seeds else ""
    share = "" if entry.recovered is None else f" ({entry.recovered:.1f} %)"
    paper = "" if entry.paper is None else f" | {entry.paper:.1f}"
    return f"{ours}{share}{paper}"


def notes(table: Table) -> list[str]:
    """Return what a reader of a table must know, one line each."""
    lines = []
    if table.seeds > 1:
        lines.append(f"Means over {table.seeds} seeds, +- the standard deviation of a single run.")
    changes = table.changes
    texts = [*changes.everywhere]
    for kind, sections in (("row", changes.rows), ("task", changes.columns)):
        texts += [f"{kind} {name}: {', '.join(differing)}" for name, differing in sections.items()]
    if texts:
        lines.append(f"{MARK} Not as in recipe {changes.recipe} (its value in brackets): {'; '.join(texts)}.")
    if changes.left_out:
        lines.append(f"Left out of recipe {changes.recipe}: {', '.join(changes.left_out)}.")
    if table.missing:
        lines.append(f"{table.missing} cells are missing: continue with --resume.")
    if table.damaged:
        lines.append(f"{table.damaged} lines of the results are damaged and left out; --resume repairs them.")
    return lines


def lines_of(table: Table, sign: str = "+-") -> list[list[str]]:
    """Return the rows of a table as texts: the row's name, then its cells."""
    return [
        [
            label,
            *(
                cell(line[column], table.seeds, marked=bool(table.changes.of(label, column)), sign=sign)
                for column in table.columns
            ),
        ]
        for label, line in table.rows.items()
    ]


def to_markdown(tables: Sequence[Table]) -> str:
    """Write tables as Markdown, with their notes."""
    parts = []
    for table in tables:
        rows = [["", *table.columns], ["---", *("---:" for _ in table.columns)], *lines_of(table, "±")]
        body = [f"| {' | '.join(map(_markdown, row))} |" for row in rows]
        lines = [f"**{_markdown(table.title)}**", "", *body, "", *map(_markdown, notes(table))]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_])", r"\\\1", text)


def to_csv(tables: Sequence[Table]) -> str:
    """Write the entries of tables as CSV, one per line; `changed` says what was not made as the recipe says."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV)
    for table in tables:
        run = table.title.partition(":")[0]
        for label, line in table.rows.items():
            for column in table.columns:
                entry, changed = line[column], "; ".join(table.changes.of(label, column))
                figures = (entry.ours, entry.deviation, entry.seeds, table.seeds, entry.recovered, entry.paper)
                writer.writerow([run, label, column, *figures, changed])
    return out.getvalue()


def to_latex(tables: Sequence[Table]) -> str:
    """Write tables as LaTeX `tabular`s with booktabs' rules."""
    parts = []
    for table in tables:
        head, *body = [["", *table.columns], *lines_of(table, r"$\pm$")]
        lines = [f"% {text}" for text in (table.title, *notes(table))]
        lines += [rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule", _latex_row(head), r"\midrule"]
        lines += [*map(_latex_row, body), r"\bottomrule", r"\end{tabular}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _latex_row(texts: Sequence[str]) -> str:
    return " & ".join(map(_latex, texts)) + r" \\"


def _latex(text: str) -> str:
    # The sign between mean and deviation is LaTeX already.
    return r"$\pm$".join("".join(LATEX.get(sign, sign) for sign in part) for part in text.split(r"$\pm$"))


FORMATS: dict[str, Callable[[Sequence[Table]], str]] = {"md": to_markdown, "csv": to_csv, "latex": to_latex}


def write_results_plot(tables: Sequence[Table], path: str) -> None:
    """Draw tables and write the PNG."""
    from linearize.fidelity.plots_style import to_png

    write_file(path, "--plot", to_png(results_figure(tables))[0])


def results_figure(tables: Sequence[Table]) -> Figure:
    """Draw each task of each table: points with error bars (one standard deviation), and the paper's as crosses."""
    from linearize.fidelity.plots_style import axes_grid, new_figure, tidy

    panels = [(table, column) for table in tables for column in table.columns]
    columns = min(4, len(panels))
    tallest = max(len(table.rows) for table in tables)
    height = (0.9 + 0.22 * tallest) * -(-len(panels) // columns)
    figure = new_figure(max(3.2, 2.4 * columns), height)
    for axes, (table, column) in zip(axes_grid(figure, len(panels), columns), panels, strict=True):
        _draw(axes, table, column)
        tidy(axes, column if len(tables) == 1 else f"{table.title.partition(':')[0]}: {column}")
    figure.supxlabel(
        "ours: points, bars of one standard deviation (hollow: not as the recipe says); paper: crosses; dotted: chance",
        fontsize=7,
    )
    return figure


def _draw(axes: Axes, table: Table, column: str) -> None:
    from linearize.fidelity import plots_style as style

    labels = [label for label in table.rows if label != CHANCE]
    chance = table.rows[CHANCE][column].ours if CHANCE in table.rows else None
    if chance is not None:
        axes.axvline(chance, color=style.THIRD, linestyle=":", linewidth=1.2, label=CHANCE)
    for place, label in enumerate(labels):
        entry = table.rows[label][column]
        if entry.ours is not None:
            color = style.SOFTMAX if label == SOFTMAX else style.LINEAR
            fill = "white" if table.changes.of(label, column) else color
            point: dict[str, Any] = {"fmt": "o", "color": color, "markerfacecolor": fill, "markersize": 4, "capsize": 2}
            axes.errorbar(entry.ours, place, xerr=entry.deviation, **point)
        if entry.paper is not None:
            axes.plot(entry.paper, place, "x", color=style.THIRD, markersize=5)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
