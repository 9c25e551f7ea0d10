"""Find, read, change and check recipes; a checked recipe is resolved into the cells of its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from linearize.attention.factory import check_hybrid
from linearize.attention.shape import HeadShape
from linearize.errors import ConfigError, LinearizeError, unknown_name
from linearize.experiments.check import build, kind_of
from linearize.experiments.schema import FLOWS, SOFTMAX, TILE, Align, Distil, Kernel, LayerKernel, Recipe, Step, Tune
from linearize.finetune.config import TuneConfig
from linearize.finetune.prepare import check_unlabelled
from linearize.finetune.prepared import DataOptions
from linearize.finetune.tasks import Task, task
from linearize.parsing import parse_yaml, read_text
from linearize.registry import Hybrid, kernel_info, make_config
from linearize.surgery.layers import kept_layers, parse_heads

SUFFIXES = (".yaml", ".yml")
AVERAGE = "average"


@dataclass(frozen=True)
class Job:
    """A task of a recipe with everything that holds for it.

    Attributes:
        name: what the column is called.
        task: the task.
        step: what the recipe says about it.
        data: what to read; None: the task's own.
        rows: how data becomes rows.
        teacher: tuning of the softmax model.
        distil: stage one.
        align: the alignment.
        finetune: stage two.
        config: config of a model trained from scratch.
    """

    name: str
    task: Task
    step: Step
    data: str | None
    rows: DataOptions
    teacher: TuneConfig
    distil: Distil
    align: Align
    finetune: Tune
    config: dict[str, object]


@dataclass(frozen=True)
class Cell:
    """One cell of the table: a kernel, a task, a seed, and the task distilled on where that is another one."""

    kernel: Kernel
    job: Job
    seed: int
    source: Job | None = None

    @property
    def read(self) -> Job:
        """The task with the rows that this row of the table reads."""
        return dataclasses.replace(self.job, rows=dataclasses.replace(self.job.rows, **self.kernel.rows))

    @property
    def row(self) -> str:
        """Name of the table's row."""
        return self.kernel.called if self.source is None else f"{self.kernel.called} from {self.source.name}"

    @property
    def key(self) -> str:
        """Name of the cell's folder."""
        return _file_name(f"{self.row}-{self.job.name}-s{self.seed}")

    @property
    def distilled_key(self) -> str:
        """Name of the folder of its distilled model; cells of one source share it."""
        return self.key if self.source is None else _file_name(f"{self.row}-s{self.seed}")


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text)


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    folder = resources.files("linearize.recipes")
    return sorted(file.name.rpartition(".")[0] for file in folder.iterdir() if file.name.endswith(SUFFIXES))


def recipe_text(name: str) -> str:
    """Return a recipe's text, by the name of one that comes with the package or by its file.

    Raises:
        UnknownNameError: if there is none.
    """
    path = Path(name).expanduser()
    if path.suffix in SUFFIXES and path.is_file():
        return read_text(path)
    names = recipe_names()
    if name not in names:
        raise unknown_name("recipe", name, names)
    return (resources.files("linearize.recipes") / f"{name}.yaml").read_text(encoding="utf-8")


def load_recipe(name: str, changes: Iterable[str] = ()) -> Recipe:
    """Read a recipe, change it and check it.

    Args:
        name: of a recipe of the package, or a file.
        changes: `key=value`; the key may have dots (`finetune.epochs=1`), the value is YAML (`kernels=[elu,relu]`).

    Raises:
        ConfigError: if it is no YAML, or for anything unknown or of the wrong type; names the key.
    """
    title = Path(name).stem
    try:
        values = parse_yaml(recipe_text(name))
    except (OSError, ValueError) as error:
        if isinstance(error, LinearizeError):
            raise
        raise ConfigError(f"recipe {title}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"recipe {title}: got {kind_of(values)}, expected keys with values")
    for change in changes:
        _change(values, change)
    return check(values, f"recipe {title}")


def check(values: Mapping[str, object], where: str) -> Recipe:
    """Build a recipe from plain data and check every name and number in it.

    Raises:
        ConfigError: naming the key.
    """
    recipe = build(Recipe, values, where)
    if recipe.flow not in FLOWS:
        raise ConfigError(f"{where}.flow: {unknown_name('flow', recipe.flow, FLOWS)}")
    for name in ("kernels", "tasks", "seeds"):
        if not getattr(recipe, name):
            raise ConfigError(f"{where}.{name}: got none, expected at least one")
    if (recipe.flow == "transfer") != bool(recipe.sources):
        raise ConfigError(f"{where}.sources: expected tasks to distil on for flow transfer, and none for other flows")
    if recipe.flow in ("pretrained", "transfer", "untuned") and not recipe.model.pretrained:
        raise ConfigError(f"{where}.model.pretrained: got false, expected true for flow {recipe.flow}")
    if bool(recipe.pretrain) != (recipe.pretrain_task is not None):
        raise ConfigError(f"{where}.pretrain: expected both pretrain and pretrain_task, or neither")
    for place, kernel in enumerate(recipe.rows_of_table):
        _check_kernel(kernel, f"{where}.kernels[{place}]")
        _check_rows(kernel, recipe.rows, f"{where}.kernels[{place}].rows")
    labels = [kernel.called for kernel in recipe.rows_of_table]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where}.kernels: two rows are called {twice!r}; give one of them another label")
    jobs = resolve(recipe, where)
    _check_teachers(recipe, jobs, where)
    for row, figures in recipe.figures.items():
        for name in figures:
            if name not in jobs and name != AVERAGE:
                raise ConfigError(f"{where}.figures.{row}: {unknown_name('task', name, [*recipe.steps, AVERAGE])}")
    return recipe


def resolve(recipe: Recipe, where: str = "recipe") -> dict[str, Job]:
    """Return the tasks of a recipe by their names, those to distil on and to train on first among them.

    Raises:
        ConfigError: naming the key.
    """
    steps = dict(recipe.steps)
    jobs = {name: _job(recipe, name, step, f"{where}.tasks.{name}") for name, step in steps.items()}
    for name in recipe.sources:
        jobs.setdefault(name, _job(recipe, name, steps.get(name, Step()), f"{where}.sources.{name}"))
    if recipe.pretrain_task is not None:
        job = _job(recipe, "pretrain", recipe.pretrain_task, f"{where}.pretrain_task")
        tune = build(Tune, {**recipe.pretrain, **recipe.pretrain_task.finetune}, f"{where}.pretrain")
        jobs["pretrain"] = dataclasses.replace(job, finetune=tune)
    return jobs


def cells(recipe: Recipe) -> list[Cell]:
    """Return the cells of a recipe's table, those of a task together, in the order in which they are run."""
    jobs = resolve(recipe)
    found = []
    for seed in recipe.seeds:
        for name in recipe.steps:
            for kernel in recipe.rows_of_table:
                sources: list[Job | None] = [None]
                if recipe.sources and kernel.name != SOFTMAX:
                    sources = [jobs[source] for source in recipe.sources if source != name]
                found += [Cell(kernel, jobs[name], seed, source) for source in sources]
    return found


def plain(recipe: Recipe) -> dict[str, object]:
    """Return a recipe as plain data: what `recipe.yaml` in a run's folder holds."""
    values = _kept(dataclasses.asdict(recipe))
    if isinstance(recipe.tasks, dict):
        values["tasks"] = {name: _without_empty(dataclasses.asdict(step)) for name, step in recipe.tasks.items()}
    return values


def _without_empty(value: object) -> object:
    """Leave out what is empty, so that a resolved recipe stays readable; tuples become lists, as YAML has them."""
    if isinstance(value, Mapping):
        return _kept(value)
    return [_without_empty(one) for one in value] if isinstance(value, list | tuple) else value


def _kept(values: Mapping[str, object]) -> dict[str, object]:
    kept = {key: _without_empty(one) for key, one in values.items()}
    return {key: one for key, one in kept.items() if one is not None and one not in ({}, [], "")}


def _job(recipe: Recipe, name: str, step: Step, where: str) -> Job:
    from linearize.synthetic.sets import make_options

    try:
        found = task(
            step.task or name,
            columns=step.columns,
            label=step.label,
            labels=step.labels,
            validation=step.validation,
            score=step.score,
        )
        if step.folder is not None:
            found = dataclasses.replace(found, folders=(step.folder,))
        if step.make is not None:
            make_options(step.make, step.options)
    except LinearizeError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Job(
        name,
        found,
        step,
        recipe.data if recipe.data is not None else step.dataset,
        build(DataOptions, {**recipe.rows, **step.rows}, f"{where}.rows"),
        build(TuneConfig, {**recipe.teacher, **step.teacher}, f"{where}.teacher"),
        build(Distil, {**recipe.distil, **step.distil}, f"{where}.distil"),
        build(Align, {**recipe.align, **step.align}, f"{where}.align"),
        build(Tune, {**recipe.finetune, **step.finetune}, f"{where}.finetune"),
        {**recipe.model.config, **step.model},
    )


def _check_teachers(recipe: Recipe, jobs: Mapping[str, Job], where: str) -> None:
    for name, job in jobs.items():
        if job.finetune.teacher and recipe.flow == "scratch":
            raise ConfigError(
                f"{where}.tasks.{name}.finetune.teacher: got {kind_of(job.finetune.teacher)}, but flow scratch has no "
                "tuned softmax model; leave it out"
            )
        if job.rows.unlabelled and not job.finetune.teacher:
            called = "pairs made anew" if job.rows.unlabelled[0] == "extra_pairs" else "these texts"
            raise ConfigError(
                f"{where}.tasks.{name}.rows.{job.rows.unlabelled[0]}: {called} have no label; set finetune.teacher to "
                "true"
            )
        try:
            check_unlabelled(job.task, job.rows)
        except ConfigError as error:
            raise ConfigError(f"{where}.tasks.{name}.rows: {error}") from error


def _check_kernel(kernel: Kernel, where: str) -> None:
    if kernel.positions != TILE:
        _check_positions(kernel, where)
    if kernel.name == SOFTMAX:
        if kernel.arguments() or kernel.keep_softmax or kernel.layers or kernel.softmax_heads:
            raise ConfigError(f"{where}: softmax takes no arguments and no layers; leave them out")
        return
    _check_arguments(kernel.everywhere, where)
    try:
        if kernel.softmax_heads is not None:
            parse_heads(kernel.softmax_heads)
        kept_layers(kernel.keep_softmax, 0)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    for number, one in kernel.single_layers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigError(f"{where}.layers: got {number!r}, expected numbers of layers from 0")
        if one.name != SOFTMAX:
            _check_arguments(one, f"{where}.layers.{number}")
        elif one.arguments():
            raise ConfigError(f"{where}.layers.{number}: softmax takes no arguments; leave them out")


def _check_positions(kernel: Kernel, where: str) -> None:
    from linearize.surgery.positions import METHODS

    if kernel.positions not in METHODS:
        raise ConfigError(f"{where}: {unknown_name('positions', kernel.positions, METHODS)}")
    if kernel.name == SOFTMAX or "max_length" not in kernel.rows:
        raise ConfigError(f"{where}.positions: only a converted model with rows.max_length gets more; leave it out")


def _check_arguments(kernel: LayerKernel, where: str) -> None:
    try:
        info = kernel_info(kernel.name)
        config = make_config(info, kernel.args)
        check_hybrid(info, config, Hybrid.of(kernel.arguments()), HeadShape(1, 1, 1, 1, info.causal))
    except LinearizeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if kernel.sinks is not None and (kernel.sinks < 1 or kernel.window is None):
        raise ConfigError(
            f"{where}.sinks: got {kernel.sinks}, expected tokens beside a window; add one, or leave it out"
        )


def _check_rows(kernel: Kernel, rows: Mapping[str, object], where: str) -> None:
    """Refuse what a row of the table cannot read in its own way.

    Raises:
        ConfigError: naming the key.
    """
    known = ("max_length", "chunks") if kernel.name == SOFTMAX else ("max_length",)
    for name in kernel.rows:
        if name not in known:
            raise ConfigError(f"{where}: {unknown_name(f'key of the rows of {kernel.name}', name, known)}")
    build(DataOptions, {**rows, **kernel.rows}, where)
    if kernel.rows and kernel.called == SOFTMAX:
        raise ConfigError(f"{where}: softmax that is read in another way needs a label of its own; add one")


def _change(values: dict[str, Any], change: str) -> None:
    """Carry one `key=value` out.

    Raises:
        ConfigError: if it is written in another way.
    """
    key, equals, text = change.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"got {change!r}, expected key=value such as finetune.epochs=1")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{key}: got {text!r}, expected a YAML value such as 1, text or [a,b]") from error
    if parts == ["kernels"] and isinstance(value, list):
        known = {_label(one): one for one in values.get("kernels", [])}
        value = [known.get(one, one) if isinstance(one, str) else one for one in value]
    if parts[0] == "tasks" and not isinstance(values.get("tasks"), dict):
        values["tasks"] = {name: {} for name in values.get("tasks") or []} if len(parts) > 1 else values.get("tasks")
    if parts == ["tasks"] and isinstance(value, list) and isinstance(values.get("tasks"), dict):
        value = {name: values["tasks"].get(name, {}) for name in value}
    if parts in (["kernels"], ["tasks"], ["seeds"], ["sources"]) and not isinstance(value, list | dict):
        value = [value]
    place = values
    for part in parts[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{key}: {part!r} is no section of keys")
    place[parts[-1]] = value
    if parts == ["tasks"]:
        _drop_figures(values)


def _drop_figures(values: dict[str, Any]) -> None:
    """Keep the paper's figures of the tasks that are left; a task's average is then another one."""
    left = set(values["tasks"])
    figures = values.get("figures")
    if isinstance(figures, dict):
        values["figures"] = {
            row: {name: one for name, one in found.items() if name in left} if isinstance(found, dict) else found
            for row, found in figures.items()
        }


def _label(kernel: object) -> object:
    return kernel.get("label") or kernel.get("name") if isinstance(kernel, dict) else kernel
