"""The runner of a cell's stages.

Each stage starts from files, has its own seed, and writes a complete folder or nothing. A resumed run therefore gives
the same results as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Concatenate, ParamSpec

from torch.utils.data import ConcatDataset
from transformers import PreTrainedModel

from linearize.checkpoint.fingerprint import MODEL, UNKNOWN_INPUTS, check_same, files_digest, model_digest, plain
from linearize.checkpoint.loading import load_processor, move
from linearize.checkpoint.output import atomic_folder, claim
from linearize.checkpoint.ownership import has_weights
from linearize.checkpoint.provenance import ALIGNMENT, STAGE_ONE, STAGE_TWO, log_file, log_lines, read_log
from linearize.conversion.plan import convert as put_in_kernels
from linearize.conversion.positions import current_length, extend_positions, extend_processor
from linearize.core.errors import CheckpointError, ConfigError
from linearize.core.events import Callback, Noted
from linearize.core.heads import Processor, fit_tokenizer
from linearize.core.options import options_of
from linearize.core.parsing import MOST_TEXT, read_json, user_path
from linearize.core.registry import Values
from linearize.data.columns import column_kinds, find_column
from linearize.data.local import known_files
from linearize.data.source import RowBatches
from linearize.jobs.evaluate import rows_per_batch
from linearize.jobs.events import DataOpened, Logged, StepDone
from linearize.jobs.init import fresh_model
from linearize.jobs.recipes.recipe import PRETRAIN, Cell, Job, file_name, resolve
from linearize.jobs.recipes.schema import SOFTMAX, Batches, Model, Recipe, Row
from linearize.jobs.stages import alignment_record, distillation_record, without_heads
from linearize.jobs.synthetic.sets import SETS, make
from linearize.jobs.synthetic.tokenizers import LEARNED, make_tokenizer
from linearize.training.alignment.loop import align
from linearize.training.stage_one.loop import distill
from linearize.training.stage_two.config import TuneConfig
from linearize.training.stage_two.load import beyond_training, check_length, load_for_task, load_teacher
from linearize.training.stage_two.prepare import hold_out, prepare
from linearize.training.stage_two.rows import RowSet, as_dataset
from linearize.training.stage_two.save import remove_work, save_model, tuning_files, tuning_record
from linearize.training.stage_two.splits import Given, located, raw_table
from linearize.training.stage_two.task_types.base import TaskData
from linearize.training.stage_two.trainer import finetune, measure_with_interval

RECORD = "stage.json"


def softmax_folder(recipe: Recipe, cell: Cell) -> str:
    """Return the folder of the softmax model that a cell is compared with: same task, same seed."""
    name = file_name(f"{cell.job.name}-s{cell.seed}")
    return f"teachers/{name}" if recipe.flow == "finetuned" else f"cells/{SOFTMAX}-{name}"


P = ParamSpec("P")


def once(stage: Callable[Concatenate[Path, P], None], target: Path, *args: P.args, **options: P.kwargs) -> Path:
    """Return the folder of a stage's result, after running the stage if it has none.

    A finished run has removed weights that cells added later start from: then the stage runs again.
    """
    done = (target / RECORD).is_file()
    if not done or not has_weights(target):
        with claim(target, overwrite=done):
            stage(target, *args, **options)
    return target


class Runner:
    """Runs the stages of a recipe's cells, each once.

    Args:
        recipe: the recipe.
        folder: the run's folder.
        device: device that models run on.
        on_event: called with events of jobs.
    """

    def __init__(self, recipe: Recipe, folder: Path, device: str, on_event: Callback) -> None:
        self.recipe, self.folder, self.device, self.on_event = recipe, folder, device, on_event
        self._opened: dict[object, TaskData] = {}
        self._inputs: dict[str, object] = {}

    def run(self, cell: Cell) -> tuple[Path, Path | None]:
        """Run the stages of a cell that have no result yet.

        Returns:
            The folder of the cell's result, and the folder of its conversion if it has one.
        """
        recipe, job, row = self.recipe, cell.job, cell.kernel
        target, softmax = self.folder / "cells" / cell.key, None
        if recipe.flow == "scratch":
            first, base = resolve(recipe).get(PRETRAIN), None
            if first is not None:
                place = self.folder / "pretrained" / file_name(f"{row.called}-s{cell.seed}")
                base = once(self._tune, place, first.reading(seed=cell.seed), first.finetune, row=row)
            return once(self._tune, target, cell.read, job.finetune, base=base, row=row), None
        tuned_first, teacher = recipe.flow == "finetuned", bool(job.finetune.teacher)
        if recipe.flow != "untuned" and (row.name == SOFTMAX or tuned_first or teacher):
            tune = job.teacher if tuned_first else job.finetune
            softmax = once(self._tune, self.folder / softmax_folder(recipe, cell), job, tune)
        if row.name == SOFTMAX:
            if softmax is None or row.rows:
                return once(self._measure, target, cell.read, softmax), None
            return softmax, None
        base = softmax if tuned_first else None
        converted = once(self._convert, self.folder / cell.converted_folder, cell, base)
        if recipe.flow == "untuned":
            return once(self._measure, target, cell.read, converted), converted
        guide = softmax if teacher else None
        return once(self._tune, target, cell.read, job.finetune, base=converted, teacher=guide), converted

    def _data(self, job: Job) -> TaskData:
        """Return a task's rows; the most recent ones are cached for the next stage."""
        key = (job.name, job.rows)
        if key not in self._opened:
            self._opened = {key: open_job(self.recipe.model, job)}
            self._check_inputs(job, self._opened[key])
            self.on_event(DataOpened(self._opened[key].description))
        return self._opened[key]

    def _check_inputs(self, job: Job, data: TaskData) -> None:
        """Refuse a model or data whose contents have changed since a stage of the run read them.

        Raises:
            ConfigError: naming what changed.
        """
        contents: dict[str, str | None] = {}
        if self.recipe.model.pretrained:
            contents[MODEL] = model_digest(self.recipe.model.checkpoint)
        path = None if job.data is None else user_path(str(located(job.task, job.data)))
        if path is not None and path.exists():
            # Rows depend on the seed, and cells of other seeds stand in the same table.
            contents[f"contents of the data of {job.name}"] = files_digest(
                known_files(path) if path.is_dir() else [path]
            )
        contents[f"contents of the rows of {job.name}, {json.dumps(plain(job.rows))}"] = data.digest()
        contents = {name: digest for name, digest in contents.items() if digest is not None}
        unknown = False
        for file in sorted(self.folder.glob(f"*/*/{RECORD}")):
            saved = read_json(file, MOST_TEXT).get("inputs")
            unknown = unknown or saved is None
            saved = saved or {}
            common = [name for name in contents if name in saved]
            check_same({name: saved[name] for name in common}, {name: contents[name] for name in common})
        if unknown and not self._inputs:
            self.on_event(Noted(UNKNOWN_INPUTS))
        self._inputs |= contents

    def _record_file(self, record: Values) -> dict[str, str]:
        """Return the record of a stage as a file, with the hashes of what this run has read."""
        return {RECORD: json.dumps({**record, "inputs": self._inputs}, indent=2) + "\n"}

    def _tune(
        self,
        target: Path,
        job: Job,
        tune: TuneConfig,
        *,
        base: Path | None = None,
        row: Row | None = None,
        teacher: Path | None = None,
    ) -> None:
        """Tune a model.

        Args:
            target: the folder.
            job: the task, with its rows; their seed is that of everything random.
            tune: the options.
            base: folder of the model; None: the recipe's own model.
            row: the row of the table whose kernels a model from scratch gets.
            teacher: folder of the teacher, or None.
        """
        data = self._data(job)
        config = dataclasses.replace(tune, seed=job.rows.seed)
        model = move(self._load(job, data, base, row, new_head=True), self.device)
        check_length(model, job.task, job.rows.max_length)
        guide = None if teacher is None else load_teacher(str(teacher), data, model)
        name = target.relative_to(self.folder)
        work = self.folder / ".work" / name
        result = finetune(
            model,
            data,
            config,
            folder=work,
            resume=True,
            on_log=lambda entry: self.on_event(Logged(entry)),
            on_step=lambda report: self.on_event(StepDone(report)),
            tensorboard=self.folder / "tensorboard" / name,
            teacher=guide,
        )
        record = tuning_record(data, config, result, None if guide is None else SOFTMAX)
        files = tuning_files(record, result, [] if base is None else read_log(base)) | self._record_file(record)
        stage = {"finetuning": record}
        save_model(model, target, data.type.processor, stage=stage, extra_files=files, overwrite=True)
        with contextlib.suppress(CheckpointError, OSError):
            remove_work(work)

    def _load(self, job: Job, data: TaskData, base: Path | None, row: Row | None, *, new_head: bool) -> PreTrainedModel:
        """Load the result of the previous stage, or the recipe's checkpoint; or build a model from scratch."""
        model, seed = self.recipe.model, job.rows.seed
        if base is not None:
            return load_for_task(str(base), data, new_head=new_head, seed=seed)
        if model.pretrained:
            return load_for_task(model.checkpoint, data, new_head=new_head, seed=seed, changes=job.config)
        processor = data.type.processor
        config, length = job.config, job.rows.max_length
        if hasattr(processor, "convert_tokens_to_ids"):
            # Completed from the data: vocabulary size, special tokens, and positions for the longest row.
            padding, end, kind = processor.pad_token_id, processor.eos_token_id, config.get("model_type")
            sizes: dict[str, object] = {"vocab_size": len(processor), "pad_token_id": padding}
            if kind == "gpt2":
                sizes |= {"n_positions": length, "bos_token_id": end, "eos_token_id": end}
            else:
                # RoBERTa numbers its positions starting after the padding token's id.
                sizes["max_position_embeddings"] = length + ((padding or 0) + 1 if kind == "roberta" else 0)
            config = {**sizes, **config}
        fresh = fresh_model(config, data.task, data.num_labels, seed=seed, matching_keys=model.matching_keys)
        fit_tokenizer(fresh, processor)
        return fresh if row is None or row.name == SOFTMAX else convert(fresh, row, seed)

    def _convert(self, target: Path, cell: Cell, base: Path | None) -> None:
        """Convert a model, and train and align its kernels."""
        job, row, seed = cell.source or cell.job, cell.kernel, cell.seed

        def reading(length: int | None) -> Job:
            return job if length is None else job.reading(max_length=min(length, cell.read.rows.max_length))

        stage_one = reading(job.distil.max_length)
        data = self._data(stage_one)
        model = self._load(job, data, base, None, new_head=False)
        lengthen(model, data.type.processor, row)
        check_length(model, job.task, stage_one.rows.max_length)
        model = move(convert(model, row, seed), self.device)
        batches = batches_of(data, job.distil, seed)
        config = dataclasses.replace(job.distil, seed=seed)
        if not row.distil:
            config = dataclasses.replace(config, steps=0)
        elif config.epochs is not None:
            passes = config.epochs * batches.steps_per_epoch
            config = dataclasses.replace(config, steps=max(1, math.ceil(passes / config.gradient_accumulation)))
        result = distill(model, batches, config, on_step=lambda report: self.on_event(StepDone(report)))
        record = distillation_record(result)
        lines = log_lines(STAGE_ONE, result.history)
        provenance = {"task": job.name, "seed": seed, "distillation": without_heads(record)}
        if job.align.steps and row.align:
            batches = batches_of(self._data(reading(job.align.max_length)), job.align, seed)
            options = dataclasses.replace(job.align, seed=seed)
            aligned = align(model, batches, options, on_step=lambda report: self.on_event(StepDone(report)))
            provenance["alignment"] = record["alignment"] = alignment_record(aligned, job.align)
            lines = log_lines(ALIGNMENT, aligned.history, lines)
        files = self._record_file(record) | log_file(STAGE_TWO, [], lines)
        save_model(model, target, data.type.processor, stage=provenance, extra_files=files, overwrite=True)

    def _measure(self, target: Path, job: Job, base: Path | None) -> None:
        """Measure a model."""
        data = self._data(job)
        model = load_for_task(self.recipe.model.checkpoint if base is None else str(base), data)
        model = move(model, self.device).eval()
        beyond_training(model, data.task, job.rows.max_length)
        start = time.perf_counter()
        measured = measure_with_interval(model, data, batch_size=rows_per_batch(data.facts))
        record = {
            **{name: getattr(measured, name) for name in ("metrics", "score", "interval", "chance", "scored")},
            "by_position": [dataclasses.asdict(loss) for loss in measured.by_position],
            "facts": data.facts,
            "seconds": time.perf_counter() - start,
        }
        with atomic_folder(target, overwrite=True) as fresh:
            for name, text in self._record_file(record).items():
                (fresh / name).write_text(text, encoding="utf-8")


def batches_of(data: TaskData, options: Batches, seed: int) -> RowBatches:
    """Return a task's rows as batches for stage one and the alignment, which need no labels.

    The held-out rows are those of stage two (`stage_two.prepare`); the validation rows are only for the final score.
    """
    split = hold_out(data, seed=seed)
    assert split.selection is not None
    extra = split.extra
    train: RowSet = ConcatDataset([as_dataset(split.train), as_dataset(extra)]) if extra else split.train
    return RowBatches(train, split.selection, data.collate, data.digest, options.batch_size, options.holdout, seed)


def lengthen(model: PreTrainedModel, processor: Processor, row: Row) -> None:
    """Extend a model's positions, and its processor, to the length of its row of the table, in place.

    Raises:
        ConfigError: if the model's positions cannot be extended.
    """
    most, length = current_length(model), row.rows.get("max_length")
    if isinstance(length, int) and most is not None and length > most:
        extend_processor(processor, extend_positions(model, length, method=row.positions), model)


def convert(model: PreTrainedModel, row: Row, seed: int) -> PreTrainedModel:
    """Convert a model to the kernels of a row of the table."""
    layers = {number: (kernel.name, kernel.arguments()) for number, kernel in row.layers.items()}
    return put_in_kernels(
        model,
        row.name,
        row.arguments(),
        layers=layers or None,
        keep_softmax=row.keep_softmax,
        softmax_heads=row.softmax_heads,
        seed=seed,
    )


def open_job(model: Model, job: Job) -> TaskData:
    """Open a task's data and return its rows, made with the checkpoint's processor, or with one made for the data.

    Raises:
        ConfigError: if a model from scratch has no tokenizer or image size.
    """
    given: Given | None = job.data
    processor: Processor | None = None
    if job.column.make is not None:
        source = None if job.data is None else str(located(job.task, job.data))
        seeded = {"seed": job.rows.seed} if "seed" in options_of(SETS[job.column.make]) else {}
        given, processor = make(job.column.make, seeded | job.column.options, source)
    if model.pretrained:
        processor = load_processor(model.checkpoint, job.task.modality)
    elif job.task.modality == "image":
        from transformers import ViTImageProcessor

        size = model.image_size or model.config.get("image_size")
        if not isinstance(size, int):
            raise ConfigError("model.image_size: got none, expected pixels per side for a model trained from scratch")
        processor = ViTImageProcessor(size={"height": size, "width": size})
    elif processor is None:
        tokens = job.column.tokenizer or model.tokenizer
        if tokens is None:
            raise ConfigError(f"tasks.{job.name}: a model trained from scratch needs a tokenizer; add model.tokenizer")
        if tokens.name is not None:
            processor = load_processor(tokens.name, "text")
        else:
            texts: Iterable[str] = ()
            if tokens.kind in LEARNED:
                # From the texts to train on.
                table = raw_table(located(job.task, str(job.task.dataset) if given is None else given), job.task.train)
                columns = job.task.columns or (find_column(column_kinds(table), None, "text", "text"),)
                texts = (text for column in columns for text in table[column] if text)
            framed = not job.task.type.next_token
            segments = framed and len(job.task.columns) > 1 and _embeds_segments(job.config)
            processor = make_tokenizer(str(tokens.kind), texts, tokens.size, framed=framed, segments=segments)
    return prepare(job.task, processor, job.rows, data=given)


def _embeds_segments(config: dict[str, object]) -> bool:
    """Tell whether a model with this config distinguishes a pair's two texts by `token_type_ids`, as BERT does."""
    from transformers import AutoConfig

    values = dict(config)
    try:
        made = AutoConfig.for_model(str(values.pop("model_type")), **values)
    except Exception:  # Building the model will report what is wrong with its config.
        return False
    return bool(getattr(made, "type_vocab_size", 0) > 1)
