"""The stages of a cell. Each begins from files, with its own seed, and ends in a whole folder or none at all.

So a run that is gone on with after an interruption does what an uninterrupted one does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.alignment.loop import AlignResult, align
from linearize.checkpoint.log import ALIGNMENT, STAGE_ONE, STAGE_TWO, log_file, log_lines, read_log
from linearize.checkpoint.output import atomic_folder, claim
from linearize.distillation.loop import DistillResult, distill
from linearize.errors import CheckpointError
from linearize.events import Callback
from linearize.experiments.batches import TaskBatches
from linearize.experiments.job_data import checkpoint, open_job
from linearize.experiments.recipe import Cell, Job
from linearize.experiments.schema import SOFTMAX, Distil, Kernel, Recipe
from linearize.finetune.config import TuneConfig
from linearize.finetune.lengths import beyond_training, check_length
from linearize.finetune.load import fit_tokenizer, fresh_model, load_for_task
from linearize.finetune.prepared import TaskData
from linearize.finetune.save import save_model, tuning_files, tuning_record
from linearize.finetune.teacher import load_teacher
from linearize.finetune.trainer import finetune, measure_with_interval
from linearize.finetune.work import remove_work
from linearize.jobs.events import DataOpened, Logged, StepDone
from linearize.jobs.sides import rows_per_batch
from linearize.jobs.train import alignment_record, distillation_record, without_heads
from linearize.loading import move
from linearize.surgery.apply import convert as put_in_kernels
from linearize.surgery.positions import current_length, extend_positions, extend_processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.types import Processor

STAGE = "stage.json"


class StageRunner:
    """Runs the stages of a recipe's run, each once.

    Args:
        recipe: the recipe.
        folder: the run's folder.
        device: where models run.
        on_event: called with what happens.
    """

    def __init__(self, recipe: Recipe, folder: Path, device: str, on_event: Callback) -> None:
        self.recipe, self.folder, self.device, self.on_event = recipe, folder, device, on_event
        self._data: tuple[object, tuple[TaskData, Processor]] | None = None

    def data(self, job: Job, seed: int) -> tuple[TaskData, Processor]:
        """Return a task's rows and the processor that they were made with; the last ones are kept."""
        key = (job.name, seed, job.rows)
        if self._data is None or self._data[0] != key:
            made = open_job(self.recipe.model, job, seed)
            self.on_event(DataOpened(made[0].description))
            self._data = (key, made)
        return self._data[1]

    def teacher(self, job: Job, seed: int) -> Path:
        """Tune (or train) the softmax model on a task, once per task and seed."""
        target = self.folder / "teachers" / f"{job.name}-s{seed}"
        return self._tuned(target, None, None, job, job.teacher, seed)

    def untouched(self, job: Job, seed: int) -> Path:
        """Tune the pretrained softmax model on a task with stage two's options: a row of the table itself."""
        target = self.folder / "cells" / f"{SOFTMAX}-{job.name}-s{seed}"
        return self._tuned(target, None, None, job, job.finetune, seed)

    def distilled(self, cell: Cell, base: str | None) -> Path:
        """Convert a checkpoint (None: the recipe's own) and distil it on a task."""
        job = cell.source or cell.job
        target = self.folder / "distilled" / cell.distilled_key
        if (target / STAGE).is_file():
            return target
        with claim(target):
            return self._distilled(target, job, cell, base)

    def _distilled(self, target: Path, job: Job, cell: Cell, base: str | None) -> Path:
        most = cell.read.rows.max_length
        taught = at_length(job, job.distil.max_length, most)
        data, processor = self.data(taught, cell.seed)
        if base is None:
            model = load_for_task(checkpoint(self.recipe.model), data, seed=cell.seed, changes=job.config)
        else:
            model = load_for_task(base, data, seed=cell.seed)
        fit_tokenizer(model, processor)
        processor = lengthen(model, processor, cell)
        check_length(model, job.task, taught.rows.max_length)
        model = convert(model, cell.kernel, cell.seed)
        result = self._distil(model, data, job, cell)
        record = distillation_record(result)
        lines = log_lines(STAGE_ONE, result.history)
        stage = {"task": job.name, "seed": cell.seed, "distillation": without_heads(record)}
        if job.align.steps and cell.kernel.align:
            data, _ = self.data(at_length(job, job.align.max_length, most), cell.seed)
            aligned = self._align(model, data, job, cell)
            record["alignment"] = alignment_record(aligned, config=job.align)
            stage["alignment"] = record["alignment"]
            lines = log_lines(ALIGNMENT, aligned.history, lines)
        save_model(
            model,
            target,
            processor,
            stage=stage,
            extra_files={STAGE: json.dumps(record, indent=2) + "\n", **log_file(STAGE_TWO, [], lines)},
        )
        return target

    def tuned(self, cell: Cell, base: Path | None) -> Path:
        """Tune a converted checkpoint on the cell's task; without one, train a fresh linear model."""
        target = self.folder / "cells" / cell.key
        kernel = None if base is not None else cell.kernel
        teacher = self._tuned_teacher(cell) if cell.job.finetune.teacher else None
        return self._tuned(target, base, kernel, cell.read, cell.job.finetune, cell.seed, teacher)

    def _tuned_teacher(self, cell: Cell) -> Path:
        """Return the softmax model tuned on the cell's task: what was converted, or the table's own softmax row."""
        tuned = self.teacher if self.recipe.flow == "finetuned" else self.untouched
        return tuned(cell.job, cell.seed)

    def measured(self, cell: Cell, base: Path | None) -> Path:
        """Measure a checkpoint on the cell's task as it is; without one, the recipe's own."""
        target = self.folder / "cells" / cell.key
        if (target / STAGE).is_file():
            return target
        data, processor = self.data(cell.read, cell.seed)
        model = move(load_for_task(str(base or checkpoint(self.recipe.model)), data), self.device).eval()
        fit_tokenizer(model, processor)
        beyond_training(model, data.task, cell.read.rows.max_length)
        start = time.perf_counter()
        measured = measure_with_interval(model, data, batch_size=rows_per_batch(data.facts))
        record = {
            "metrics": measured.metrics,
            "score": measured.score,
            "interval": measured.interval,
            "chance": measured.chance,
            "by_position": [dataclasses.asdict(one) for one in measured.by_position],
            "facts": data.facts,
            "seconds": time.perf_counter() - start,
        }
        with atomic_folder(target, overwrite=True) as fresh:
            (fresh / STAGE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return target

    def pretrained(self, cell: Cell, job: Job) -> Path:
        """Train a fresh model of the cell's kernel on the recipe's first task, once per kernel and seed."""
        target = self.folder / "pretrained" / f"{cell.kernel.called}-s{cell.seed}"
        return self._tuned(target, None, cell.kernel, job, job.finetune, cell.seed)

    def _tuned(
        self,
        target: Path,
        base: Path | None,
        kernel: Kernel | None,
        job: Job,
        config: TuneConfig,
        seed: int,
        teacher: Path | None = None,
    ) -> Path:
        if (target / STAGE).is_file():
            return target
        with claim(target):
            return self._tune(target, base, kernel, job, config, seed, teacher)

    def _tune(
        self,
        target: Path,
        base: Path | None,
        kernel: Kernel | None,
        job: Job,
        config: TuneConfig,
        seed: int,
        teacher: Path | None,
    ) -> Path:
        data, processor = self.data(job, seed)
        config = dataclasses.replace(config, seed=seed)
        model = move(self._start(base, kernel, job, data, seed), self.device)
        fit_tokenizer(model, processor)
        check_length(model, job.task, job.rows.max_length)
        guide = None
        if teacher is not None:
            guide = load_teacher(str(teacher), data, model, processor, job.rows.max_length)
        work = self.folder / ".work" / target.parent.name / target.name
        result = finetune(
            model,
            data,
            config,
            folder=work,
            resume=True,
            on_log=lambda entry: self.on_event(Logged(entry)),
            tensorboard=self.folder / "tensorboard" / target.parent.name / target.name,
            teacher=guide,
        )
        record = tuning_record(data, config, result, None if teacher is None else SOFTMAX)
        earlier = [] if base is None else read_log(base)
        extra = tuning_files(record, result, earlier) | {STAGE: json.dumps(record, indent=2) + "\n"}
        save_model(model, target, processor, stage={"finetuning": record}, extra_files=extra)
        with contextlib.suppress(CheckpointError, OSError):
            remove_work(work)
        return target

    def _start(self, base: Path | None, kernel: Kernel | None, job: Job, data: TaskData, seed: int) -> PreTrainedModel:
        """Load the checkpoint to tune, or make a fresh model."""
        if base is not None:
            return load_for_task(str(base), data, new_head=True, seed=seed)
        if self.recipe.model.pretrained:
            return load_for_task(checkpoint(self.recipe.model), data, new_head=True, seed=seed, changes=job.config)
        _, processor = self.data(job, seed)
        model = fresh_model(_sized(job.config, processor, job.rows.max_length), data.task, data.num_labels, seed=seed)
        return model if kernel is None or kernel.name == SOFTMAX else convert(model, kernel, seed)

    def _distil(self, model: PreTrainedModel, data: TaskData, job: Job, cell: Cell) -> DistillResult:
        batches = TaskBatches(data, job.distil.batch_size, job.distil.holdout, cell.seed)
        config = dataclasses.replace(job.distil, seed=cell.seed, steps=distil_steps(job.distil, batches))
        if not cell.kernel.distil:
            config = dataclasses.replace(config, steps=0)
        return distill(
            move(model, self.device), batches, config, on_step=lambda report: self.on_event(StepDone(report))
        )

    def _align(self, model: PreTrainedModel, data: TaskData, job: Job, cell: Cell) -> AlignResult:
        """Bring a distilled model close to its own softmax, which is the tuned one's where the flow tunes first."""
        batches = TaskBatches(data, job.align.batch_size, job.align.holdout, cell.seed)
        config = dataclasses.replace(job.align, seed=cell.seed)
        move(model, self.device)
        return align(model, batches, config, on_step=lambda report: self.on_event(StepDone(report)))


def at_length(job: Job, length: int | None, most: int) -> Job:
    """Return a task with rows of so many tokens, those that are measured at most; None: as they are."""
    if length is None:
        return job
    return dataclasses.replace(job, rows=dataclasses.replace(job.rows, max_length=min(length, most)))


def lengthen(model: PreTrainedModel, processor: Processor, cell: Cell) -> Processor:
    """Give a model the positions that its row of the table reads, and return a processor that knows of them.

    Raises:
        ConfigError: if the model takes no more.
    """
    most, length = current_length(model), cell.kernel.rows.get("max_length")
    if length is None or most is None or length <= most:
        return processor
    return extend_processor(processor, extend_positions(model, length, method=cell.kernel.positions), model)


def distil_steps(config: Distil, batches: TaskBatches) -> int:
    """Return the steps of stage one: as asked, or those of so many passes over the rows."""
    if config.epochs is None:
        return config.steps
    return max(1, math.ceil(config.epochs * batches.steps_per_epoch / config.gradient_accumulation))


def convert(model: PreTrainedModel, kernel: Kernel, seed: int) -> PreTrainedModel:
    """Put a row's kernels into a model."""
    layers = {number: (one.name, one.arguments()) for number, one in kernel.single_layers.items()}
    return put_in_kernels(
        model,
        kernel.name,
        kernel.arguments(),
        layers=layers or None,
        keep_softmax=kernel.keep_softmax,
        softmax_heads=kernel.softmax_heads,
        seed=seed,
    )


def _sized(config: dict[str, object], processor: Any, length: int) -> dict[str, object]:
    """Fill in what follows from the data: the vocabulary, its special tokens, and room for the longest row."""
    values = dict(config)
    if not hasattr(processor, "convert_tokens_to_ids"):
        return values
    values.setdefault("vocab_size", len(processor))
    values.setdefault("pad_token_id", processor.pad_token_id)
    if values.get("model_type") == "gpt2":
        values.setdefault("n_positions", length)
        values.setdefault("bos_token_id", processor.eos_token_id)
        values.setdefault("eos_token_id", processor.eos_token_id)
    else:
        # RoBERTa counts its positions from behind the padding token's number.
        extra = (processor.pad_token_id or 0) + 1 if values.get("model_type") == "roberta" else 0
        values.setdefault("max_position_embeddings", length + extra)
    return values
