"""The folder of a tuning run, `OUTPUT.training`: the trainer's checkpoints, and what the run was started with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.checkpoint.fingerprint import check_same, fingerprint, weights_digest
from linearize.checkpoint.ownership import TRANSFORMERS, holds_only, remove_parts
from linearize.errors import CheckpointError, interrupted_run
from linearize.finetune.config import MEASURED_ONLY, TuneConfig
from linearize.finetune.prepared import TaskData
from linearize.parsing import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STARTED = "started.json"
PARTS = re.compile(r"checkpoint-\d+|\.?started\.json")
TRAINERS = re.compile(
    r"(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth|trainer_state\.json|training_args\.bin"
    r"|adapter_config\.json|adapter_model\.safetensors|" + TRANSFORMERS.pattern
)
"""Files of the trainer's checkpoints; after a kill any one of them may be the first, or the last that is left."""
CALLED = "a tuning run of linearize"
FREE = ("report_to", "gradient_checkpointing", "save_every")
"""Options that may differ between a run and its continuation."""


def check_work(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse to begin anew where an interrupted run lies, or where something else does; nothing is removed yet.

    Raises:
        ConfigError: if there is a run, and neither `resume` nor `overwrite`.
        CheckpointError: if the folder is not one of ours.
    """
    if folder.exists() and not resume and not overwrite:
        raise interrupted_run(folder)
    remove_work(folder, check_only=True)


def remove_work(folder: Path, *, check_only: bool = False) -> None:
    """Remove a run that is saved, or that is begun anew.

    Raises:
        CheckpointError: if the folder holds something else; nothing is removed then.
    """
    remove_parts(
        folder,
        PARTS,
        CALLED,
        record=STARTED,
        unmarked=lambda checkpoint: holds_only(checkpoint, TRAINERS),
        check_only=check_only,
    )


def describe(
    model: PreTrainedModel, data: TaskData, config: TuneConfig, teacher: PreTrainedModel | None = None
) -> dict[str, object]:
    """Return the fingerprint of a tuning run, before its first step and before low-rank updates are put in."""
    options = {name: value for name, value in asdict(config).items() if name not in FREE}
    options |= {"task": data.task.name, "score": data.task.score}
    if data.options is not None:
        rows = asdict(data.options).items()
        options |= {f"data {name}": value for name, value in rows if name not in MEASURED_ONLY}
        if data.options.extra_texts is None:
            # As it was before there were any, so that runs begun then go on.
            del options["data extra_texts"]
    if teacher is not None:
        options["teacher weights"] = weights_digest(teacher)
    return fingerprint(model=model, data=data, options=options)


def begin(folder: Path, started: Mapping[str, object]) -> None:
    """Write down what a run is started with, whole or not at all.

    Raises:
        OSError: if that cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{STARTED}"
    beside.write_text(json.dumps(started, indent=1) + "\n", encoding="utf-8")
    beside.replace(folder / STARTED)


def check_started(folder: Path, now: Mapping[str, object]) -> None:
    """Refuse to go on with anything else than the run was started with.

    Raises:
        ConfigError: naming what differs.
        CheckpointError: if what was written down cannot be read.
    """
    file = folder / STARTED
    try:
        saved = read_json(file) if file.exists() else {}
        if not isinstance(saved, dict):
            raise ValueError("no mapping")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(file)!r} cannot be read ({error}), so this run cannot be resumed; remove the folder to start again"
        ) from None
    check_same(saved, now)
