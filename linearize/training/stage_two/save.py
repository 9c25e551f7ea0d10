"""Write the files of stage two: a tuned model with the record of its tuning, and a run's folder, `OUTPUT.training`.

That folder holds the trainer's checkpoints, and a record of what the run depends on (`STARTED`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from linearize.checkpoint.fingerprint import check_same, fingerprint, weights_digest
from linearize.checkpoint.loading import move, quiet
from linearize.checkpoint.output import atomic_folder
from linearize.checkpoint.ownership import TRANSFORMERS, holds_only, remove_parts
from linearize.checkpoint.provenance import STAGE_TWO, log_file
from linearize.checkpoint.save import save, size_of_files, write_files
from linearize.core.errors import CheckpointError, interrupted_run
from linearize.core.heads import Processor
from linearize.core.options import name_of
from linearize.core.parsing import MOST_TEXT, read_json
from linearize.core.registry import Values
from linearize.modeling.model import is_linearized
from linearize.training.processes import machines_used, under_fsdp
from linearize.training.stage_two.config import MEASURED_ONLY, TuneConfig
from linearize.training.stage_two.intervals import Measured
from linearize.training.stage_two.load import RECORD, recorded
from linearize.training.stage_two.task_types.base import TaskData
from linearize.training.stage_two.tasks import above_chance

MEASURED = ("metrics", "score", "interval", "chance")
"""Fields of a result that its record has under the same names."""


@dataclass(frozen=True, kw_only=True)
class TuneResult(Measured):
    """The result of stage two: those of the kept weights on the validation rows, and how these were found.

    Attributes:
        steps: optimizer steps done.
        best_step: the step whose weights were kept; 0 if none measured better than those before the first step.
        selection: how that step was chosen: `by` (figure), `on` (rows), `rows` (their number), `value`.
        stopped: "steps" or "early stopping".
        history: the trainer's log.
        seconds: duration; after a resume, of the last part only.
        adapter: files of the low-rank updates in peft's format, by name; None if not requested.
    """

    steps: int
    best_step: int
    selection: dict[str, object]
    stopped: str
    history: list[dict[str, float]]
    seconds: float
    adapter: dict[str, bytes] | None


def save_model(
    model: PreTrainedModel,
    target: str | Path,
    processor: Processor | None,
    *,
    stage: Mapping[str, object],
    overwrite: bool = False,
    extra_files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """Save a softmax or converted model, completely or not at all.

    Args:
        model: the model; it is moved to the CPU.
        target: folder to write.
        processor: tokenizer or image processor.
        stage: additions to a converted model's provenance.
        overwrite: whether an existing folder may be replaced.
        extra_files: more files, text or bytes by name; names may contain folders.

    Raises:
        CheckpointError: if the folder cannot be used or written.
    """
    move(model, "cpu")
    if is_linearized(model):
        provenance = {**(model.config.linearize.get("provenance") or {}), **stage}
        with quiet():
            return save(
                model, target, processor=processor, overwrite=overwrite, provenance=provenance, extra_files=extra_files
            )
    with quiet(), atomic_folder(target, overwrite=overwrite) as folder:
        model.save_pretrained(folder, **size_of_files(model))
        if processor is not None:
            processor.save_pretrained(folder)
        write_files(folder, extra_files or {})
    return Path(target)


def without_scores(record: Mapping[str, object]) -> Values:
    """Return a `tuning_record` without what it says about its weights, for other weights made from them."""
    return {name: value for name, value in record.items() if name not in (*MEASURED, "above_chance", "original")}


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
        "seed": data.type.options.seed,
        "facts": data.facts,
        "scored": result.scored,
        "max_length": data.type.options.max_length,
        **{name: getattr(result, name) for name in MEASURED},
        "above_chance": above_chance(data.task, result.score, chance=result.chance, interval=result.interval),
        **{name: getattr(result, name) for name in ("steps", "best_step", "selection", "stopped")},
        "teacher": None if teacher is None else Path(teacher).name,
        "original": None if teacher is None else original_result(teacher, data.task.name, result.scored),
        "seconds": result.seconds,
        "hardware": machines_used(),
        "options": asdict(config),
    }


def original_result(teacher: str | Path, task: str, scored: str) -> dict[str, object] | None:
    """Return the original's result on a task from its own record; None if it has no record of that task.

    Nor if it was scored on other rows than those with the hash `scored`; older records have no hash.
    """
    record = recorded(teacher)
    if record.get("task") != task or record.get("scored", scored) != scored:
        return None
    return {name: record.get(name) for name in ("score", "metrics", "max_length")}


def tuning_files(record: dict[str, object], result: TuneResult, earlier: list[dict[str, object]]) -> dict[str, str]:
    """Return the files of a checkpoint: the record, and the log, which continues that of stage one."""
    return {RECORD: json.dumps(record, indent=2) + "\n", **log_file(STAGE_TWO, result.history, earlier)}


def without_folders(description: str) -> str:
    """Return a data set's description without the path of its folder: checkpoints are shared, paths are private."""
    name, colon, rest = description.partition(": ")
    return name_of(name) + colon + rest


STARTED = "started.json"
PARTS = re.compile(r"checkpoint-\d+|\.?started\.json")
TRAINERS = re.compile(
    r"(optimizer|scheduler|scaler)\.pt|optimizer(-\d+-of-\d+)?\.safetensors|rng_state(_\d+)?\.pth"
    r"|trainer_state\.json|training_args\.bin"
    r"|adapter_config\.json|adapter_model\.safetensors|" + TRANSFORMERS.pattern
)
"""Files of the trainer's checkpoints; after a kill, any of them may be the only one left."""
NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
"""A trainer's checkpoint without one of these files is incomplete (the weights are written first)."""
CALLED = "a tuning run of linearize"
PROCESSES = "processes"
"""The name of the number of processes in the fingerprint of a run; earlier versions did not record it."""
FREE = ("report_to", "gradient_checkpointing", "save_every")
"""Options that may differ when a run is resumed."""


def check_work(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse to start a run in the folder of an interrupted run, or of something else; remove nothing.

    Raises:
        ConfigError: if there is a run, and neither `resume` nor `overwrite` is set.
        CheckpointError: if the folder holds anything else.
    """
    if folder.exists() and not resume and not overwrite:
        raise interrupted_run(folder)
    remove_work(folder, check_only=True)


def remove_work(folder: Path, *, check_only: bool = False) -> None:
    """Remove a run whose result is saved, or that is started again.

    Raises:
        CheckpointError: if the folder holds something else; nothing is removed then.
    """
    unmarked = partial(holds_only, names=TRAINERS)
    remove_parts(folder, PARTS, CALLED, record=STARTED, unmarked=unmarked, check_only=check_only)


def describe(
    model: PreTrainedModel, data: TaskData, config: TuneConfig, teacher: PreTrainedModel | None = None
) -> dict[str, object]:
    """Return the fingerprint of a tuning run, before its first step and before low-rank updates are added."""
    options = {name: value for name, value in asdict(config).items() if name not in FREE}
    options |= {"task": data.task.name, "score": data.task.score}
    rows = asdict(data.type.options)
    options |= {f"data {name}": value for name, value in rows.items() if name not in MEASURED_ONLY}
    if teacher is not None:
        options["teacher weights"] = weights_digest(teacher)
    options[PROCESSES] = os.environ.get("WORLD_SIZE", "1") + (" under FSDP" if under_fsdp() else "")
    return fingerprint(model=model, data=data, options=options)


def write_started(folder: Path, started: Mapping[str, object]) -> None:
    """Write what a run depends on, completely or not at all.

    Raises:
        OSError: if that cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{STARTED}"
    draft.write_text(json.dumps(started, indent=1) + "\n", encoding="utf-8")
    draft.replace(folder / STARTED)


def check_started(folder: Path, now: Mapping[str, object], *, newer: Sequence[str] = ()) -> list[str]:
    """Refuse to resume a run with another model, other data or other options.

    Args:
        folder: the run's folder.
        now: the fingerprint of the resumed run.
        newer: names that runs started by earlier versions do not record.

    Returns:
        Those of them that the run does not record.

    Raises:
        ConfigError: naming the difference.
        CheckpointError: if the record cannot be read.
    """
    file = folder / STARTED
    try:
        saved = read_json(file) if file.exists() else {}
        if not isinstance(saved, dict):
            raise ValueError("not a mapping")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(file)!r} cannot be read ({error}), so this run cannot be resumed; remove the folder to start again"
        ) from None
    missing = [name for name in newer if name not in saved]
    check_same(saved, {name: value for name, value in now.items() if name not in missing})
    return missing


def resumed_from(folder: Path, now: Mapping[str, object]) -> Path | None:
    """Return the checkpoint from which to resume a run; None if it has none.

    Raises:
        ConfigError: if the run was started with another model, other data or other options, naming the difference.
        CheckpointError: if its record cannot be read.
    """
    last = last_checkpoint(folder)
    # Those of another number of processes lack some files.
    if last is not None or any(folder.glob(f"checkpoint-*/{NEEDED[0]}")):
        check_started(folder, now, newer=[PROCESSES])
    return last


def last_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint of the trainer whose best checkpoint still exists.

    Without the best checkpoint the run would end with weights that it did not choose, so it is resumed from an earlier
    checkpoint, or from the start.
    """
    checkpoints = {path: path.name.rpartition("-")[2] for path in Path(folder).glob("checkpoint-*")}
    complete = [path for path, number in checkpoints.items() if number.isdigit() and _complete(path)]
    return max(complete, key=lambda path: int(checkpoints[path]), default=None)


def _complete(path: Path) -> bool:
    ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
    # With several processes, each writes its own.
    draws = [f"rng_state_{rank}.pth" for rank in ranks] if len(ranks) > 1 else ["rng_state.pth"]
    if not all((path / name).is_file() for name in (*NEEDED, *draws)) or not any(path.glob("*.safetensors")):
        return False
    try:
        state = read_json(path / "trainer_state.json", MOST_TEXT)
        best = state.get("best_model_checkpoint")
        return best is None or any((path.parent / Path(best).name).glob("*.safetensors"))
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def finished(checkpoint: Path) -> bool:
    """Tell whether the run of a complete checkpoint had ended: all steps done, or stopped early."""
    state = read_json(checkpoint / "trainer_state.json", MOST_TEXT)
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {}).get("args", {})
    return bool(state["global_step"] >= state["max_steps"] or control.get("should_training_stop"))
