"""What `longdoc` learns about model and data before anything slow, and the folder of its unfinished run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from linearize.checkpoint.fingerprint import fingerprint
from linearize.checkpoint.loading import model_type
from linearize.checkpoint.ownership import remove_parts
from linearize.conversion.positions import extend_positions
from linearize.core.errors import CheckpointError, ConfigError, interrupted_run
from linearize.core.options import name_of, recorded
from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import check_kernel, make_plan
from linearize.jobs.evaluate import chunk_options
from linearize.jobs.longdoc_config import LongdocJob
from linearize.training.stage_one.run import StateFolder
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.load import NO_LIMIT, length_limit, load_processor
from linearize.training.stage_two.prepare import located, open_splits, prepare
from linearize.training.stage_two.prepared import TaskData
from linearize.training.stage_two.save import STARTED, check_started, remove_work, write_started

QUICK = 4.5e13
"""Operations of a `quick` run: 15 minutes at 50 billion per second, which two cores reach in fp32."""
QUICK_BATCH, QUICK_TOKENS, QUICK_EPOCHS = 8, 4096, 2.0
_TUNING, _STAGE_ONE, _ALIGNMENT, _MEASURING = 0.5, 0.08, 0.12, 0.3
"""Shares of these operations."""

ORIGINAL, CONVERTED, ALIGNED, LINEAR = "original", "converted", "aligned", "linear"
"""Folders of the steps in the work folder: the tuned original; the model converted, aligned, and tuned."""
_STEP = f"({ORIGINAL}|{CONVERTED}|{ALIGNED}|{LINEAR})"
PARTS = rf"\.?started\.json|{_STEP}(\.training|\.stage1|\.align)?|\.(new|old|lock)-{_STEP}.*"
FREE = ("save_every", "memory")
"""Options that a resumed run may change."""


@dataclass(frozen=True)
class Lengths:
    """How many tokens are read.

    Attributes:
        original: by the original, at most.
        linear: by the linear model, at most.
        longest: length of the longest row to measure on.
        notes: what a reader must know.
    """

    original: int
    linear: int
    longest: int
    notes: tuple[str, ...] = ()


def quick(job: LongdocJob) -> LongdocJob:
    """Return a job sized for `QUICK` operations, if it asks for that; options that were given stay.

    The sizes depend on the model's parameters only, so they are the same on every machine.
    """
    if not job.quick:
        return job
    cost, short = float(_parameters(job.model)), length_limit(job.model) or 1
    long = job.max_length or 2 * short
    # Operations per parameter and token: a pass 2, a step 6, stage one 3, the alignment (with its teacher) 8.
    rows = _TUNING * QUICK / (6 * cost * QUICK_EPOCHS * (short + long))
    # Four sides; and both models before the first epoch, after each one, and at the end.
    tokens = 3 * short + long + (QUICK_EPOCHS + 2) * (short + long)
    measured = _MEASURING * QUICK / (2 * cost * tokens)
    sizes = {
        "distill_steps": max(5, int(_STAGE_ONE * QUICK / (3 * cost * QUICK_TOKENS))),
        "align_steps": max(3, int(_ALIGNMENT * QUICK / (8 * cost * QUICK_TOKENS))),
        "batch_tokens": QUICK_TOKENS,
    }
    rows_read = DataOptions(
        limit=job.rows.limit or max(16, int(rows)), validation_limit=job.rows.validation_limit or max(24, int(measured))
    )
    tune = _with_defaults(job.tune, {"batch_size": QUICK_BATCH, "epochs": QUICK_EPOCHS})
    return _with_defaults(replace(job, max_length=long, rows=rows_read, tune=tune), sizes)


def _with_defaults(config: Any, values: Mapping[str, object]) -> Any:
    """Return a config with other defaults; values that differ from its defaults were given, and stay."""
    usual = {field.name: field.default for field in fields(config)}
    return replace(config, **{name: value for name, value in values.items() if getattr(config, name) == usual[name]})


def _parameters(name: str) -> int:
    """Count the parameters that a token passes through: all but the embeddings."""
    import torch
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(name))
    return sum(parameter.numel() for path, parameter in model.named_parameters() if "embedding" not in path)


def check_options(job: LongdocJob) -> None:
    """Refuse what a later step would refuse: a converted model, an unknown kernel, positions that cannot be extended.

    Raises:
        LinearizeError: one of its children.
    """
    if model_type(job.model) == "linearize":
        raise ConfigError(f"model: {job.model!r} is converted already; give the original that it was made from")
    limit, longer = length_limit(job.model), job.max_length
    if longer is not None and limit is not None and longer < limit:
        raise ConfigError(
            f"max_length: got {longer}, but {job.model!r} takes {limit:,} tokens already; choose a larger one, or "
            "leave it out"
        )
    convert = ConvertJob.of(
        model=job.model, **job.attention(), max_length=None if limit is None or longer == limit else longer
    )
    check_kernel(convert)
    loaded, _, _ = make_plan(convert)
    if convert.max_length is not None:
        extend_positions(loaded.model, convert.max_length, method=job.positions)


def examine(job: LongdocJob) -> tuple[TaskData, Lengths]:
    """Open the data with whole rows, and measure how long they are.

    Raises:
        ConfigError: if rows are longer than the model takes and `max_length` is not given, the original has no limit,
            or chunks would be longer than it takes.
        DataError: if the data cannot be read, or a text has no token.
    """
    limit = length_limit(job.model)
    if limit is None:
        raise ConfigError(
            f"model: {job.model!r} has no limit to its input, expected one whose inputs are cut; compare at other "
            "lengths: linearize evaluate MODEL --compare ORIGINAL --max-length N"
        )
    options = replace(job.rows, max_length=job.max_length or NO_LIMIT, seed=job.seed)
    chunk_options(job.model, options, job.chunk_length)
    data = prepare(job.task, load_processor(job.model, "text"), options, data=job.dataset)
    longest = data.facts["longest_row"]
    if job.max_length is None and longest > limit:
        power = 1 << (longest - 1).bit_length()
        raise ConfigError(
            f"max_length: got none, but rows have up to {longest:,} tokens and {job.model!r} takes {limit:,}; say how "
            f"long inputs shall be, such as --max-length {power}"
        )
    return data, Lengths(limit, job.max_length or limit, longest, _notes(job, data, limit, longest))


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
    """Write the texts of the training rows, which exclude all texts to measure on.

    Returns:
        The file, its columns as `DataConfig.text_column` takes them, and how many texts there are.
    """
    train = open_splits(job.task, located(job.task, job.dataset), limit=job.rows.limit, seed=job.seed).train
    examples = train.fetch(range(len(train)))
    pairs = examples[0].pair is not None
    file = _texts_file(job, work)
    rows = [{"text": e.value, **({"pair": str(e.pair)} if pairs else {})} for e in examples]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file, "text,pair" if pairs else "text", len(rows)


def _texts_file(job: LongdocJob, work: Path) -> Path:
    return work / f"{Path(name_of(job.dataset)).name.partition('.')[0]}.jsonl"


def work_folder(target: Path) -> Path:
    """Return the work folder of an output."""
    return target.with_name(f"{target.name}.work")


def begin(job: LongdocJob, data: TaskData) -> Path:
    """Make the work folder, or resume the run in it.

    Raises:
        ConfigError: if it exists and neither `resume` nor `overwrite` is set, or the run was started with other options
            or other data.
        CheckpointError: if the folder holds something else.
    """
    work = work_folder(job.target())
    options = {name: value for name, value in recorded(job).items() if name not in FREE}
    options |= {"task": job.task.name, "label column": job.task.label}
    started = fingerprint(data=data, options=options)
    if work.exists() and not job.resume and not job.overwrite:
        raise interrupted_run(work)
    if job.resume and (work / STARTED).exists():
        check_started(work, started)
        return work
    remove(job, work)
    write_started(work, started)
    return work


def remove(job: LongdocJob, work: Path) -> None:
    """Remove the work folder of a run that is saved, or starts again.

    Raises:
        CheckpointError: if it holds something else; nothing is removed then.
    """
    parts = re.compile(rf"{PARTS}|{re.escape(_texts_file(job, work).name)}")
    remove_parts(work, parts, "a longdoc run of linearize", record=STARTED, unmarked=_holds_states)


def _holds_states(folder: Path) -> bool:
    """Tell whether a folder holds the states of an unfinished step, and nothing else."""
    try:
        if folder.suffix == ".training":
            remove_work(folder, check_only=True)
        else:
            StateFolder(folder, 1).check_free(overwrite=True)
    except CheckpointError:
        return False
    return bool(folder.suffix)
