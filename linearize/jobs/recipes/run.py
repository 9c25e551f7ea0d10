"""Run a recipe cell by cell. Each finished cell adds one line to the results; an unfinished cell adds nothing."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from linearize.checkpoint.output import atomic_folder, clear_leftovers
from linearize.checkpoint.ownership import remove_weights
from linearize.core.errors import CheckpointError, ConfigError
from linearize.core.events import Callback, Event, ignore
from linearize.core.parsing import MOST_TEXT, read_json, user_path, write_file
from linearize.core.registry import Values
from linearize.jobs.recipes.recipe import Cell, cells, plain, resolve
from linearize.jobs.recipes.results import (
    RECIPE,
    ResultRow,
    append_row,
    read_recipe,
    read_rows,
    repair,
    same_rows,
    share_of,
)
from linearize.jobs.recipes.schema import FREE, SOFTMAX, Recipe
from linearize.jobs.recipes.stages import RECORD, Runner, softmax_folder
from linearize.training.stage_two.save import remove_work
from linearize.training.stage_two.splits import located

PACKAGES = ("linearize", "torch", "transformers", "datasets", "accelerate", "peft", "tokenizers", "numpy")
GROWING = ("kernels", "tasks", "sources", "seeds")
"""Keys that may have additional values in a resumed run, as that only adds cells."""


@dataclass(frozen=True)
class CellStarted(Event):
    """A cell begins.

    Attributes:
        number: number of the cell, from 1.
        count: number of cells.
        key: name of the cell.
    """

    number: int
    count: int
    key: str


@dataclass(frozen=True)
class CellDone(Event):
    """A cell is complete; `row` is its line in the results."""

    row: ResultRow


def run_recipe(
    recipe: Recipe, output: str | Path, *, resume: bool = False, only: Sequence[str] = (), on_event: Callback = ignore
) -> list[ResultRow]:
    """Run a recipe to the end, or some of its cells.

    Args:
        recipe: a checked recipe.
        output: the run's folder.
        resume: whether to continue the run in that folder: an interrupted one, or one with fewer kernels or tasks.
        only: patterns (`*-mrpc-*`) of the cells to run; empty: all. Several processes may fill one folder, as long as
            no two of them share a task, because its softmax model is trained only once.
        on_event: called with `CellStarted`, `CellDone` and events of jobs.

    Returns:
        The rows of the results so far, one per cell.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct. Finished stages are kept.
    """
    from linearize.checkpoint.loading import check_device

    folder = Path(output)
    check_data(recipe)
    device = check_device(recipe.device)
    table = cells(recipe)
    chosen = chosen_cells(table, only)
    _open_folder(recipe, folder, resume)
    rows = {row["cell"]: row for row in repair(folder)}
    runner = Runner(recipe, folder, device, on_event)
    for number, cell in enumerate(table, start=1):
        if cell.key in rows or cell not in chosen:
            continue
        on_event(CellStarted(number, len(table), cell.key))
        row = _result(recipe, folder, cell, *runner.run(cell))
        append_row(folder, row)
        on_event(CellDone(row))
        # Another process may have added rows.
        rows = {row["cell"]: row for row in read_rows(folder)[0]}
    if all(cell.key in rows for cell in table):
        # The files that only an interrupted run needs are removed, and all weights unless `keep_models`; records stay.
        for path in folder.glob(".work/*/*"):
            with contextlib.suppress(CheckpointError):
                remove_work(path)
        for path in (*folder.glob(".work/*"), folder / ".work"):
            with contextlib.suppress(OSError):
                path.rmdir()
        for path in folder.glob("distilled/*" if recipe.keep_models else "*/*"):
            if path.is_dir():
                remove_weights(path)
    return [rows[cell.key] for cell in table if cell.key in rows]


def chosen_cells(table: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the cells of a recipe whose names match one of the patterns; all cells without patterns.

    Raises:
        ConfigError: for a pattern that matches no cell.
    """
    for pattern in only:
        if not any(fnmatch.fnmatchcase(cell.key, pattern) for cell in table):
            raise ConfigError(
                f"only: got {pattern!r}, which matches no cell, expected a pattern of names such as {table[0].key!r}; "
                "--dry-run lists the cells"
            )
    return [cell for cell in table if not only or any(fnmatch.fnmatchcase(cell.key, one) for one in only)]


def check_data(recipe: Recipe) -> None:
    """Check that the tasks' local folders exist, without the Hub and before any slow work.

    Raises:
        DataError: naming the missing folder or file.
    """
    for job in resolve(recipe).values():
        if job.data is not None and (recipe.data is not None or user_path(job.data).exists()):
            located(job.task, job.data)


def environment(recipe: Recipe) -> dict[str, object]:
    """Return everything that a result depends on apart from the recipe: versions, machine and seeds."""
    import torch

    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.system(),
        "packages": versions,
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "seeds": list(recipe.seeds),
    }


def _open_folder(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Create the run's folder, or check that the run in it can be resumed.

    Raises:
        ConfigError: if the folder holds something else, or a run with other options.
    """
    file = folder / RECIPE
    values = plain(recipe)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if not os.path.isdir(folder) or not any(folder.iterdir()):
        with atomic_folder(folder, marked=False) as fresh:
            (fresh / RECIPE).write_text(text, encoding="utf-8")
            (fresh / "environment.json").write_text(json.dumps(environment(recipe), indent=2) + "\n", encoding="utf-8")
        return
    if not resume:
        raise ConfigError(f"output {str(folder)!r} exists and is not empty; continue with --resume, or choose another")
    if not file.is_file():
        raise ConfigError(f"output {str(folder)!r} holds no run (it has no {RECIPE}); choose another folder")
    clear_leftovers(folder)
    before = plain(read_recipe(folder))
    for key in sorted({*before, *values} - {*FREE, "source_tasks"}):
        old, new = _jobs_of(before, key), _jobs_of(values, key)
        if old != new and not (key in GROWING and _has_grown(old, new)):
            raise ConfigError(
                f"output {str(folder)!r} holds a run with another {key!r}; give the same changes (more kernels, tasks "
                "or seeds may be added), or another output"
            )
    if before != values:
        write_file(file, "output", text.encode())


def _jobs_of(values: Values, key: str) -> object:
    """Return a key's value; for the tasks with the sources that are no columns, as a source may become a column."""
    value = values.get(key)
    return {**values.get("source_tasks", {}), **value} if key == "tasks" and isinstance(value, dict) else value


def _has_grown(old: object, new: object) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return all(name in new and new[name] == value for name, value in old.items())
    return isinstance(old, list) and isinstance(new, list) and all(item in new for item in old)


def _result(recipe: Recipe, folder: Path, cell: Cell, done: Path, converted: Path | None) -> ResultRow:
    """Return a cell's line of the results, made from the records of its result and of its conversion."""
    tuned = read_json(done / RECORD, MOST_TEXT)
    stage_one = None if converted is None else read_json(converted / RECORD, MOST_TEXT)
    softmax = folder / softmax_folder(recipe, cell) / RECORD
    original = read_json(softmax, MOST_TEXT) if cell.kernel.name != SOFTMAX and softmax.is_file() else None
    task = cell.job.task
    if original is not None and not same_rows(tuned, original):
        original = None
    recovered = None if original is None else share_of(task, tuned, original)
    return {
        "cell": cell.key,
        "row": cell.row,
        "kernel": cell.kernel.name,
        "task": cell.job.name,
        "source": None if cell.source is None else cell.source.name,
        "seed": cell.seed,
        **{name: tuned[name] for name in ("score", "metrics", "facts")},
        "scored": tuned.get("scored"),
        "percent": task.percent,
        "lower_is_better": task.lower_is_better,
        **{name: tuned.get(name) for name in ("interval", "chance")},
        "original": None if original is None else original["score"],
        "recovered": recovered,
        "paper": recipe.figures.get(cell.row, {}).get(cell.job.name),
        "fidelity": None if stage_one is None else {side: stage_one[side]["mean"] for side in ("before", "after")},
        "distil": None if stage_one is None else {k: stage_one[k] for k in ("steps", "held_out_loss", "seconds")},
        "align": None if stage_one is None else stage_one.get("alignment"),
        "finetune": {k: tuned.get(k) for k in ("steps", "best_step", "stopped", "seconds", "selection", "teacher")},
    }
