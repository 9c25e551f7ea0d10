"""The states of a run on disk: complete or absent, so that a killed run can always be resumed."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from linearize.checkpoint.output import atomic_folder
from linearize.checkpoint.ownership import discard, holds_only, is_part, is_run, read_mapping, remove_parts
from linearize.core.errors import CheckpointError, LinearizeError, NotSavedError, first_line, interrupted_run
from linearize.core.parsing import MOST_TEXT, read_json
from linearize.core.registry import Values
from linearize.training.processes import is_main
from linearize.training.sharding import save_gathered, spread

TENSORS, RECORD, CHOICES = "state.safetensors", "state.json", "choices"
_NAME = rf"(step-\d+|block-\d+|{CHOICES})"
PARTS = re.compile(rf"{_NAME}|\.(new|old)-{_NAME}-[0-9a-f]{{8}}|\.lock-{_NAME}")
"""Names in a folder of states: complete states, and parts of one from a killed process."""
CALLED = "the states of stage one"


def _old_state(folder: Path) -> bool:
    """Tell whether a folder is a state of an earlier version, which wrote no marker."""
    return is_run(folder / RECORD) and holds_only(folder, re.compile(f"{RECORD}|{TENSORS}"))


@dataclass(frozen=True)
class RunState:
    """Everything that a run needs to resume.

    Attributes:
        record: plain data (step, best loss, history, the fingerprint of the run's inputs).
        tensors: kernels, the optimizer's moments, the best kernels so far, the sampler's random state.
    """

    record: Values
    tensors: dict[str, Tensor]

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.record["step"])


class StateFolder:
    """A folder with the last few states of a run, one folder per step, and what was chosen before the first step.

    A streamed run has a folder for each finished block instead.
    """

    def __init__(self, folder: str | Path, keep: int) -> None:
        self.folder, self.keep = Path(folder), keep

    def steps(self) -> list[int]:
        """Return the steps that have a state, ascending. Hidden folders are unfinished and ignored."""
        paths = self.folder.glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in paths if path.name[5:].isdigit())

    def block(self, number: int) -> Path:
        """Return the folder of a finished block of a streamed run."""
        return self.folder / f"block-{number}"

    def blocks(self) -> int:
        """Return how many blocks of a streamed run are finished, from the first one on."""
        return next(number for number in itertools.count() if not self.block(number).is_dir())

    def save(self, step: int, state: RunState) -> None:
        """Write a state, rename it when it is complete, then delete the oldest.

        All processes call it, if it is sharded.
        """
        if not is_main():
            return save_gathered(state.tensors, self.folder / TENSORS)
        with atomic_folder(self.folder / f"step-{step}", overwrite=True) as fresh:
            save_gathered(state.tensors, fresh / TENSORS)
            (fresh / RECORD).write_text(json.dumps(state.record), encoding="utf-8")
        for old in self.steps()[: -self.keep]:
            if is_part(path := self.folder / f"step-{old}", PARTS, _old_state):
                discard(path)

    def load(self) -> RunState | None:
        """Return the newest state, or None.

        Raises:
            CheckpointError: if it cannot be read.
        """
        steps = self.steps()
        if not steps:
            return None
        path = self.folder / f"step-{steps[-1]}"
        with self.reading():
            files = sorted(path.glob("state*.safetensors")) or [path / TENSORS]
            tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
            state = RunState(read_json(path / RECORD, MOST_TEXT), tensors)
            if state.step != steps[-1]:
                raise ValueError(f"it is of step {state.step}")
            return state

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Refuse, in one line, a newest state whose contents are not those of such a run.

        Raises:
            CheckpointError: in place of an error that damaged or replaced files cause.
        """
        try:
            yield
        except LinearizeError:
            raise
        except Exception as error:
            raise unreadable_state(self.folder / f"step-{self.steps()[-1]}", error) from error

    def save_choices(self, choices: Mapping[str, object]) -> None:
        """Write what was chosen before the first step."""
        with atomic_folder(self.folder / CHOICES, overwrite=True) as fresh:
            (fresh / RECORD).write_text(json.dumps(choices), encoding="utf-8")

    def choices(self) -> Values:
        """Return what `save_choices` wrote, or {}; a folder that cannot be read counts as missing."""
        return read_mapping(self.folder / CHOICES / RECORD)

    def check_free(self, *, overwrite: bool) -> None:
        """Check that a new run may start here; nothing is deleted yet.

        Raises:
            ConfigError: if the folder has states of an interrupted run and `overwrite` is false.
            CheckpointError: if the folder holds something else.
        """
        if (self.steps() or self.blocks()) and not overwrite:
            raise interrupted_run(self.folder)
        remove_parts(self.folder, PARTS, CALLED, unmarked=_old_state, check_only=True)

    def remove(self) -> None:
        """Delete the folder after the result was saved, or before the run starts again.

        Raises:
            CheckpointError: if it holds something else; then nothing is deleted.
        """
        remove_parts(self.folder, PARTS, CALLED, unmarked=_old_state)


def unreadable_state(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a state whose files are damaged or were replaced."""
    why = f"{type(error).__name__}: {first_line(error)[:200]}"
    return CheckpointError(
        f"the state {path.name!r} in {str(path.parent)!r} cannot be read ({why}); remove that "
        "folder to resume from the one before, or start again without --resume"
    )


def keep_states(error: CheckpointError, output: str, states: Mapping[str, RunState | None]) -> CheckpointError:
    """Save the trained states if the result could not be written: next to the output, or in a temporary folder.

    Args:
        error: why the result could not be written.
        output: the output folder.
        states: the last state of each stage, by the ending of its folder's name.

    Returns:
        The error to raise: a `NotSavedError` that names the folder, or `error` if nothing could be saved.
    """
    trained = {ending: state for ending, state in states.items() if state is not None}
    if not trained:
        return error
    elsewhere: str | None = None
    for temporary in (False, True):
        try:
            if temporary:
                output = elsewhere = str(Path(tempfile.mkdtemp(prefix="linearize-")) / Path(output).name)
            for ending, state in trained.items():
                StateFolder(f"{output.rstrip('/')}.{ending}", len(trained)).save(state.step, state)
            return NotSavedError(str(error), f"{output.rstrip('/')}.{next(reversed(trained))}", elsewhere)
        except (CheckpointError, OSError):
            continue
    return error


def of_size(stored: Tensor, now: Tensor) -> Tensor:
    """Return a stored tensor, which must have the size of the one that it is put into: a copy would broadcast it.

    If that one is sharded, so is the result.

    Raises:
        ValueError: if it has another size.
    """
    if stored.shape != now.shape:
        raise ValueError(f"got a tensor of size {list(stored.shape)}, expected {list(now.shape)}")
    return spread(stored, now)


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Check that the moments of a loaded optimizer have the sizes of its weights, which torch does not.

    Raises:
        ValueError: if one has another size.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        for moment in optimizer.state.get(parameter, {}).values():
            if torch.is_tensor(moment) and moment.ndim:
                of_size(moment, parameter)
