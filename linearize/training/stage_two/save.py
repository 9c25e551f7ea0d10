"""Save a tuned model, softmax or converted, with what was done to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.checkpoint.loading import move, quiet
from linearize.checkpoint.log import STAGE_TWO, log_file
from linearize.checkpoint.output import atomic_folder
from linearize.checkpoint.save import save, write_files
from linearize.core.options import name_of
from linearize.modeling.model import is_linearized
from linearize.training.stage_two.config import TuneConfig
from linearize.training.stage_two.load import RECORD, read_record
from linearize.training.stage_two.prepared import TaskData
from linearize.training.stage_two.tasks import above_chance
from linearize.training.stage_two.trainer import TuneResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.core.types import Processor


def save_model(
    model: PreTrainedModel,
    target: str | Path,
    processor: Processor | None,
    *,
    overwrite: bool = False,
    stage: Mapping[str, object] | None = None,
    extra_files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """Save a model of either kind, all or nothing.

    Args:
        model: it is moved to the CPU.
        target: folder to write.
        processor: tokenizer or image processor.
        overwrite: whether an existing folder may be replaced.
        stage: additions to a converted model's provenance.
        extra_files: more files, texts or bytes by name; a name may hold folders.

    Raises:
        CheckpointError: if the folder cannot be used or written.
    """
    move(model, "cpu")
    files = dict(extra_files or {})
    if is_linearized(model):
        provenance = {**(model.config.linearize.get("provenance") or {}), **(stage or {})}
        with quiet():
            return save(
                model,
                target,
                processor=processor,
                overwrite=overwrite,
                provenance=provenance or None,
                extra_files=files,
            )
    with quiet(), atomic_folder(target, overwrite=overwrite) as folder:
        model.save_pretrained(folder)
        if processor is not None:
            processor.save_pretrained(folder)
        write_files(folder, files)
    return Path(target)


def tuning_record(
    data: TaskData, config: TuneConfig, result: TuneResult, teacher: str | Path | None = None
) -> dict[str, object]:
    """Return the record of a tuning as plain data, without paths."""
    return {
        "task": data.task.name,
        "data": without_folders(data.description),
        "columns": list(data.task.columns),
        "label_column": data.task.label,
        "split": data.task.validation[0] if data.task.exact_validation else None,
        "seed": None if data.options is None else data.options.seed,
        "facts": data.facts,
        "max_length": None if data.options is None else data.options.max_length,
        "metrics": result.metrics,
        "score": result.score,
        "interval": result.interval,
        "chance": result.chance,
        "above_chance": above_chance(data.task, result.score, chance=result.chance, interval=result.interval),
        "steps": result.steps,
        "best_step": result.best_step,
        "selection": result.selection,
        "stopped": result.stopped,
        "teacher": None if teacher is None else Path(teacher).name,
        "original": None if teacher is None else original_result(teacher, data.task.name),
        "seconds": result.seconds,
        "options": asdict(config),
    }


def original_result(teacher: str | Path, task: str) -> dict[str, object] | None:
    """Return the original's result on a task from its own record; None if it has no record of that task."""
    try:
        record = read_record(teacher)
    except (OSError, ValueError):
        return None
    if record is None or record.get("task") != task:
        return None
    return {name: record.get(name) for name in ("score", "metrics", "max_length")}


def tuning_files(record: dict[str, object], result: TuneResult, earlier: list[dict[str, object]]) -> dict[str, str]:
    """Return the files of a checkpoint: the record, and the log, which continues that of stage one."""
    return {RECORD: json.dumps(record, indent=2) + "\n", **log_file(STAGE_TWO, result.history, earlier)}


def without_folders(description: str) -> str:
    """Return a data set's description without the path of its folder: checkpoints are shared, paths are private."""
    name, colon, rest = description.partition(": ")
    return name_of(name) + colon + rest
