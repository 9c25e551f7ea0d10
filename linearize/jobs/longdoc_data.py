"""What `longdoc` finds out about model and data before anything slow, and the texts that the conversion learns from."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from linearize.errors import ConfigError
from linearize.finetune.config import DataOptions, TuneConfig
from linearize.finetune.lengths import NO_LIMIT, length_limit
from linearize.finetune.load import load_processor
from linearize.finetune.prepare import located, prepare
from linearize.finetune.prepared import TaskData
from linearize.finetune.tables import open_splits
from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import check_kernel, make_plan
from linearize.jobs.longdoc_config import LongdocJob
from linearize.jobs.longdoc_work import texts_file
from linearize.jobs.sides import check_chunk_length
from linearize.loading import model_type
from linearize.surgery.positions import extend_positions


@dataclass(frozen=True)
class Lengths:
    """How many tokens are read.

    Attributes:
        original: by the original, at most.
        linear: by the linear model, at most.
        longest: what the longest row to measure on has.
        notes: what a reader must know.
    """

    original: int
    linear: int
    longest: int
    notes: tuple[str, ...] = ()


QUICK = 4.5e13
"""Operations of a taste: 15 minutes at 50 billion per second, what two cores reach in fp32."""
QUICK_BATCH, QUICK_TOKENS, QUICK_EPOCHS = 8, 4096, 2.0
_TUNING, _STAGE_ONE, _ALIGNMENT, _MEASURING = 0.5, 0.08, 0.12, 0.3
"""Shares of these operations."""


def quick(job: LongdocJob) -> LongdocJob:
    """Return a job sized for `QUICK` operations; options that were given stay.

    The sizes follow from the model's parameters alone, so that they are the same on every machine.
    """
    if not job.quick:
        return job
    cost, short = float(_parameters(job.model)), length_limit(job.model) or 1
    long = job.max_length or 2 * short
    # A pass costs 2 operations a parameter and token; a step 6; stage one 3; the alignment, with its teacher, 8.
    rows = _TUNING * QUICK / (6 * cost * QUICK_EPOCHS * (short + long))
    # Four sides, and both models after each epoch, before the first one and at the end.
    tokens = 3 * short + long + (QUICK_EPOCHS + 2) * (short + long)
    measured = _MEASURING * QUICK / (2 * cost * tokens)
    usual = {one.name: one.default for one in (*fields(LongdocJob), *fields(TuneConfig))}

    def chosen(now: object, name: str, value: float) -> Any:
        return type(value)(value) if now == usual[name] else now

    options = DataOptions(
        limit=job.rows.limit or max(16, int(rows)), validation_limit=job.rows.validation_limit or max(24, int(measured))
    )
    return replace(
        job,
        max_length=long,
        rows=options,
        distill_steps=chosen(
            job.distill_steps, "distill_steps", max(5, int(_STAGE_ONE * QUICK / (3 * cost * QUICK_TOKENS)))
        ),
        align_steps=chosen(job.align_steps, "align_steps", max(3, int(_ALIGNMENT * QUICK / (8 * cost * QUICK_TOKENS)))),
        batch_tokens=chosen(job.batch_tokens, "batch_tokens", QUICK_TOKENS),
        tune=replace(
            job.tune,
            batch_size=chosen(job.tune.batch_size, "batch_size", QUICK_BATCH),
            epochs=chosen(job.tune.epochs, "epochs", QUICK_EPOCHS),
        ),
    )


def _parameters(name: str) -> int:
    """Count the parameters that a token passes through: all but the embeddings."""
    import torch
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(name))
    return sum(one.numel() for path, one in model.named_parameters() if "embedding" not in path)


def check_options(job: LongdocJob) -> None:
    """Refuse what a later step would refuse: a converted model, an unknown kernel, one that takes no more positions.

    Raises:
        LinearizeError: one of its children.
    """
    if model_type(job.model) == "linearize":
        raise ConfigError(
            f"model: {job.model!r} is converted already; give the original checkpoint that it was made of"
        )
    convert = ConvertJob.of(model=job.model, **job.attention(), max_length=_longer(job))
    check_kernel(convert)
    loaded, _, _ = make_plan(convert)
    if convert.max_length is not None:
        extend_positions(loaded.model, convert.max_length, method=job.positions)


def _longer(job: LongdocJob) -> int | None:
    """Return the length to extend to; None where the original takes it already.

    Raises:
        ConfigError: if it takes more than that.
    """
    limit = length_limit(job.model)
    if job.max_length is None or limit is None or job.max_length == limit:
        return None
    if job.max_length < limit:
        raise ConfigError(
            f"max_length: got {job.max_length}, but {job.model!r} takes {limit:,} tokens already; choose a larger one, "
            "or leave it out"
        )
    return job.max_length


def examine(job: LongdocJob) -> tuple[TaskData, Lengths]:
    """Open the data with whole rows, and say how long everything is.

    Raises:
        ConfigError: if rows are longer than the model takes and no `max_length` says how long inputs shall be, or the
            original has no limit, or chunks would be longer than it takes.
        DataError: if the data cannot be read, or a text has no token.
    """
    limit = length_limit(job.model)
    if limit is None:
        raise ConfigError(
            f"model: {job.model!r} has no limit to its input, expected one whose inputs are cut; compare at lengths of "
            "your own: linearize evaluate MODEL --compare ORIGINAL --max-length N"
        )
    check_chunk_length(job.model, job.chunk_length)
    options = DataOptions(
        max_length=job.max_length or NO_LIMIT,
        limit=job.rows.limit,
        validation_limit=job.rows.validation_limit,
        seed=job.seed,
    )
    data = prepare(job.task, load_processor(job.model, "text"), options, data=job.dataset)
    longest = data.facts["longest_row"]
    if job.max_length is None and longest > limit:
        raise ConfigError(
            f"max_length: got none, but rows have up to {longest:,} tokens and {job.model!r} takes {limit:,}; say how "
            f"long inputs shall be, such as --max-length {_round_up(longest)}"
        )
    return data, Lengths(limit, job.max_length or limit, longest, _notes(job, data, limit, longest))


def _round_up(tokens: int) -> int:
    """Return the power of two from a number of tokens on."""
    return 1 << (tokens - 1).bit_length()


def _notes(job: LongdocJob, data: TaskData, limit: int, longest: int) -> tuple[str, ...]:
    notes = []
    if job.quick:
        notes.append(
            f"A taste, not a measurement: {data.facts['rows']:,} rows to measure on, {len(data.train):,} to train on, "
            f"{job.distill_steps} and {job.align_steps} steps of stage one and alignment. Leave --quick out to decide."
        )
    if longest <= limit:
        notes.append(
            f"The longest row has {longest:,} tokens, which the original reads whole ({limit:,}): a greater length "
            "cannot decide here."
        )
    if job.max_length is not None and longest > job.max_length:
        notes.append(
            f"{100 * data.facts['cut_share']:.1f} % of the rows are longer than {job.max_length:,} tokens and are cut "
            f"there; the longest has {longest:,}."
        )
    return tuple(notes)


def write_texts(job: LongdocJob, work: Path) -> tuple[Path, str, int]:
    """Write the texts of the training rows, those that both models are tuned on: no text to measure on is among them.

    Returns:
        The file, its columns as `DataConfig.text_column` takes them, and how many texts there are.
    """
    given = located(job.task, job.dataset)
    train = open_splits(job.task, given, limit=job.rows.limit, seed=job.seed).train
    examples = train.fetch(range(len(train)))
    pairs = examples[0].pair is not None
    file = texts_file(job, work)
    rows = [{"text": e.value, **({"pair": str(e.pair)} if pairs else {})} for e in examples]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file, "text,pair" if pairs else "text", len(rows)
