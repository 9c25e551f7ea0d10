"""The rows of a recipe's task, and the processor that makes them: the checkpoint's, or one made for the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from linearize.demo import in_package
from linearize.errors import ConfigError
from linearize.experiments.recipe import Job
from linearize.experiments.schema import Model, Tokens
from linearize.finetune.load import load_processor
from linearize.finetune.prepare import located, prepare
from linearize.finetune.prepared import TaskData
from linearize.finetune.tables import Given, raw_table

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedTokenizerBase

    from linearize.types import Processor


def checkpoint(model: Model) -> str:
    """Return the name or folder of a recipe's pretrained checkpoint.

    Raises:
        CheckpointError: if it lies in a package that is not installed.
    """
    return str(model.name if model.package is None else in_package(model.package))


def open_job(model: Model, job: Job, seed: int) -> tuple[TaskData, Processor]:
    """Open a task's data set and make its rows, with the checkpoint's processor or one made for the data."""
    from linearize.synthetic.sets import make

    rows = dataclasses.replace(job.rows, seed=seed)
    given: Given | None = job.data
    processor: Processor | None = None
    if job.step.make is not None:
        source = None if job.data is None else str(located(job.task, job.data))
        made = make(
            job.step.make, {"seed": seed, **job.step.options} if _seeded(job.step.make) else job.step.options, source
        )
        given, processor = made.tables, made.tokenizer
    if model.pretrained:
        processor = load_processor(checkpoint(model), job.task.modality)
    elif job.task.modality == "image":
        processor = image_processor(model)
    elif processor is None:
        processor = tokenizer_for(job, job.step.tokenizer or model.tokenizer, given)
    return prepare(job.task, processor, rows, data=given), processor


def image_processor(model: Model) -> BaseImageProcessor:
    """Make the image processor of a model trained from scratch.

    Raises:
        ConfigError: if the size is not said.
    """
    from transformers import ViTImageProcessor

    size = model.image_size or model.config.get("image_size")
    if not isinstance(size, int):
        raise ConfigError("model.image_size: got none, expected a number of pixels for a model trained from scratch")
    return ViTImageProcessor(size={"height": size, "width": size})


def tokenizer_for(job: Job, tokens: Tokens | None, given: Given | None) -> PreTrainedTokenizerBase:
    """Make or load the tokenizer of a model trained from scratch; words and pieces are learned from training texts.

    Raises:
        ConfigError: if the recipe does not say which.
    """
    from linearize.data.columns import column_kinds, find_column
    from linearize.synthetic.tokenizers import LEARNED, make_tokenizer

    if tokens is None:
        raise ConfigError(f"tasks.{job.name}: a model trained from scratch needs a tokenizer; add model.tokenizer")
    if tokens.name is not None:
        return load_processor(tokens.name, "text")
    texts: Iterable[str] = ()
    if tokens.kind in LEARNED:
        source = str(job.task.dataset) if given is None else given
        table = raw_table(located(job.task, source), job.task.train)
        columns = job.task.columns or (find_column(column_kinds(table, "text"), None, "text", "text"),)
        texts = (text for column in columns for text in table[column] if text)
    framed = not job.task.type.next_token
    segments = framed and len(job.task.columns) > 1 and _embeds_segments(job.config)
    return make_tokenizer(str(tokens.kind), texts, tokens.size, framed=framed, segments=segments)


def _embeds_segments(config: dict[str, object]) -> bool:
    """Whether a model of this config tells a pair's two texts apart by `token_type_ids`, as BERT does."""
    from transformers import AutoConfig

    values = dict(config)
    try:
        made = AutoConfig.for_model(str(values.pop("model_type")), **values)
    except Exception:  # What is wrong with a config is said where the model is made.
        return False
    return bool(getattr(made, "type_vocab_size", 0) > 1)


def _seeded(name: str) -> bool:
    from linearize.synthetic.sets import SETS

    return "seed" in {field.name for field in dataclasses.fields(SETS[name].config)}
