"""Stage one's state on disk: whole or not at all, so that a killed run goes on as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from linearize.checkpoint.save import atomic_folder
from linearize.errors import CheckpointError, ConfigError

TENSORS, RECORD = "state.safetensors", "state.json"


@dataclass(frozen=True)
class RunState:
    """Everything that a run needs to go on.

    Attributes:
        record: plain data (step, best loss, history, the options that it was made with).
        tensors: kernels, the optimizer's moments, the best kernels so far, the sampler's random state.
    """

    record: dict[str, Any]
    tensors: dict[str, Tensor]


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
            shutil.rmtree(self.folder / f"step-{old}")

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

            record = json.loads((path / RECORD).read_text(encoding="utf-8"))
            return RunState(record, load_file(path / TENSORS))
        except Exception as error:
            raise CheckpointError(
                f"the state {path.name!r} in {str(self.folder)!r} cannot be read ({type(error).__name__}); remove that "
                "folder to go on from the one before, or start again without --resume"
            ) from error

    def remove(self) -> None:
        """Delete the folder: the run is over and saved."""
        shutil.rmtree(self.folder, ignore_errors=True)


def check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with other options than the run was started with.

    Raises:
        ConfigError: naming the first option that differs.
    """
    for name in sorted(saved.keys() | now.keys()):
        if saved.get(name) != now.get(name):
            raise ConfigError(
                f"resume: the run was started with {name}={saved.get(name)!r}, now it is {now.get(name)!r}; "
                "use the same options, or start again without --resume"
            )
