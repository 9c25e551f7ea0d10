"""Report to trackers, the same ones in every stage: Accelerate's, such as TensorBoard and Weights & Biases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.core.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker
    from transformers import TrainerCallback

    from linearize.training.alignment.loop import AlignStep
    from linearize.training.stage_one.loop import StepReport

NONE = "none"
REPORT_TO = "where the run reports: none, tensorboard (OUTPUT.tensorboard), wandb or another of Accelerate's trackers"
TENSORBOARD = "tensorboard"
HELD_OUT = "held_out"
STAGE_TWO = "stage_two"


def check_report_to(value: str) -> tuple[str, ...]:
    """Read `none`, or names of trackers separated by commas, before anything slow is done.

    Raises:
        UnknownNameError: for a name that Accelerate does not know.
        ConfigError: if a tracker's package is not installed.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = [str(name) for name in get_available_trackers()]
    names = dict.fromkeys(part.strip() for part in value.split(",") if part.strip() not in ("", NONE))
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise unknown_name("report_to", name, [NONE, *LOGGER_TYPE_TO_CLASS])
        if name not in installed:
            package = '"linearize[trackers]"' if name == TENSORBOARD else name
            raise ConfigError(f"report_to: got {name}, but it is not installed; pip install {package}, or leave it out")
    return tuple(names)


class Curves:
    """The curves of one stage, in every tracker.

    Args:
        value: `none`, or names of Accelerate's trackers (tensorboard, wandb ...), separated by commas.
        folder: folder for the trackers that write files.
        tag: prefix of the curves' names.

    Raises:
        UnknownNameError: for an unknown name.
        ConfigError: if a tracker's package is not installed.
    """

    def __init__(self, value: str, folder: str | Path, tag: str) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        self._kinds = [LOGGER_TYPE_TO_CLASS[name] for name in check_report_to(value)]
        self._folder, self._tag = str(folder), tag
        self._trackers: list[GeneralTracker] = []

    def write(self, values: Mapping[str, float | None], step: int) -> None:
        """Add a point to each curve; None adds none."""
        # Start at the first step: trackers need the process's state, which the loop's Accelerator sets up.
        for kind in () if self._trackers else self._kinds:
            # Without a run's name the files go into the folder itself.
            self._trackers.append(kind("", self._folder) if kind.requires_logging_directory else kind("linearize"))
            self._trackers[-1].start()
        points = {f"{self._tag}/{name}": value for name, value in values.items() if value is not None}
        for tracker in self._trackers:
            tracker.log(points, step=step)

    def finish(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            tracker.finish()


@contextlib.contextmanager
def reporter(
    value: str,
    folder: str | Path,
    tag: str = "stage_one",
    also: Callable[[StepReport | AlignStep], None] = lambda report: None,
) -> Iterator[Callable[[StepReport | AlignStep], None]]:
    """Yield a function that reports a step of stage one or of the alignment.

    Args:
        value: `none`, or names of trackers, as in `Curves`.
        folder: folder for the trackers that write files.
        tag: prefix of the curves' names.
        also: another function to call with every report.

    Raises:
        UnknownNameError: for an unknown name.
        ConfigError: if a tracker's package is not installed.
    """
    curves = Curves(value, folder, tag)

    def write(report: StepReport | AlignStep) -> None:
        values = {"loss": report.loss, "learning_rate": report.learning_rate, HELD_OUT: report.held_out}
        curves.write(values | {f"layer/{name}": loss for name, loss in report.losses.items()}, report.step)
        also(report)

    try:
        yield write
    finally:
        curves.finish()


def callbacks_for(value: str, folder: str | Path) -> list[TrainerCallback]:
    """Return the Trainer's callbacks that report stage two to trackers; the arguments are those of `Curves`."""
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    curves = Curves(value, folder, STAGE_TWO)

    class Report(TrainerCallback):
        def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            """Add what the Trainer logged."""
            if state.is_world_process_zero:
                numbers = {k: float(v) for k, v in kwargs["logs"].items() if isinstance(v, int | float)}
                curves.write({_curve(name): value for name, value in numbers.items()}, state.global_step)

        def on_train_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
        ) -> None:
            """Close the trackers."""
            curves.finish()

    return [Report()] if check_report_to(value) else []


def _curve(logged: str) -> str:
    """Return the name of a curve for a name in the Trainer's log: the loss that chooses the state is `HELD_OUT`."""
    return HELD_OUT if logged == "eval_selection" else logged.replace("eval_", f"{HELD_OUT}/", 1)
