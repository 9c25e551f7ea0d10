"""Stage one's state on disk: whole or not at all, so that a killed run goes on as if nothing had happened."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from linearize.checkpoint.output import atomic_folder
from linearize.checkpoint.ownership import discard, holds_only, is_part, is_run, remove_parts
from linearize.errors import CheckpointError, NotSavedError, interrupted_run
from linearize.parsing import MOST_TEXT, read_json

TENSORS, RECORD = "state.safetensors", "state.json"
PARTS = re.compile(r"step-\d+|\.(new|old)-step-\d+-[0-9a-f]{8}|\.lock-step-\d+")
"""What a folder of states holds: the states, and what a killed process left of one."""
CALLED = "the states of stage one"


def _old_state(folder: Path) -> bool:
    """Tell whether a folder is a state of an earlier version, which had no marker."""
    return is_run(folder / RECORD) and holds_only(folder, re.compile(f"{RECORD}|{TENSORS}"))


@dataclass(frozen=True)
class RunState:
    """Everything that a run needs to go on.

    Attributes:
        record: plain data (step, best loss, history, the fingerprint of what the run depends on).
        tensors: kernels, the optimizer's moments, the best kernels so far, the sampler's random state.
    """

    record: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def step(self) -> int:
        """How many steps were done."""
        return int(self.record["step"])


class StateFolder:
    """A folder with the last few states of a run, one folder per step."""

    def __init__(self, folder: str | Path, keep: int) -> None:
        self.folder, self.keep = Path(folder), keep

    def steps(self) -> list[int]:
        """Return the steps that have a state, ascending. Hidden folders are unfinished writes and are not looked at."""
        found = self.folder.glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in found if path.name[5:].isdigit())

    def save(self, step: int, state: RunState) -> None:
        """Write a state under its final name when it is complete, then drop the oldest."""
        from safetensors.torch import save_file

        with atomic_folder(self.folder / f"step-{step}", overwrite=True) as fresh:
            save_file({name: tensor.contiguous() for name, tensor in state.tensors.items()}, fresh / TENSORS)
            (fresh / RECORD).write_text(json.dumps(state.record), encoding="utf-8")
        for old in self.steps()[: -self.keep]:
            if is_part(path := self.folder / f"step-{old}", PARTS, _old_state):
                discard(path)

    def load(self) -> RunState | None:
        """Read the newest state; None if there is none.

        Raises:
            CheckpointError: if it cannot be read.
        """
        steps = self.steps()
        if not steps:
            return None
        path = self.folder / f"step-{steps[-1]}"
        try:
            from safetensors.torch import load_file

            record = read_json(path / RECORD, MOST_TEXT)
            return RunState(record, load_file(path / TENSORS))
        except Exception as error:
            raise CheckpointError(
                f"the state {path.name!r} in {str(self.folder)!r} cannot be read ({type(error).__name__}); remove that "
                "folder to go on from the one before, or start again without --resume"
            ) from error

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse to begin anew where an interrupted run lies; nothing is removed yet.

        Raises:
            ConfigError: if there is one and `overwrite` is false.
            CheckpointError: if the folder holds something else.
        """
        if self.steps() and not overwrite:
            raise interrupted_run(self.folder)
        remove_parts(self.folder, PARTS, CALLED, unmarked=_old_state, check_only=True)

    def remove(self) -> None:
        """Delete the folder: the run is over and saved, or begins anew.

        Raises:
            CheckpointError: if it holds something else; nothing is deleted then.
        """
        remove_parts(self.folder, PARTS, CALLED, unmarked=_old_state)


def keep_states(error: CheckpointError, output: str, states: Mapping[str, RunState | None]) -> CheckpointError:
    """Keep what was trained though the result could not be written: beside the output, or else where there is room.

    Args:
        error: what went wrong.
        output: the output that was to be made.
        states: the last state of each stage, by the ending of its folder's name.

    Returns:
        The error to raise: a `NotSavedError` that says where they are, or the same one where nothing could be kept.
    """
    import tempfile

    found = {ending: state for ending, state in states.items() if state is not None}
    if not found:
        return error
    elsewhere: str | None = None
    for beside in (True, False):
        try:
            if not beside:
                output = elsewhere = str(Path(tempfile.mkdtemp(prefix="linearize-")) / Path(output).name)
            for ending, state in found.items():
                StateFolder(f"{output.rstrip('/')}.{ending}", len(found)).save(state.step, state)
            return NotSavedError(str(error), f"{output.rstrip('/')}.{next(reversed(found))}", elsewhere)
        except (CheckpointError, OSError):
            continue
    return error
