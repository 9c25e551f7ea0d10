"""Whole jobs of the command line: tune a checkpoint, evaluate one, make an untrained one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linearize.checkpoint.log import read_log
from linearize.checkpoint.output import check_room, claim
from linearize.checkpoint.save import size_of
from linearize.errors import CheckpointError, ConfigError, NotSavedError
from linearize.finetune.config import TuneConfig
from linearize.finetune.load import check_trained, fit_tokenizer, fresh_model, load_for_task, load_processor
from linearize.finetune.prepare import prepare
from linearize.finetune.prepared import DataOptions, TaskData
from linearize.finetune.report_to import check_report_to
from linearize.finetune.save import save_model, tuning_files, tuning_record
from linearize.finetune.selection import hold_out
from linearize.finetune.tasks import Task, main_metric, recovery
from linearize.finetune.teacher import load_teacher
from linearize.finetune.trainer import TuneResult, check_trains, finetune, last_checkpoint, measure_task
from linearize.finetune.work import check_work, remove_work
from linearize.parsing import parse_json, parse_yaml

Listener = Callable[[str, Any], None]


@dataclass(frozen=True)
class TuneJob:
    """What `linearize finetune` is told."""

    model: str
    task: Task
    dataset: str | None = None
    output: str | None = None
    overwrite: bool = False
    resume: bool = False
    new_head: bool = False
    device: str = "auto"
    teacher: str | None = None
    data: DataOptions = field(default_factory=DataOptions)
    tune: TuneConfig = field(default_factory=TuneConfig)

    def target(self) -> Path:
        """Return the output folder: as asked, or `<model>-<task>`."""
        return Path(self.output or f"{Path(self.model).name}-{self.task.name}")


@dataclass(frozen=True)
class Evaluation:
    """What `linearize evaluate` found.

    Attributes:
        task: name of the task.
        data: one line about the data.
        figures: the model's metrics.
        score: the task's one figure.
        facts: what a reader must know, such as the stride of a perplexity.
        original: the same metrics of the original, if one was given.
        original_score: its one figure.
        recovered: share of the original's score, percent.
    """

    task: str
    data: str
    figures: dict[str, float]
    score: float
    facts: dict[str, Any]
    original: dict[str, float] | None = None
    original_score: float | None = None
    recovered: float | None = None


def finetune_checkpoint(job: TuneJob, listen: Listener | None = None) -> tuple[Path, TuneResult]:
    """Tune a checkpoint on a task and save the result, all or nothing.

    The trainer's own checkpoints lie beside the output, in `<output>.training`, until the result is saved: an
    interrupted run goes on from there with `resume`. The output may be the checkpoint itself, if linearize wrote it.

    Raises:
        LinearizeError: one of its children, for everything the user can mend.
    """
    target = job.target()
    in_place = os.path.exists(target) and os.path.exists(job.model) and os.path.samefile(target, job.model)
    sources = [None if in_place else job.model, job.dataset, job.teacher]
    with claim(target, overwrite=job.overwrite, sources=sources):
        return _finetune(job, target, listen)


def _finetune(job: TuneJob, target: Path, listen: Listener | None) -> tuple[Path, TuneResult]:
    from linearize.loading import check_device

    tell = listen or (lambda name, value: None)
    device = check_device(job.device)
    check_report_to(job.tune.report_to)
    if job.data.extra_pairs and job.teacher is None:
        raise ConfigError(
            f"extra_pairs: got {job.data.extra_pairs}, but pairs made anew have no label; name a teacher (--teacher)"
        )
    work = target.with_name(f"{target.name}.training")
    check_work(work, resume=job.resume, overwrite=job.overwrite)
    # Read first: a damaged log is told before the first slow step, and the output may be the same folder.
    earlier = read_log(job.model)
    processor = load_processor(job.model, job.task.modality)
    data = prepare(job.task, processor, job.data, data=job.dataset)
    tell("data", data.description)
    model = load_for_task(job.model, data, new_head=job.new_head, seed=job.tune.seed).to(device)
    fit_tokenizer(model, processor)
    check_length(model, job.task, job.data.max_length)
    teacher = None
    if job.teacher is not None:
        teacher = load_teacher(job.teacher, data, model, processor, job.data.max_length)
    check_trains(data)
    data = hold_out(data, job.tune.selection_rows, seed=job.tune.seed)
    check_room(target, size_of(model))
    if not job.resume:
        # Last: until here a mistyped name could still be found out.
        remove_work(work)
    result = finetune(
        model,
        data,
        job.tune,
        folder=work,
        resume=job.resume,
        on_log=lambda entry: tell("log", entry),
        tensorboard=target.with_name(f"{target.name}.tensorboard"),
        teacher=teacher,
    )
    record = tuning_record(data, job.tune, result, job.teacher)
    try:
        save_model(
            model,
            target,
            processor,
            overwrite=job.overwrite,
            stage={"finetuning": record},
            extra_files=tuning_files(record, result, earlier),
        )
    except CheckpointError as error:
        if last_checkpoint(work) is None:
            raise
        raise NotSavedError(str(error), str(work)) from error
    with contextlib.suppress(CheckpointError, OSError):
        remove_work(work)
    tell("saved", target)
    return target, result


def evaluate_checkpoint(
    model: str,
    task: Task,
    *,
    dataset: str | None = None,
    compare: str | None = None,
    options: DataOptions | None = None,
    batch_size: int = 64,
    device: str = "auto",
) -> Evaluation:
    """Measure a checkpoint on a task, and the original beside it.

    Args:
        model: Hub name or folder, softmax or converted.
        task: the task.
        dataset: what to read instead of the task's own data set.
        compare: the original to compare with.
        options: lengths and limits.
        batch_size: rows per batch.
        device: where to run.

    Raises:
        LinearizeError: one of its children, for everything the user can mend.
    """
    from linearize.loading import check_device

    where = check_device(device)
    options = options or DataOptions()

    def measured(name: str) -> tuple[TaskData, dict[str, float]]:
        processor = load_processor(name, task.modality)
        data = prepare(task, processor, options, data=dataset)
        check_trained(name, task)
        loaded = load_for_task(name, data).to(where).eval()
        fit_tokenizer(loaded, processor)
        check_length(loaded, task, options.max_length)
        return data, measure_task(loaded, data, batch_size=batch_size)

    data, figures = measured(model)
    score = main_metric(data.task, figures)
    if compare is None:
        return Evaluation(task.name, data.description, figures, score, data.facts)
    _, original = measured(compare)
    original_score = main_metric(data.task, original)
    share = recovery(data.task, score, original_score)
    return Evaluation(task.name, data.description, figures, score, data.facts, original, original_score, share)


def init_checkpoint(
    config: str | Mapping[str, Any],
    task: Task,
    *,
    output: str,
    kernel: str | None,
    kernel_args: Mapping[str, Any] | None = None,
    layers: str | None = None,
    processor: Any = None,
    num_labels: int | None = None,
    overwrite: bool = False,
    seed: int = 0,
) -> Any:
    """Make an untrained model of an architecture, with linear attention or (kernel None, no layers) softmax.

    Args:
        config: values of the config, or a JSON or YAML file (or a folder with a config.json) of them.
        task: which head.
        output: folder to make.
        kernel: name of the kernel for all layers.
        kernel_args: its arguments.
        layers: kernels per layer, as in `--layers`.
        processor: tokenizer or image processor to save along.
        num_labels: outputs of the head, where it has one per label.
        overwrite: whether a folder that holds something may be replaced.
        seed: of all weights.

    Returns:
        The plan of the conversion, or None for softmax.

    Raises:
        LinearizeError: one of its children, for everything the user can mend.
    """
    with claim(output, overwrite=overwrite, sources=[config if isinstance(config, str) else None]):
        return _init(config, task, output, kernel, kernel_args, layers, processor, num_labels, overwrite, seed)


def _init(
    config: str | Mapping[str, Any],
    task: Task,
    output: str,
    kernel: str | None,
    kernel_args: Mapping[str, Any] | None,
    layers: str | None,
    processor: Any,
    num_labels: int | None,
    overwrite: bool,
    seed: int,
) -> Any:
    from linearize.surgery.apply import apply
    from linearize.surgery.plan import plan

    values = read_config(config) if isinstance(config, str) else config
    model = fresh_model(values, task, num_labels, seed=seed)
    decided = None
    if kernel is not None or layers is not None:
        decided = plan(model, kernel, kernel_args, layers=layers, seed=seed)
        model = apply(model, decided)
    save_model(model, output, processor, overwrite=overwrite, stage={"from_scratch": True, "seed": seed})
    return decided


def read_config(name: str) -> dict[str, Any]:
    """Read a config from a file or folder.

    Raises:
        ConfigError: if it is not there or no mapping.
    """
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"config: got {name!r}, expected a JSON or YAML file, or a folder with a config.json")
    try:
        text = path.read_text(encoding="utf-8")
        values = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: {name!r} cannot be read ({error}); mend the file") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config: {name!r} holds a {type(values).__name__}, expected a mapping with model_type")
    for name in ("architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        values.pop(name, None)
    return values


def check_length(model: Any, task: Task, length: int) -> None:
    """Refuse rows of text that are longer than the model's positions.

    Raises:
        ConfigError: if they are.
    """
    from linearize.surgery.positions import current_length

    most = current_length(model) if task.modality == "text" else None
    if most is not None and length > most:
        raise ConfigError(
            f"max_length: got {length}, but {type(model).__name__} takes at most {most} tokens; lower it, or "
            "convert with --max-length"
        )
