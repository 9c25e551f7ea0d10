"""A recipe's table as text and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from linearize.jobs.recipes.results import Entry, Table

MARK = "*"
"""Follows a figure that was not made as the recipe says."""


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
