"""Report to trackers: TensorBoard, Weights & Biases and others.

Stage one and the alignment report to Accelerate's trackers, stage two through the callbacks of transformers' Trainer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.core.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker
    from transformers import TrainerCallback

    from linearize.training.alignment.loop import AlignStep
    from linearize.training.stage_one.loop import StepReport

NONE = "none"


def check_names(value: str, known: Collection[str], installed: Collection[str]) -> tuple[str, ...]:
    """Read `none`, or names separated by commas.

    Args:
        value: the option's text.
        known: all names.
        installed: names whose package is installed.

    Raises:
        UnknownNameError: for an unknown name.
        ConfigError: if a tracker's package is not installed.
    """
    names = dict.fromkeys(part.strip() for part in value.split(",") if part.strip() not in ("", NONE))
    for name in names:
        if name not in known:
            raise unknown_name("report_to", name, [NONE, *known])
        if name not in installed:
            raise ConfigError(f"report_to: got {name}, but it is not installed; pip install {name}, or leave it out")
    return tuple(names)


@contextlib.contextmanager
def reporter(
    value: str,
    folder: str | Path,
    tag: str = "stage_one",
    also: Callable[[StepReport | AlignStep], None] = lambda report: None,
) -> Iterator[Callable[[StepReport | AlignStep], None]]:
    """Yield a function that reports a step.

    Args:
        value: `none`, or names of Accelerate's trackers (tensorboard, wandb ...), separated by commas.
        folder: folder for the trackers that write files.
        tag: prefix of the curves' names.
        also: another function to call with every report.

    Raises:
        UnknownNameError: for an unknown name.
        ConfigError: if a tracker's package is not installed.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = [str(name) for name in get_available_trackers()]
    names = check_names(value, list(LOGGER_TYPE_TO_CLASS), installed)
    kinds: list[Any] = [LOGGER_TYPE_TO_CLASS[name] for name in names]
    trackers: list[GeneralTracker] = []

    def write(report: StepReport | AlignStep) -> None:
        # Start at the first step: trackers need the process's state, which the loop's Accelerator sets up.
        for kind in () if trackers else kinds:
            # Without a run's name the files go into the folder itself.
            trackers.append(kind("", str(folder)) if kind.requires_logging_directory else kind("linearize"))
            trackers[-1].start()
        values = {"loss": report.loss, "learning_rate": report.learning_rate, "held_out": report.held_out}
        values |= {f"layer/{name}": loss for name, loss in report.losses.items()}
        scalars = {f"{tag}/{name}": value for name, value in values.items() if value is not None}
        for tracker in trackers:
            tracker.log(scalars, step=report.step)
        also(report)

    try:
        yield write
    finally:
        for tracker in trackers:
            tracker.finish()


def check_report_to(value: str) -> tuple[str, ...]:
    """Read `none`, or names of trackers separated by commas, before anything slow is done.

    Raises:
        UnknownNameError: for a name that the Trainer does not know.
        ConfigError: if a tracker's package is not installed.
    """
    from transformers.integrations import integration_utils

    installed = integration_utils.get_available_reporting_integrations()
    return check_names(value, list(integration_utils.INTEGRATION_TO_CALLBACK), installed)


def callbacks_for(value: str, tensorboard: str | Path) -> list[TrainerCallback]:
    """Return the Trainer's callbacks for trackers; TensorBoard's files go to a folder that is kept after the run."""
    from transformers.integrations import integration_utils

    callbacks = []
    for name in check_report_to(value):
        callback = integration_utils.INTEGRATION_TO_CALLBACK[name]()
        if name == "tensorboard":
            callback.logging_dir = str(tensorboard)
        callbacks.append(callback)
    return callbacks
