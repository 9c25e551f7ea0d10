"""Options that every training run has."""

from __future__ import annotations

from dataclasses import dataclass

from linearize.core.errors import ConfigError
from linearize.core.options import check, option

PRECISIONS = ("no", "bf16", "fp16")
LARGEST = 1e6
"""Largest rate or weight: anything larger is a mistake."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The options that every training run has."""

    gradient_accumulation: int = option(1, "batches per optimizer step", low=1)
    save_every: int | None = option(None, "steps between states on disk, for --resume", low=1)
    keep: int = option(2, "how many of these states are kept", low=1, name="keep_states")
    folder: str | None = option(None, "where states are kept")
    resume: bool = option(False, "resume from the newest state of an interrupted run")

    def check(self, where: str) -> None:
        """Check the values of all fields, and that a run with states has a folder for them.

        Raises:
            ConfigError: naming `where`.
        """
        check(self, where)
        if (self.save_every or self.resume) and self.folder is None:
            raise ConfigError(f"{where}: save_every and resume need a folder for the states; set folder")
