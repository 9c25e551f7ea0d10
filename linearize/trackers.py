"""Where a run is reported to beside its plain log: Accelerate's trackers for stage one and the alignment.

Stage two reports through the callbacks of transformers' Trainer (`linearize.finetune.report_to`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from linearize.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

NONE = "none"


def check_names(value: str, known: Collection[str], installed: Collection[str]) -> tuple[str, ...]:
    """Read `none`, or names with commas between.

    Args:
        value: what the user wrote.
        known: all names.
        installed: those whose package is there.

    Raises:
        UnknownNameError: for another name.
        ConfigError: if the package of one is not installed.
    """
    names = dict.fromkeys(part.strip() for part in value.split(",") if part.strip() not in ("", NONE))
    for name in names:
        if name not in known:
            raise unknown_name("report_to", name, [NONE, *known])
        if name not in installed:
            raise ConfigError(
                f"report_to: got {name}, but it is not installed; pip install {name}, or leave the option out"
            )
    return tuple(names)


class Report(Protocol):
    """What is reported of a step."""

    @property
    def step(self) -> int:
        """Its number."""

    @property
    def loss(self) -> float:
        """What is minimised."""

    @property
    def losses(self) -> Mapping[str, float]:
        """The loss by layer, or by term."""

    @property
    def held_out(self) -> float | None:
        """The loss on held-out data, where it was measured."""

    @property
    def learning_rate(self) -> float:
        """The rate at this step."""


@contextlib.contextmanager
def reporter(value: str, folder: str | Path, tag: str = "stage_one") -> Iterator[Callable[[Report], None]]:
    """Give a function that is called with every step's report while the block runs.

    Args:
        value: `none`, or names of Accelerate's trackers (tensorboard, wandb ...) with commas between.
        folder: for the files of those that write files.
        tag: what the curves' names begin with.

    Raises:
        UnknownNameError: for another name.
        ConfigError: if the package of one is not installed.
    """
    trackers = [] if value.strip() in ("", NONE) else _trackers(value, folder)
    started = False

    def write(report: Report) -> None:
        # At the first step and not before: trackers ask for the process's state, which the loop's Accelerator sets up.
        nonlocal started
        for tracker in () if started else trackers:
            tracker.start()
        started = True
        values = {"loss": report.loss, "learning_rate": report.learning_rate, "held_out": report.held_out}
        values |= {f"layer/{name}": loss for name, loss in report.losses.items()}
        scalars = {f"{tag}/{name}": value for name, value in values.items() if value is not None}
        for tracker in trackers:
            tracker.log(scalars, step=report.step)

    try:
        yield write
    finally:
        for tracker in trackers if started else ():
            tracker.finish()


def _trackers(value: str, folder: str | Path) -> list[GeneralTracker]:
    """Make the trackers, none of them started."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = [str(name) for name in get_available_trackers()]
    classes = [LOGGER_TYPE_TO_CLASS[name] for name in check_names(value, list(LOGGER_TYPE_TO_CLASS), installed)]
    # The files lie in the folder itself, not in one of the run's name below it.
    return [made("", str(folder)) if made.requires_logging_directory else made("linearize") for made in classes]
