"""Find, read, change and check recipes, and resolve a checked recipe into the cells of its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from linearize.core.errors import ConfigError, LinearizeError, repeated, unknown_name
from linearize.core.options import build, kind_of, read_values
from linearize.core.parsing import parse_yaml, user_path
from linearize.core.registry import Values, field_types
from linearize.jobs.recipes import schema
from linearize.jobs.recipes.schema import SOFTMAX, Column, Kernel, Recipe, Row, StageTwo
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.prepare import check_extra_pairs
from linearize.training.stage_two.tasks import Task, task

AVERAGE = "average"
"""Name of the table's column of averages."""
PRETRAIN = "pretrain"
"""Name of the task to train on first, among a recipe's tasks."""


@dataclass(frozen=True)
class Job:
    """A task of a recipe with the options of all its stages.

    Attributes:
        name: name of the table's column.
        task: the task.
        column: the recipe's entry for it.
        data: the data to read; None: the task's own data set.
        config: config of a model trained from scratch, or changes to a checkpoint's config.
        rows: options for turning data into rows.
        teacher: options for tuning the softmax model.
        distil: options of stage one.
        align: options of the alignment.
        finetune: options of stage two.
    """

    name: str
    task: Task
    column: Column
    data: str | None
    config: dict[str, object]
    rows: DataOptions
    teacher: TuneConfig
    distil: schema.StageOne
    align: schema.Alignment
    finetune: StageTwo

    def reading(self, **changes: Any) -> Job:
        """Return the same job with some options for data rows changed."""
        return dataclasses.replace(self, rows=dataclasses.replace(self.rows, **changes))


OPTIONS = ("rows", "teacher", "distil", "align", "finetune")
"""The sections of options that a recipe sets for all tasks, and that single tasks may change."""


@dataclass(frozen=True)
class Cell:
    """One cell of the table: a kernel, a task, a seed, and the task to distil on if that is a different one."""

    kernel: Row
    job: Job
    seed: int
    source: Job | None = None

    @property
    def read(self) -> Job:
        """The task, with the options for data rows that this row of the table has."""
        return self.job.reading(**self.kernel.rows)

    @property
    def row(self) -> str:
        """Name of the table's row."""
        return self.kernel.called if self.source is None else f"{self.kernel.called} from {self.source.name}"

    @property
    def key(self) -> str:
        """Name of the cell's folder."""
        return file_name(f"{self.row}-{self.job.name}-s{self.seed}")

    @property
    def converted_folder(self) -> str:
        """Folder of its converted model, which cells with the same source share."""
        return f"distilled/{self.key if self.source is None else file_name(f'{self.row}-s{self.seed}')}"


def file_name(text: str) -> str:
    """Return the name of a row or a task as part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text)


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(file.stem for file in _package_folder().glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """Return the path of a recipe, from the path of a YAML file or the name of a recipe of the package.

    Raises:
        UnknownNameError: if there is neither such a file nor such a recipe.
    """
    path = user_path(name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    names = recipe_names()
    if name not in names:
        raise unknown_name("recipe", name, names)
    return _package_folder() / f"{name}.yaml"


def _package_folder() -> Path:
    return Path(str(resources.files("linearize.recipes")))


def load_recipe(name: str, changes: Iterable[str] = ()) -> Recipe:
    """Read a recipe, change it and check it.

    Args:
        name: name of a recipe of the package, or a file.
        changes: `key=value`; the key may have dots (`finetune.epochs=1`), the value is YAML (`kernels=[elu,relu]`).

    Raises:
        ConfigError: if the file or a change is not YAML, or for anything unknown or of the wrong type; the message
            names the key.
    """
    where = f"recipe {Path(name).stem}"
    values = read_values(recipe_file(name), where, "keys with values")
    before = _section(values, "tasks")
    for change in changes:
        _change(values, change)
    now, sources = _section(values, "tasks"), values.get("sources")
    # A source that is no longer a column keeps its options.
    left = {name: column for name, column in before.items() if name not in now and name in (sources or ())}
    if left and isinstance(sources, list):
        values["source_tasks"] = left | _section(values, "source_tasks")
    return check(values, where)


def check(values: Mapping[str, object], where: str) -> Recipe:
    """Build a recipe from plain data and check every name and number in it.

    Raises:
        ConfigError: for a wrong name or number; the message names the key.
    """
    recipe = build(Recipe, values, where)
    for place, row in enumerate(recipe.kernels):
        build(DataOptions, {**recipe.rows, **row.rows}, f"{where}.kernels[{place}].rows")
    jobs = resolve(recipe, where)
    for name, job in jobs.items():
        here = f"{where}.tasks.{name}"
        if job.finetune.teacher and recipe.flow == "scratch":
            raise ConfigError(
                f"{here}.finetune.teacher: got {kind_of(job.finetune.teacher)}, but flow scratch has no tuned softmax "
                "model; leave it out"
            )
        if job.rows.extra_pairs and not job.finetune.teacher:
            raise ConfigError(f"{here}.rows.extra_pairs: re-paired texts have no label; set finetune.teacher to true")
        try:
            check_extra_pairs(job.task, job.rows)
        except ConfigError as error:
            raise ConfigError(f"{here}.rows: {error}") from error
    if (twice := repeated(cell.key for cell in cells(recipe))) is not None:
        raise ConfigError(f"{where}: two cells are called {twice!r}; give a row or a task another name")
    for row_name, figures in recipe.figures.items():
        for name in figures:
            if name not in jobs and name != AVERAGE:
                raise ConfigError(f"{where}.figures.{row_name}: {unknown_name('task', name, [*jobs, AVERAGE])}")
    return recipe


def resolve(recipe: Recipe, where: str = "recipe") -> dict[str, Job]:
    """Return the tasks of a recipe by name, including those to distil on and to train on first.

    Raises:
        ConfigError: for a wrong name or option; the message names the key.
    """
    columns = recipe.columns
    for name in (*columns, *recipe.sources):
        if name in (PRETRAIN, AVERAGE):
            raise ConfigError(f"{where}.tasks: the name {name!r} is taken; give the task another name")
    jobs = {name: _job(recipe, name, column, f"{where}.tasks.{name}") for name, column in columns.items()}
    for name in recipe.sources:
        column = columns.get(name) or recipe.source_tasks.get(name, Column())
        jobs.setdefault(name, _job(recipe, name, column, f"{where}.sources.{name}"))
    if recipe.pretrain_task is not None:
        job = _job(recipe, PRETRAIN, recipe.pretrain_task, f"{where}.pretrain_task")
        tune = build(StageTwo, {**recipe.pretrain, **recipe.pretrain_task.finetune}, f"{where}.pretrain")
        jobs[PRETRAIN] = dataclasses.replace(job, finetune=tune)
    return jobs


def _job(recipe: Recipe, name: str, column: Column, where: str) -> Job:
    from linearize.jobs.synthetic.sets import make_options

    try:
        chosen = task(
            column.task or name,
            columns=column.columns,
            label=column.label,
            labels=column.labels,
            validation=column.validation,
            score=column.score,
        )
        if column.folder is not None:
            chosen = dataclasses.replace(chosen, folders=(column.folder,))
        if column.make is not None:
            make_options(column.make, column.options)
    except LinearizeError as error:
        raise ConfigError(f"{where}: {error}") from error
    options: Values = {}
    for key in OPTIONS:
        options[key] = build(field_types(Job)[key], getattr(recipe, key) | getattr(column, key), f"{where}.{key}")
    data = column.dataset if recipe.data is None else recipe.data
    return Job(name, chosen, column, data, {**recipe.model.config, **column.model}, **options)


def cells(recipe: Recipe) -> list[Cell]:
    """Return the cells of a recipe's table in the order in which they run, grouped by task."""
    resolved, table = resolve(recipe), []
    for seed in recipe.seeds:
        jobs = {name: job.reading(seed=seed) for name, job in resolved.items()}
        for name in recipe.columns:
            for row in recipe.kernels:
                sources: list[Job | None] = [None]
                if recipe.sources and row.name != SOFTMAX:
                    untuned = recipe.flow == "untuned"
                    sources = [jobs[source] for source in recipe.sources if untuned or source != name]
                table += [Cell(row, jobs[name], seed, source) for source in sources]
    return table


def plain(value: object) -> Any:
    """Return a recipe, or a part of one, as plain data without empty values: the content of a run's `recipe.yaml`."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if not dataclasses.is_dataclass(value):
        return value
    # A kernel without options is written as its name. Softmax has the default options too, and unlike some kernels it
    # can be built from its name alone.
    if isinstance(value, Kernel) and vars(value) == vars(type(value)(SOFTMAX)) | {"name": value.name}:
        return value.name
    parts = {key: plain(part) for key, part in vars(value).items()}
    return {key: part for key, part in parts.items() if part is not None and part not in ({}, [], "")}


def _section(values: Mapping[str, object], key: str) -> Values:
    """Return a key's section; {} if it is missing, or of another type, which `check` refuses."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _change(values: Values, change: str) -> None:
    """Apply one `key=value`.

    Raises:
        ConfigError: if the change does not have this form.
    """
    key, equals, text = change.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"got {change!r}, expected key=value such as finetune.epochs=1")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{key}: got {text!r}, expected a YAML value such as 1, text or [a,b]") from error
    tasks = values.get("tasks")
    if parts[0] == "tasks" and len(parts) > 1 and isinstance(tasks, list):
        values["tasks"] = {str(name): {} for name in tasks}
    if parts in (["kernels"], ["tasks"], ["seeds"], ["sources"]) and not isinstance(value, list | dict):
        value = [value]
    # A row or task given by name keeps its options from the recipe.
    if parts == ["kernels"] and isinstance(value, list):
        before = values.get("kernels")
        rows = [row for row in before if isinstance(row, dict)] if isinstance(before, list) else []
        known = {str(row.get("label") or row.get("name")): row for row in rows}
        value = [known.get(row, row) if isinstance(row, str) else row for row in value]
    if parts == ["tasks"] and isinstance(value, list) and isinstance(tasks, dict):
        known = _section(values, "source_tasks") | tasks
        value = {str(name): known.get(str(name), {}) for name in value}
    place = values
    for part in parts[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{key}: {part!r} is not a section of keys")
    place[parts[-1]] = value
    if parts == ["tasks"] and isinstance(values.get("figures"), dict):
        # Only the remaining tasks keep their figures; the paper's average, over all tasks, is dropped.
        values["figures"] = {
            row: {name: figure for name, figure in figures.items() if name in value}
            if isinstance(figures, dict)
            else figures
            for row, figures in values["figures"].items()
        }
