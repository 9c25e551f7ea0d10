"""Checkpoints of transformers' trainer: which one a run goes on from, and whether it fits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.errors import CheckpointError
from linearize.parsing import MOST_TEXT, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
"""Files without which a checkpoint of the trainer is a half-written one (the weights come first)."""


def last_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest whole checkpoint of the trainer that has the best one still beside it.

    One that was interrupted while written is passed over. Without the best one the run could only end with other
    weights than it chose, so it goes on from an earlier one, or from the start.
    """
    found = []
    for path in Path(folder).glob("checkpoint-*"):
        number = path.name.rpartition("-")[2]
        if number.isdigit() and _whole(path):
            found.append((int(number), path))
    return max(found)[1] if found else None


def check_names(model: PreTrainedModel, checkpoint: Path) -> None:
    """Refuse a checkpoint whose weights are not this model's: the trainer would pass over them without a word.

    Raises:
        CheckpointError: naming a weight.
    """
    from safetensors import safe_open

    file = checkpoint / "model.safetensors"
    if not file.is_file():
        return
    with safe_open(file, "pt") as weights:
        there = set(weights.keys())
    state = model.state_dict()
    # Of weights that are one and the same, one name is saved.
    saved = {state[name].data_ptr() for name in there & set(state)}
    missing = sorted(name for name, tensor in state.items() if name not in there and tensor.data_ptr() not in saved)
    if missing or not there <= set(state):
        strange = missing or sorted(there - set(state))
        raise CheckpointError(
            f"stage two: {str(checkpoint)!r} does not fit the model (weight {strange[0]!r}); "
            "delete that folder and start anew"
        )


def finished(checkpoint: Path) -> bool:
    """Tell whether the run of a whole checkpoint had come to its end: all steps done, or stopped early."""
    state = read_json(checkpoint / "trainer_state.json", MOST_TEXT)
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {}).get("args", {})
    return bool(state["global_step"] >= state["max_steps"] or control.get("should_training_stop"))


def _whole(path: Path) -> bool:
    ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
    # Of several processes each writes its own.
    draws = [f"rng_state_{rank}.pth" for rank in ranks] if len(ranks) > 1 else ["rng_state.pth"]
    if not all((path / name).is_file() for name in (*NEEDED, *draws)) or not any(path.glob("*.safetensors")):
        return False
    try:
        state = read_json(path / "trainer_state.json", MOST_TEXT)
        best = state.get("best_model_checkpoint")
    except (OSError, ValueError, AttributeError):
        return False
    return best is None or any((path.parent / Path(best).name).glob("*.safetensors"))
