"""Compare the rows of a run with one of them: paired differences, and the share of tasks on which they are as good."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linearize.core.errors import DataError, unknown_name
from linearize.core.parsing import MOST_TEXT, read_json
from linearize.jobs.recipes.recipe import Cell, cells
from linearize.jobs.recipes.results import RECIPE, ResultRow, read_run
from linearize.jobs.recipes.schema import SOFTMAX
from linearize.jobs.recipes.stages import RECORD, stages_of
from linearize.training.stage_two.metrics import draws, percentiles
from linearize.training.stage_two.tasks import Task

TOLERANCES = (0.0, 0.5, 1.0, 2.0)
"""How far a row may be below the other row, in percent of its score, and still count as equally good."""
RESAMPLES = 2_000


@dataclass(frozen=True)
class Gap:
    """The difference between two rows on a task, as the mean over their common seeds; in points, as in tables.

    Attributes:
        value: difference of the task's score.
        interval: 95 % bootstrap interval of `value`, with both rows resampled on the same units; None if the scored
            units were not recorded, as for tuned models and in runs of earlier versions.
        metrics: difference and ends of the interval for every metric.
        seeds: number of common seeds.
    """

    value: float
    interval: tuple[float, float] | None
    metrics: dict[str, tuple[float, float, float]]
    seeds: int


@dataclass(frozen=True)
class Against:
    """All rows of a run compared with one of them.

    Attributes:
        row: the row that all others are compared with.
        tasks: names of the tasks.
        gaps: differences by row and task.
        as_good: for each row, the share of the tasks (0 to 1) on which it is as good, for each of `TOLERANCES`.
        half: for each row, the tolerance in percent at which that share is one half.
    """

    row: str
    tasks: tuple[str, ...]
    gaps: dict[str, dict[str, Gap]]
    as_good: dict[str, tuple[float, ...]]
    half: dict[str, float]

    def cells(self) -> list[list[str]]:
        """Return the rows of a table as strings: the row's name, and its differences with their intervals."""

        def shown(gap: Gap | None) -> str:
            if gap is None:
                return "-"
            ends = "" if gap.interval is None else f" ({gap.interval[0]:+.2f} to {gap.interval[1]:+.2f})"
            return f"{gap.value:+.2f}{ends}"

        return [[name, *(shown(row.get(task)) for task in self.tasks)] for name, row in self.gaps.items()]

    def notes(self) -> list[str]:
        """Return one line per row with the shares of the tasks on which it is as good."""
        within = ", ".join(f"{tolerance:g}" for tolerance in TOLERANCES)
        return [
            f"{name}: as good as {self.row} within {within} % on {', '.join(f'{share:.0%}' for share in shares)} of "
            f"{len(self.gaps[name])} tasks; on half of them within {self.half[name]:.2f} %"
            for name, shares in self.as_good.items()
        ]


def against(folder: str | Path, row: str) -> Against:
    """Compare the rows of a run with one of them.

    Raises:
        DataError: if the folder holds no run, or the row was not measured.
        UnknownNameError: if there is no such row.
    """
    root = Path(folder).expanduser()
    if not (root / RECIPE).is_file():
        raise DataError(f"--against: {str(folder)!r} holds no run (no {RECIPE}); name the folder of one run")
    recipe, rows, _ = read_run(root)
    table, measured = cells(recipe), {line["cell"]: line for line in rows}
    names = list(dict.fromkeys(cell.row for cell in table))
    if row not in names:
        raise unknown_name("row", row, names)
    done = [cell for cell in table if cell.key in measured]
    # The scored units of each cell; empty if they are not recorded.
    records = {cell.key: read_json(root / stages_of(recipe, cell)["done"].folder / RECORD, MOST_TEXT) for cell in done}
    units = {key: tuple(map(np.asarray, record.get("units") or ())) for key, record in records.items()}
    tasks = tuple(dict.fromkeys(cell.job.name for cell in table))
    gaps: dict[str, dict[str, Gap]] = {name: {} for name in names if name != row}
    needed: dict[str, list[float]] = {}
    for task in tasks:
        theirs = {cell.seed: cell for cell in done if (cell.row, cell.job.name) == (row, task)}
        # An untuned softmax model is the same for all seeds.
        fixed = next((x for x in theirs.values() if recipe.flow == "untuned" and x.kernel.name == SOFTMAX), None)
        for name in gaps:
            ours = [cell for cell in done if (cell.row, cell.job.name) == (name, task)]
            pairs = [(cell, other) for cell in ours if (other := theirs.get(cell.seed, fixed)) is not None]
            if pairs:
                gap = gaps[name][task] = _gap(pairs, measured, units)
                asked = pairs[0][0].job.task
                points = _scale(asked) * float(np.mean([measured[other.key]["score"] for _, other in pairs]))
                below = gap.value if asked.lower_is_better else -gap.value
                needed.setdefault(name, []).append(max(0.0, 100 * below / max(abs(points), 1e-12)))
    if not needed:
        raise DataError(f"--against: no other row was measured on a task of row {row!r}; run more cells")
    shares = {name: as_good(percents) for name, percents in needed.items()}
    # The lower median: the smallest tolerance that at least half of the tasks are within.
    return Against(row, tasks, gaps, shares, {name: statistics.median_low(x) for name, x in needed.items()})


def as_good(needed: Sequence[float]) -> tuple[float, ...]:
    """Return the share of tasks within each of `TOLERANCES`, given the tolerance that each task needs, in percent."""
    return tuple(sum(percent <= tolerance for percent in needed) / len(needed) for tolerance in TOLERANCES)


def _scale(task: Task) -> float:
    return 100.0 if task.percent else 1.0


def _gap(
    pairs: Sequence[tuple[Cell, Cell]],
    measured: Mapping[str, ResultRow],
    units: Mapping[str, tuple[np.ndarray, ...]],
) -> Gap:
    task = pairs[0][0].job.task
    scale, scorer = _scale(task), task.type(task)
    value = scale * float(np.mean([measured[one.key]["score"] - measured[other.key]["score"] for one, other in pairs]))
    sides = {cell.key: units[cell.key] for pair in pairs for cell in pair}
    count = {len(unit) for side in sides.values() for unit in side}
    if len(count) != 1 or not all(sides.values()):
        return Gap(value, None, {}, len(pairs))

    def differences(drawn: np.ndarray | slice) -> dict[str, float]:
        scored = {key: scorer.metrics(*(unit[drawn] for unit in side)) for key, side in sides.items()}
        return {
            name: scale * float(np.mean([scored[one.key][name] - scored[other.key][name] for one, other in pairs]))
            for name in scored[pairs[0][0].key]
        }

    whole = differences(slice(None))
    drawn = [differences(units_drawn) for units_drawn in draws(count.pop(), RESAMPLES)]
    ends = {name: percentiles(np.array([one[name] for one in drawn])) for name in whole}
    score = percentiles(np.array([task.mean_of(one) for one in drawn]))
    return Gap(value, score, {name: (whole[name], *ends[name]) for name in whole}, len(pairs))
