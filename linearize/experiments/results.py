"""The rows of `results.jsonl`, and the table made of them with the paper's figures beside ours."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from linearize.errors import ConfigError, DataError, first_line
from linearize.experiments.changes import Changes, changes_of
from linearize.experiments.recipe import AVERAGE, cells, check, resolve
from linearize.experiments.schema import SOFTMAX, Recipe
from linearize.finetune.tasks import recovery
from linearize.parsing import parse_json, parse_yaml, read_text

RESULTS = "results.jsonl"
RECIPE = "recipe.yaml"
CHANCE = "chance"
"""The row of a table with the best scores of answers that look at no input."""


@dataclass(frozen=True)
class Entry:
    """One cell as shown, means over seeds.

    Attributes:
        ours: our figure, in the paper's unit (points for shares); None where there is none yet.
        paper: the paper's figure; None where there is none.
        recovered: share of the softmax model's score above chance, percent; None if that model is not above chance.
        seeds: how many seeds ours is a mean of.
        deviation: standard deviation over the seeds (of a sample, n - 1), in the unit of ours; None of fewer than two.
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
        title: one line.
        columns: names of the tasks, and "average" where there are several.
        rows: entries by row and column; the last row is `CHANCE`, if it is known.
        missing: cells that are not there yet.
        damaged: lines of the results file that could not be read.
        seeds: how many seeds the recipe has.
        changes: in what the run differs from the recipe of the package.
    """

    title: str
    columns: tuple[str, ...]
    rows: dict[str, dict[str, Entry]]
    missing: int
    damaged: int
    seeds: int = 1
    changes: Changes = field(default_factory=Changes)


class ResultRow(TypedDict, total=False):
    """A line of a run's results, one per cell; see `linearize.experiments.run` for what makes it."""

    cell: str
    row: str
    kernel: str
    task: str
    source: str | None
    seed: int
    score: float
    metrics: dict[str, float]
    facts: dict[str, object]
    percent: bool
    lower_is_better: bool
    interval: list[float] | None
    chance: float | None
    original: float | None
    recovered: float | None
    paper: float | None
    fidelity: dict[str, dict[str, float]] | None
    distil: dict[str, float] | None
    align: dict[str, object] | None
    finetune: dict[str, object]


def append_row(folder: Path, row: ResultRow) -> None:
    """Add a line to a folder's results, whole or not at all as far as the file system allows."""
    with (folder / RESULTS).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def read_rows(folder: Path) -> tuple[list[ResultRow], int]:
    """Read a folder's results.

    Returns:
        The rows, of several lines of one cell the last; and how many lines are damaged (an interrupted run's last one).
    """
    path = folder / RESULTS
    if not path.is_file():
        return [], 0
    found: dict[str, ResultRow] = {}
    damaged = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = parse_json(line)
            found[row["cell"]] = row
            float(row["score"])
        except (ValueError, KeyError, TypeError):
            damaged += bool(line.strip())
    return [row for row in found.values() if isinstance(row.get("score"), int | float)], damaged


def repair(folder: Path) -> list[ResultRow]:
    """Rewrite a results file that holds damaged lines, and return its rows."""
    rows, damaged = read_rows(folder)
    if damaged:
        fresh = folder / f".{RESULTS}"
        fresh.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        fresh.replace(folder / RESULTS)
    return rows


def tables(folder: str | Path) -> list[Table]:
    """Make the tables of a run's folder, or of all runs in a folder.

    Raises:
        DataError: if there is no run in it.
        ConfigError: if a run's recipe is damaged.
    """
    root = Path(folder).expanduser()
    runs = [root] if (root / RECIPE).is_file() else sorted(file.parent for file in root.glob(f"*/{RECIPE}"))
    if not runs:
        raise DataError(f"{str(folder)!r} holds no run: expected a folder with {RECIPE} and {RESULTS}")
    return [_table(run) for run in runs]


def read_recipe(folder: Path) -> Recipe:
    """Read the resolved recipe of a run.

    Raises:
        ConfigError: if it is damaged.
    """
    path = folder / RECIPE
    try:
        values = parse_yaml(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}); the run was damaged: run it again") from error
    return check(values if isinstance(values, dict) else {}, str(path))


def _table(folder: Path) -> Table:
    recipe = read_recipe(folder)
    rows, damaged = read_rows(folder)
    return make_table(recipe, rows, folder.name, damaged)


def make_table(recipe: Recipe, rows: Sequence[ResultRow], name: str, damaged: int = 0) -> Table:
    """Make a recipe's table of its results."""
    wanted = cells(recipe)
    columns = list(dict.fromkeys(cell.job.name for cell in wanted))
    several = len(columns) > 1
    labels = dict.fromkeys([*(cell.row for cell in wanted), *recipe.figures])
    table: dict[str, dict[str, Entry]] = {}
    for label in labels:
        paper = recipe.figures.get(label, {})
        line = {column: _entry(rows, label, column, paper.get(column)) for column in columns}
        if several:
            line[AVERAGE] = _average(list(line.values()), paper, _by_seed(rows, label, columns))
        table[label] = line
    chances = {column: _chance(rows, column, len(recipe.seeds)) for column in columns}
    if any(entry.ours is not None for entry in chances.values()) and CHANCE not in table:
        table[CHANCE] = chances | ({AVERAGE: _average(list(chances.values()), {}, [])} if several else {})
    _recover_averages(recipe, table)
    done = {row["cell"] for row in rows}
    missing = sum(cell.key not in done for cell in wanted)
    shown = (*columns, *((AVERAGE,) if several else ()))
    source = f" ({recipe.paper.title}, {recipe.paper.table})" if recipe.paper is not None else ""
    return Table(
        f"{name}: {recipe.summary}{source}", shown, table, missing, damaged, len(recipe.seeds), changes_of(recipe)
    )


def _entry(rows: Sequence[ResultRow], label: str, column: str, paper: float | None) -> Entry:
    mine = [row for row in rows if row.get("row") == label and row.get("task") == column]
    if not mine:
        return Entry(None, paper, None, 0)
    scores = [_scaled(row) for row in mine]
    ours = sum(scores) / len(scores)
    shares = [share for row in mine if (share := row.get("recovered")) is not None]
    # Of seeds with which softmax learned nothing there is no share, and so none of all of them.
    recovered = sum(shares) / len(shares) if len(shares) == len(mine) and label != SOFTMAX else None
    return Entry(ours, paper, recovered, len(mine), _deviation(scores))


def _chance(rows: Sequence[ResultRow], column: str, seeds: int) -> Entry:
    """Return what guessing reaches on a task: the validation rows, and so this level, are the same for all rows."""
    known = [
        chance * (100.0 if row.get("percent") else 1.0)
        for row in rows
        if row.get("task") == column and (chance := row.get("chance")) is not None
    ]
    return Entry(sum(known) / len(known) if known else None, None, None, seeds)


def _scaled(row: ResultRow) -> float:
    return float(row["score"] * (100.0 if row.get("percent") else 1.0))


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _by_seed(rows: Sequence[ResultRow], label: str, columns: Sequence[str]) -> list[float]:
    """Return a row's average over the tasks for each seed with which all of them were run."""
    found: dict[object, dict[str, float]] = {}
    for row in rows:
        if row.get("row") == label:
            found.setdefault(row.get("seed"), {})[str(row.get("task"))] = _scaled(row)
    whole = [scores for scores in found.values() if set(columns) <= scores.keys()]
    return [sum(scores[column] for column in columns) / len(columns) for scores in whole]


def _average(entries: Sequence[Entry], paper: Mapping[str, float], by_seed: Sequence[float]) -> Entry:
    """Average a row where all its cells are there; the deviation is that of the averages of each seed."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None

    figures = mean([entry.paper for entry in entries])
    ours = mean([entry.ours for entry in entries])
    return Entry(ours, paper.get(AVERAGE, figures), None, min(entry.seeds for entry in entries), _deviation(by_seed))


def _recover_averages(recipe: Recipe, table: dict[str, dict[str, Entry]]) -> None:
    """Say what share of the softmax model's average is recovered: of the averages, as the papers have it.

    Without a chance level, as in runs of before, the share is of the whole score; without a share of one of the tasks
    there is none of their average.
    """
    tasks = [job.task for job in resolve(recipe).values()]
    original, chance = (table.get(label, {}).get(AVERAGE) for label in (SOFTMAX, CHANCE))
    if original is None or original.ours is None or any(task.lower_is_better for task in tasks):
        return
    for label, line in table.items():
        entry, others = line[AVERAGE], [one for column, one in line.items() if column != AVERAGE]
        if label in (SOFTMAX, CHANCE) or entry.ours is None or any(one.recovered is None for one in others):
            continue
        level = None if chance is None else chance.ours
        line[AVERAGE] = replace(entry, recovered=recovery(tasks[0], entry.ours, original.ours, chance=level))
