"""Run a recipe: cell by cell, each whole or not at all, one line of results for each."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from linearize.checkpoint.output import atomic_folder, clear_leftovers
from linearize.checkpoint.ownership import remove_weights
from linearize.errors import CheckpointError, ConfigError
from linearize.events import Callback, ignore
from linearize.experiments.events import CellDone, CellStarted
from linearize.experiments.recipe import Cell, cells, plain, resolve
from linearize.experiments.results import RECIPE, ResultRow, append_row, read_rows, repair
from linearize.experiments.schema import FREE, SOFTMAX, Recipe
from linearize.experiments.stages import STAGE, StageRunner
from linearize.finetune.extra_texts import texts_at
from linearize.finetune.prepare import located
from linearize.finetune.tasks import recovery
from linearize.finetune.work import remove_work
from linearize.parsing import MOST_TEXT, parse_yaml, read_json, read_text

PACKAGES = ("linearize", "torch", "transformers", "datasets", "accelerate", "peft", "evaluate", "tokenizers", "numpy")
GROWING = ("kernels", "tasks", "sources", "seeds")
"""What a continuation may have more of: that only adds cells."""


def run_recipe(
    recipe: Recipe,
    output: str | Path,
    *,
    resume: bool = False,
    only: Sequence[str] = (),
    on_event: Callback = ignore,
) -> list[ResultRow]:
    """Run a recipe to its end, or a part of its cells.

    Args:
        recipe: a checked recipe.
        output: the run's folder.
        resume: whether to go on with a run in that folder: an interrupted one, or one of fewer kernels or tasks.
        only: patterns (`*-mrpc-*`) of the cells to run; none: all. Several processes may fill one folder, as long as no
            two of them share a task: its softmax model is trained once.
        on_event: called with what happens: `linearize.experiments.events`, and events of jobs.

    Returns:
        The rows of the results so far, one per cell.

    Raises:
        LinearizeError: one of its children, for everything the user can put right. What is finished stays.
    """
    from linearize.loading import check_device

    folder = Path(output)
    check_data(recipe)
    device = check_device(recipe.device)
    _open_folder(recipe, folder, resume)
    wanted = cells(recipe)
    chosen = _choose(wanted, only)
    rows = {row["cell"]: row for row in repair(folder)}
    runner = StageRunner(recipe, folder, device, on_event)
    for number, cell in enumerate(wanted, start=1):
        if cell.key in rows or cell not in chosen:
            continue
        on_event(CellStarted(number, len(wanted), cell.key))
        row = run_cell(runner, cell)
        append_row(folder, row)
        on_event(CellDone(row))
        # Another process may have added some.
        rows = {row["cell"]: row for row in read_rows(folder)[0]}
    if all(cell.key in rows for cell in wanted):
        _sweep(recipe, folder)
    return [rows[cell.key] for cell in wanted if cell.key in rows]


def _choose(wanted: list[Cell], only: Sequence[str]) -> list[Cell]:
    for pattern in only:
        if not any(fnmatch.fnmatchcase(cell.key, pattern) for cell in wanted):
            raise ConfigError(
                f"only: got {pattern!r}, which no cell is called; give a pattern of {wanted[0].key!r} and the like "
                "(--dry-run lists the cells)"
            )
    return [cell for cell in wanted if not only or any(fnmatch.fnmatchcase(cell.key, pattern) for pattern in only)]


def run_cell(runner: StageRunner, cell: Cell) -> ResultRow:
    """Do the stages of one cell and return its row of the results."""
    flow = runner.recipe.flow
    if flow == "scratch":
        first = resolve(runner.recipe).get("pretrain")
        base = None if first is None else runner.pretrained(cell, first)
        return _row(runner, cell, runner.tuned(cell, base), None, None)
    if flow == "untuned":
        distilled = None if cell.kernel.name == SOFTMAX else runner.distilled(cell, None)
        return _row(runner, cell, runner.measured(cell, distilled), distilled, None)
    teacher = runner.teacher(cell.job, cell.seed) if flow == "finetuned" else None
    if cell.kernel.name == SOFTMAX:
        done = teacher or runner.untouched(cell.job, cell.seed)
        done = runner.measured(cell, done) if cell.kernel.rows else done
        return _row(runner, cell, done, None, None)
    distilled = runner.distilled(cell, None if teacher is None else str(teacher))
    done = runner.tuned(cell, distilled)
    return _row(runner, cell, done, distilled, teacher)


def check_data(recipe: Recipe) -> None:
    """Refuse a folder of data that lacks a task's, or texts that are nowhere, before anything slow, without the Hub.

    Raises:
        DataError: naming what is missing.
    """
    for job in resolve(recipe).values():
        if job.data is not None and (recipe.data is not None or Path(job.data).expanduser().exists()):
            located(job.task, job.data) if Path(job.data).expanduser().exists() else _missing(job.data)
        for name, _ in job.rows.text_sources:
            texts_at(name, None if job.step.make else job.data)


def _missing(name: str) -> None:
    from linearize.data.local import looks_local
    from linearize.errors import DataError

    if looks_local(name) or name.count("/") > 1:
        raise DataError(f"data: got {name!r}, which does not exist, expected a folder or a Hub name; check the path")


def environment(recipe: Recipe) -> dict[str, object]:
    """Return what a result depends on beside the recipe."""
    import torch

    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.system(),
        "packages": found,
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "seeds": list(recipe.seeds),
    }


def _open_folder(recipe: Recipe, folder: Path, resume: bool) -> None:
    file = folder / RECIPE
    values = plain(recipe)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if os.path.isdir(folder) and any(folder.iterdir()):
        if not resume:
            raise ConfigError(f"output {str(folder)!r} exists and is not empty; go on with --resume, or choose another")
        if not file.is_file():
            raise ConfigError(f"output {str(folder)!r} holds no run (it has no {RECIPE}); choose another folder")
        clear_leftovers(folder)
        before = _read_recipe(file)
        _same(before, values, folder)
        if before != values:
            beside = file.with_name(f".{RECIPE}")
            beside.write_text(text, encoding="utf-8")
            beside.replace(file)
        return
    with atomic_folder(folder, marked=False) as fresh:
        (fresh / RECIPE).write_text(text, encoding="utf-8")
        text = json.dumps(environment(recipe), indent=2) + "\n"
        (fresh / "environment.json").write_text(text, encoding="utf-8")


def _read_recipe(file: Path) -> object:
    try:
        return parse_yaml(read_text(file))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(file)!r} cannot be read ({error}), so its run cannot be gone on with; choose another output"
        ) from None


def _same(before: object, now: dict[str, object], folder: Path) -> None:
    before = before if isinstance(before, dict) else {}
    for key in sorted({*before, *now} - set(FREE)):
        old, new = before.get(key), now.get(key)
        if old != new and not (key in GROWING and _grown(old, new)):
            raise ConfigError(
                f"output {str(folder)!r} holds a run with another {key!r}; give the same changes (more kernels, tasks "
                "or seeds may be added), or another output"
            )


def _grown(old: object, new: object) -> bool:
    """Tell whether all that was there is there still, unchanged."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(name in new and new[name] == value for name, value in old.items())
    return isinstance(old, list) and isinstance(new, list) and all(item in new for item in old)


def _row(runner: StageRunner, cell: Cell, done: Path, distilled: Path | None, teacher: Path | None) -> ResultRow:
    """Read a finished cell's records and make its line of the results."""
    tuned = read_json(done / STAGE, MOST_TEXT)
    stage_one = None if distilled is None else read_json(distilled / STAGE, MOST_TEXT)
    original = None
    if teacher is not None:
        original = read_json(teacher / STAGE, MOST_TEXT)
    elif cell.kernel.name != SOFTMAX:
        original = _softmax_record(runner, cell)
    task = cell.job.task
    recovered = None
    if original is not None:
        levels = {"chance": tuned.get("chance"), "interval": original.get("interval")}
        recovered = recovery(task, tuned["score"], original["score"], **levels)
    figures = runner.recipe.figures.get(cell.row, {})
    return {
        "cell": cell.key,
        "row": cell.row,
        "kernel": cell.kernel.name,
        "task": cell.job.name,
        "source": None if cell.source is None else cell.source.name,
        "seed": cell.seed,
        "score": tuned["score"],
        "metrics": tuned["metrics"],
        "facts": tuned["facts"],
        "percent": task.percent,
        "lower_is_better": task.lower_is_better,
        "interval": tuned.get("interval"),
        "chance": tuned.get("chance"),
        "original": None if original is None else original["score"],
        "recovered": recovered,
        "paper": figures.get(cell.job.name),
        "fidelity": None if stage_one is None else {side: stage_one[side]["mean"] for side in ("before", "after")},
        "distil": None if stage_one is None else {k: stage_one[k] for k in ("steps", "held_out_loss", "seconds")},
        "align": None if stage_one is None else stage_one.get("alignment"),
        "finetune": {k: tuned.get(k) for k in ("steps", "best_step", "stopped", "seconds", "selection", "teacher")},
    }


def _softmax_record(runner: StageRunner, cell: Cell) -> dict[str, Any] | None:
    """Return the record of the softmax row of the same task and seed, if the recipe has one and it was run before."""
    path = runner.folder / "cells" / f"{SOFTMAX}-{cell.job.name}-s{cell.seed}" / STAGE
    return read_json(path, MOST_TEXT) if path.is_file() else None


def _sweep(recipe: Recipe, folder: Path) -> None:
    """Remove what only an interrupted run needs; without `keep_models` all weights too, never the records."""
    for path in folder.glob(".work/*/*"):
        with contextlib.suppress(CheckpointError):
            remove_work(path)
    for path in (*folder.glob(".work/*"), folder / ".work"):
        with contextlib.suppress(OSError):
            path.rmdir()
    for path in folder.glob("distilled/*" if recipe.keep_models else "*/*"):
        if path.is_dir():
            remove_weights(path)


__all__ = ["check_data", "environment", "run_cell", "run_recipe"]
