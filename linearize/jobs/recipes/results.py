"""The rows of `results.jsonl`, the table made from them, and how a run differs from the recipe it is based on.

Also the table as lines of text and as Markdown.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from linearize.core.errors import DataError
from linearize.core.options import read_values
from linearize.core.parsing import parse_json, user_path, write_file
from linearize.core.registry import ReadOnlyValues, Values
from linearize.jobs.recipes.recipe import AVERAGE, cells, check, load_recipe, plain, recipe_names, resolve
from linearize.jobs.recipes.schema import CHANCE, FREE, SOFTMAX, Recipe
from linearize.training.stage_two.tasks import Task, recovery

RESULTS = "results.jsonl"
RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Entry:
    """One cell as shown in tables: means over seeds.

    Attributes:
        ours: our figure, in the paper's unit (points for shares); None if it was not measured yet.
        paper: the paper's figure, or None.
        recovered: share of the softmax model's score above chance, percent; None if that model is not above chance.
        seeds: number of seeds that `ours` is the mean of.
        deviation: sample standard deviation (n - 1) over the seeds, in the unit of `ours`; None for fewer than two.
    """

    ours: float | None
    paper: float | None
    recovered: float | None
    seeds: int
    deviation: float | None = None


@dataclass(frozen=True)
class Table:
    """A recipe's table.

    Attributes:
        title: title in one line.
        columns: names of the tasks, and "average" if there is more than one.
        rows: entries by row and column; the last row is `CHANCE`, if it is known.
        missing: number of cells that were not run yet.
        damaged: number of lines in the results file that cannot be read.
        seeds: number of seeds in the recipe.
        changes: differences from the package's recipe, from `changes_of`.
    """

    title: str
    columns: tuple[str, ...]
    rows: dict[str, dict[str, Entry]]
    missing: int
    damaged: int
    seeds: int = 1
    changes: tuple[str, ...] = ()


ResultRow = Values
"""A line of a run's results, one per cell; made by `linearize.jobs.recipes.run`."""


def append_row(folder: Path, row: ResultRow) -> None:
    """Add a line to a folder's results and flush it to the disk."""
    with (folder / RESULTS).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def read_rows(folder: Path) -> tuple[list[ResultRow], int]:
    """Read a folder's results.

    Returns:
        The last row of each cell, and the number of damaged lines (such as the last line of a killed run).
    """
    path = folder / RESULTS
    if not path.is_file():
        return [], 0
    rows: dict[str, ResultRow] = {}
    damaged = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = parse_json(line)
            rows[row["cell"]] = {**row, "score": float(row["score"])}
        except (ValueError, KeyError, TypeError):
            damaged += bool(line.strip())
    return list(rows.values()), damaged


def repair(folder: Path) -> list[ResultRow]:
    """Rewrite a results file that has damaged lines, and return its rows."""
    rows, damaged = read_rows(folder)
    if damaged:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        write_file(folder / RESULTS, "output", lines.encode())
    return rows


def tables(folder: str | Path) -> list[Table]:
    """Return the table of a run's folder, or those of all runs in a folder.

    Raises:
        DataError: if the folder holds no run.
        ConfigError: if a run's recipe is damaged.
    """
    root = user_path(folder)
    runs = [root] if (root / RECIPE).is_file() else sorted(file.parent for file in root.glob(f"*/{RECIPE}"))
    if not runs:
        raise DataError(f"{str(folder)!r} holds no run: expected a folder with {RECIPE} and {RESULTS}")
    return [make_table(read_recipe(run), run.name, *read_rows(run)) for run in runs]


def read_recipe(run: Path) -> Recipe:
    """Read a run's recipe.

    Raises:
        ConfigError: if it is damaged.
    """
    where = str(run / RECIPE)
    return check(read_values(run / RECIPE, repr(where), "a recipe; the run was damaged: run it again"), where)


def make_table(recipe: Recipe, name: str, results: Sequence[ResultRow], damaged: int = 0) -> Table:
    """Make the table of a recipe's run with this name from its results."""
    wanted, jobs, rows = cells(recipe), resolve(recipe), list[ResultRow]()
    softmax = {(row.get("task"), row.get("seed")): row for row in results if row.get("row") == SOFTMAX}
    for row in results:
        first = softmax.get((row.get("task"), row.get("seed")))
        # The share of softmax's score, also if softmax was measured after this row (`--only`).
        late = row.get("original", row) is None and row["kernel"] != SOFTMAX
        if late and first is not None and row["task"] in jobs:
            row = {**row, "recovered": share_of(jobs[row["task"]].task, row, first)}
        rows.append(row)
    columns = list(dict.fromkeys(cell.job.name for cell in wanted))
    several = len(columns) > 1
    table: dict[str, dict[str, Entry]] = {}
    for label in dict.fromkeys([*(cell.row for cell in wanted), *recipe.figures]):
        paper = recipe.figures.get(label, {})
        table[label] = {column: _entry(rows, label, column, paper.get(column)) for column in columns}
    # The chance level of a task: it is the same for all rows of the table, as they share the validation rows.
    levels = {
        column: [_scaled(x, x["chance"]) for x in rows if x.get("task") == column and x.get("chance") is not None]
        for column in columns
    }
    chances = {column: Entry(_mean(levels[column]), None, None, len(recipe.seeds)) for column in columns}
    if any(entry.ours is not None for entry in chances.values()):
        table.setdefault(CHANCE, chances)
    if several:
        for label, line in table.items():
            paper = recipe.figures.get(label, {})
            line[AVERAGE] = _average(rows, label, line, paper.get(AVERAGE))
        _recover_averages(recipe, table)
    done = {row["cell"] for row in rows}
    source = "" if recipe.paper is None else f" ({recipe.paper.title}, {recipe.paper.table})"
    return Table(
        title=f"{name}: {recipe.summary}{source}",
        columns=(*columns, *((AVERAGE,) if several else ())),
        rows=table,
        missing=sum(cell.key not in done for cell in wanted),
        damaged=damaged,
        seeds=len(recipe.seeds),
        changes=changes_of(recipe),
    )


def same_rows(one: ReadOnlyValues, other: ReadOnlyValues) -> bool:
    """Tell whether two results were scored on the same rows; older ones record only the length of their windows."""
    if one.get("scored") and other.get("scored"):
        return bool(one["scored"] == other["scored"])
    windows = [[result.get("facts", {}).get(name) for name in ("context", "stride")] for result in (one, other)]
    return windows[0] == windows[1]


def share_of(task: Task, result: ReadOnlyValues, softmax: ReadOnlyValues) -> float | None:
    """Return the share of softmax's score above chance, percent; None if it is unknown, or rows differ."""
    if not same_rows(result, softmax):
        return None
    levels = {"chance": result.get("chance"), "interval": softmax.get("interval")}
    return recovery(task, result["score"], softmax["score"], **levels)


def _entry(rows: Sequence[ResultRow], label: str, column: str, paper: float | None) -> Entry:
    mine = [row for row in rows if row.get("row") == label and row.get("task") == column]
    scores = [_scaled(row, row["score"]) for row in mine]
    shares = [row.get("recovered") for row in mine]
    # The share over all seeds is unknown if softmax learned nothing with one seed.
    recovered = None if label == SOFTMAX else _mean(shares)
    return Entry(_mean(scores), paper, recovered, len(mine), _deviation(scores))


def _scaled(row: ResultRow, score: float) -> float:
    return float(score * (100.0 if row.get("percent") else 1.0))


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if there are no values, or one of them is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _average(rows: Sequence[ResultRow], label: str, line: Mapping[str, Entry], paper: float | None) -> Entry:
    """Return a row's average if it is complete: mean and deviation of the averages of the complete seeds, if known.

    Args:
        rows: the results.
        label: name of the row.
        line: its entries by task.
        paper: the paper's average; None: the mean of the paper's figures.
    """
    seeds: dict[object, dict[str, float]] = {}
    for row in rows:
        if row.get("row") == label:
            seeds.setdefault(row.get("seed"), {})[str(row.get("task"))] = _scaled(row, row["score"])
    # A seed is complete if all tasks were run with it.
    by_seed = [sum(scores[x] for x in line) / len(line) for scores in seeds.values() if line.keys() <= scores.keys()]
    if paper is None:
        paper = _mean([entry.paper for entry in line.values()])
    ours = _mean(by_seed or [entry.ours for entry in line.values()])
    return Entry(ours, paper, None, len(by_seed) or min(entry.seeds for entry in line.values()), _deviation(by_seed))


def _recover_averages(recipe: Recipe, table: dict[str, dict[str, Entry]]) -> None:
    """Set the recovered share of the softmax model's average, computed from the averages as in papers.

    Without a chance level, as in older results, it is the share of the whole score. It is unknown if the share of any
    task is unknown.
    """
    tasks = [job.task for job in resolve(recipe).values()]
    original, chance = (table.get(label, {}).get(AVERAGE) for label in (SOFTMAX, CHANCE))
    if original is None or original.ours is None or any(task.lower_is_better for task in tasks):
        return
    for label, line in table.items():
        entry = line[AVERAGE]
        shares = [other.recovered for column, other in line.items() if column != AVERAGE]
        if label not in (SOFTMAX, CHANCE) and entry.ours is not None and None not in shares:
            level = None if chance is None else chance.ours
            line[AVERAGE] = replace(entry, recovered=recovery(tasks[0], entry.ours, original.ours, chance=level))


def changes_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the keys in which a run's recipe differs from the package's recipe with the same summary and paper.

    The name of the package's recipe comes first; empty if there is no such recipe, or no difference.
    """
    now = plain(recipe)
    for name in recipe_names():
        original = load_recipe(name)
        if (original.summary, original.paper) == (recipe.summary, recipe.paper):
            before = plain(original)
            keys = [key for key in {**before, **now} if key not in FREE and before.get(key) != now.get(key)]
            return (name, *keys) if keys else ()
    return ()


def cell_text(entry: Entry, seeds: int, sign: str = "+-") -> str:
    """Return an entry as text: mean, deviation, number of seeds if some are missing, share of softmax, paper's figure.

    Args:
        entry: the entry.
        seeds: number of seeds of the table.
        sign: the sign between mean and deviation.
    """
    ours = "-" if entry.ours is None else f"{entry.ours:.2f}"
    ours += "" if entry.deviation is None else f" {sign} {entry.deviation:.2f}"
    ours += f" n={entry.seeds}" if 0 < entry.seeds < seeds else ""
    share = "" if entry.recovered is None else f" ({entry.recovered:.1f} %)"
    paper = "" if entry.paper is None else f" | {entry.paper:.1f}"
    return f"{ours}{share}{paper}"


def notes_of(table: Table) -> list[str]:
    """Return the notes below a table, one line each."""
    lines = []
    if table.seeds > 1:
        lines.append(f"Means over {table.seeds} seeds, +- the standard deviation of a single run.")
    if table.changes:
        name, *keys = table.changes
        lines.append(f"Different from recipe {name}: {', '.join(keys)}. The run's {RECIPE} has the values used.")
    if table.missing:
        lines.append(f"{table.missing} cells are missing: continue with --resume.")
    if table.damaged:
        lines.append(f"{table.damaged} lines of the results are damaged and were left out; --resume repairs them.")
    return lines


def lines_of(table: Table, sign: str = "+-") -> list[list[str]]:
    """Return the rows of a table as strings: the row's name, then its cells."""
    return [
        [label, *(cell_text(line[column], table.seeds, sign) for column in table.columns)]
        for label, line in table.rows.items()
    ]


def to_markdown(tables: Sequence[Table]) -> str:
    """Return tables as Markdown, with their notes."""
    parts = []
    for table in tables:
        rows = [["", *table.columns], ["---", *("---:" for _ in table.columns)], *lines_of(table, "±")]
        body = [f"| {' | '.join(map(_markdown, row))} |" for row in rows]
        lines = [f"**{_markdown(table.title)}**", "", *body, "", *map(_markdown, notes_of(table))]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_])", r"\\\1", text)
