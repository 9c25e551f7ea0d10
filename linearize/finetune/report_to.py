"""Where stage two reports to, when asked: what transformers' Trainer knows; the plain log is written in any case."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from linearize.trackers import check_names

if TYPE_CHECKING:
    from transformers import TrainerCallback

TENSORBOARD = "tensorboard"


def check_report_to(value: str) -> tuple[str, ...]:
    """Read `none`, or names with commas between, before anything slow is done.

    Raises:
        UnknownNameError: for a name that the Trainer does not know.
        ConfigError: if the package of one is not installed.
    """
    from transformers.integrations import integration_utils as known

    return check_names(value, list(known.INTEGRATION_TO_CALLBACK), known.get_available_reporting_integrations())


def callbacks(value: str, tensorboard: str | Path) -> list[TrainerCallback]:
    """Make the Trainer's callbacks; TensorBoard's files go to a folder that outlives the run's own."""
    from transformers.integrations import integration_utils as known

    made = []
    for name in check_report_to(value):
        callback = known.INTEGRATION_TO_CALLBACK[name]()
        if name == TENSORBOARD:
            callback.logging_dir = str(tensorboard)
        made.append(callback)
    return made
