"""In what a run differs from the recipe of the package that it is of: what was changed, and what was left out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from linearize.experiments.recipe import load_recipe, plain, recipe_names
from linearize.experiments.schema import FREE, Kernel, Recipe

MATRIX = ("kernels", "tasks", "seeds", "sources")
NONE = "nothing"


@dataclass(frozen=True)
class Changes:
    """How a run differs.

    Attributes:
        recipe: name of the recipe of the package; None where the run is of a file of its own.
        everywhere: what holds for every row, as "key value (the recipe's value)".
        rows: what holds for a row alone, by its name; such as another argument of its kernel.
        columns: the same by task.
        left_out: tasks and seeds that the recipe has and the run has not.
    """

    recipe: str | None = None
    everywhere: tuple[str, ...] = ()
    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def marked(self, row: str, column: str) -> bool:
        """Tell whether a cell was not made as the recipe says."""
        return bool(self.everywhere or self.rows.get(row) or self.columns.get(column))


def changes_of(recipe: Recipe) -> Changes:
    """Compare a run's recipe with the one of the package that it was made of, which is told by summary and paper."""
    for name, original in _packaged():
        if (original.summary, original.paper) == (recipe.summary, recipe.paper):
            return _compared(name, original, recipe)
    return Changes()


@functools.cache
def _packaged() -> tuple[tuple[str, Recipe], ...]:
    """Return the recipes of the package by name, read once."""
    return tuple((name, load_recipe(name)) for name in recipe_names())


def _compared(name: str, original: Recipe, recipe: Recipe) -> Changes:
    before, now = ({k: v for k, v in plain(one).items() if k not in (*FREE, *MATRIX)} for one in (original, recipe))
    kernels = {one.called: _kernel(one) for one in original.rows_of_table}
    rows = {}
    for one in recipe.rows_of_table:
        known = kernels.get(one.called)
        rows[one.called] = ("not a row of the recipe",) if known is None else differences(known, _kernel(one))
    steps = {task: _flat(vars(step)) for task, step in original.steps.items()}
    columns = {}
    for task, step in recipe.steps.items():
        mine = _flat(vars(step))
        columns[task] = ("not a task of the recipe",) if task not in steps else differences(steps[task], mine)
    left_out = [f"task {task}" for task in original.steps if task not in recipe.steps]
    left_out += [f"seed {seed}" for seed in original.seeds if seed not in recipe.seeds]
    left_out += [f"source {one}" for one in original.sources if one not in recipe.sources]
    return Changes(
        name,
        differences(_flat(before), _flat(now)),
        {row: found for row, found in rows.items() if found},
        {task: found for task, found in columns.items() if found},
        tuple(left_out),
    )


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> tuple[str, ...]:
    """Return what differs between two flat mappings, each as "key value (value before)"."""
    names = [*now, *(name for name in before if name not in now)]
    return tuple(
        f"{name} {now.get(name, NONE)} ({before.get(name, NONE)})"
        for name in names
        if now.get(name) != before.get(name)
    )


def _kernel(kernel: Kernel) -> dict[str, object]:
    return {key: value for key, value in _flat(vars(kernel)).items() if key != "note"}


def _flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested keys with dots between them; what is empty is left out."""
    found: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif value is not None and value not in ("", (), []):
            found[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return found
