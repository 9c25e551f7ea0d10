"""`log.jsonl` in a checkpoint: every stage step by step, one JSON object per line.

Every line has `stage` ("distillation", "alignment" or "finetuning") and `step`. Lines of the first two also have
`steps`, `losses` (by module), `held_out`, `learning_rate` and `seconds`; stage two's are the entries of transformers'
Trainer (`loss`, `eval_loss`, `eval_score` ...).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from linearize.checkpoint.ownership import check_links
from linearize.core.errors import CheckpointError
from linearize.core.parsing import parse_json, read_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LOG = "log.jsonl"
STAGE_ONE, ALIGNMENT, STAGE_TWO = "distillation", "alignment", "finetuning"
Entry: TypeAlias = "DataclassInstance | Mapping[str, object]"
"""A report of a step, or a line that is already plain data."""


def log_file(stage: str, entries: Iterable[Entry], earlier: Iterable[Mapping[str, object]] = ()) -> dict[str, str]:
    """Return the log as a file of a checkpoint (for `save(..., extra_files=...)`); no file if there are no lines.

    Args:
        stage: the stage of the entries.
        entries: the lines without the stage, as mappings or dataclasses: the `history` of the stage's result.
        earlier: lines of the checkpoint that this one was made from. Those of the same stage are dropped, as the
            checkpoint's config also records only the last run of each stage.
    """
    lines = log_lines(stage, entries, earlier)
    return {LOG: "".join(json.dumps(line) + "\n" for line in lines)} if lines else {}


def log_lines(
    stage: str, entries: Iterable[Entry], earlier: Iterable[Mapping[str, object]] = ()
) -> list[Mapping[str, object]]:
    """Return the lines that `log_file` writes, for a further stage to pass as `earlier`."""
    lines = [entry for entry in earlier if entry["stage"] != stage]
    return lines + [
        {"stage": stage, **(dict(entry) if isinstance(entry, Mapping) else asdict(entry))} for entry in entries
    ]


def read_log(folder: str | Path) -> list[dict[str, object]]:
    """Read the log of a checkpoint in a folder; an empty list if it has no log.

    Raises:
        CheckpointError: if a line cannot be read, or a link leads out of the folder.
    """
    check_links(folder)
    file = Path(folder) / LOG
    if not file.is_file():
        return []
    try:
        lines = [parse_json(line) for line in read_text(file).splitlines() if line.strip()]
        if not all(isinstance(line, dict) and "stage" in line and "step" in line for line in lines):
            raise ValueError("a line without a stage or a step")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read as a log ({error}); repair or remove it") from None
    return lines
