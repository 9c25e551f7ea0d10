"""A recipe's table as Markdown, CSV or LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from linearize.experiments.results import CHANCE, Entry, Table

MARK = "*"
"""Behind a figure that was not made as the recipe says."""


def cell(entry: Entry, seeds: int, *, marked: bool = False, sign: str = "+-") -> str:
    """Write an entry: mean, deviation, number of seeds where some are missing, share of softmax, the paper's figure.

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


def marked(table: Table, label: str, column: str) -> bool:
    """Tell whether an entry was not made as the recipe says; chance is not made by a recipe."""
    return label != CHANCE and table.changes.marked(label, column)


def notes(table: Table) -> list[str]:
    """Return what a reader of a table has to know, a line each."""
    found = []
    if table.seeds > 1:
        found.append(f"Means over {table.seeds} seeds, +- the standard deviation of a single run.")
    changes = table.changes
    said = [*changes.everywhere]
    for names, what in ((changes.rows, "row"), (changes.columns, "task")):
        said += [f"{what} {name}: {', '.join(texts)}" for name, texts in names.items()]
    if said:
        found.append(f"{MARK} Not as recipe {changes.recipe} has it (its value in brackets): {'; '.join(said)}.")
    if changes.left_out:
        found.append(f"Left out of recipe {changes.recipe}: {', '.join(changes.left_out)}.")
    if table.missing:
        found.append(f"{table.missing} cells are not there yet: go on with --resume.")
    if table.damaged:
        found.append(f"{table.damaged} lines of the results are damaged and left out; --resume repairs them.")
    return found


def lines_of(table: Table, sign: str = "+-") -> list[list[str]]:
    """Return the rows of a table as texts: the row's name, then its cells."""
    return [
        [
            label,
            *(
                cell(line[column], table.seeds, marked=marked(table, label, column), sign=sign)
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
        body = [f"| {' | '.join(_markdown(text) for text in row)} |" for row in rows]
        parts.append(
            "\n".join([f"**{_markdown(table.title)}**", "", *body, "", *map(_markdown, notes(table))]).rstrip()
        )
    return "\n\n".join(parts) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_])", r"\\\1", text)


CSV = ("run", "row", "task", "mean", "deviation", "seeds", "seeds_wanted", "recovered_percent", "paper", "changed")


def to_csv(tables: Sequence[Table]) -> str:
    """Write the entries of tables as CSV, one per line; `changed` says what was not made as the recipe says."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV)
    for table in tables:
        changes = table.changes
        for label, line in table.rows.items():
            for column in table.columns:
                entry = line[column]
                said = (*changes.everywhere, *changes.rows.get(label, ()), *changes.columns.get(column, ()))
                writer.writerow(
                    [
                        table.title.partition(":")[0], label, column, entry.ours, entry.deviation, entry.seeds,
                        table.seeds, entry.recovered, entry.paper, "; ".join(said),
                    ]
                )  # fmt: skip
    return out.getvalue()


def to_latex(tables: Sequence[Table]) -> str:
    """Write tables as LaTeX `tabular`s with booktabs' rules."""
    parts = []
    for table in tables:
        rows = [_latex_row(["", *table.columns]), r"\midrule", *(_latex_row(row) for row in lines_of(table, r"$\pm$"))]
        parts.append(
            "\n".join(
                [
                    f"% {table.title}",
                    *(f"% {text}" for text in notes(table)),
                    rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
                    r"\toprule",
                    *rows,
                    r"\bottomrule",
                    r"\end{tabular}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


def _latex_row(texts: Sequence[str]) -> str:
    return " & ".join(_latex(text) for text in texts) + r" \\"


LATEX = {"\\": r"\textbackslash{}", "|": r"\textbar{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    sign: f"\\{sign}" for sign in "&%$#_{}"
}


def _latex(text: str) -> str:
    """Escape a text, but for the sign between mean and deviation."""
    return r"$\pm$".join("".join(LATEX.get(sign, sign) for sign in part) for part in text.split(r"$\pm$"))
