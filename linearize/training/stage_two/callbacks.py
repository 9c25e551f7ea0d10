"""Callbacks of stage two's trainer: its log, its loss, its states, a report of every step, and trackers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils
from transformers.trainer_callback import ExportableState

from linearize.core.errors import TrainingError
from linearize.training.trackers import check_names

if TYPE_CHECKING:
    from linearize.training.stage_one.run import Interrupts
    from linearize.training.stage_two.tuner import Tuner

TENSORBOARD = "tensorboard"


@dataclass(frozen=True)
class TuneStep:
    """Reported to the caller after every step.

    Attributes:
        step: steps done.
        steps: steps planned.
        loss: of the step's rows.
        seconds: since the start, or since the resume.
        left: expected seconds left.
        stage: "stage two".
        phase: none.
        losses: none apart from `loss`.
        held_out: none; it is in the trainer's log.
    """

    step: int
    steps: int
    loss: float
    seconds: float
    left: float
    stage: ClassVar[str] = "stage two"
    phase: ClassVar[str] = ""
    losses: ClassVar[Mapping[str, float]] = {}
    held_out: ClassVar[float | None] = None


class LossMeter(TrainerCallback, ExportableState):
    """Holds the sum of the loss over all steps of a run, a resumed one included.

    The trainer stores and restores it in its checkpoints, by the name of this class.

    Attributes:
        total: the sum, a tensor on the model's device after the first loss.
    """

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0

    def state(self) -> dict[str, object]:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": {"total": float(self.total)}}


def meter_of(trainer: Trainer) -> LossMeter:
    """Return a trainer's meter, which a resume replaces by another one."""
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, LossMeter))


class Watch(TrainerCallback):
    """Passes the log to a function, and stops the training if the loss is not finite."""

    def __init__(self, report: Callable[[dict[str, float]], None] | None) -> None:
        self.report = report

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Check and pass on one entry.

        Raises:
            TrainingError: if a loss or the gradient is not finite.
        """
        logs = logs or {}
        for name in ("loss", "eval_loss", "eval_selection", "grad_norm"):
            if math.isfinite(logs.get(name, 0.0)):
                continue
            if state.global_step == 0:
                raise TrainingError(
                    f"stage two: {name} is {logs[name]} before the first step; check the model's weights and the "
                    "data for broken numbers"
                )
            raise TrainingError(
                f"stage two: {name} became {logs[name]} by step {state.global_step}; lower the learning "
                "rate, or check the data for broken inputs"
            )
        if self.report is not None and logs:
            self.report({"step": state.global_step, "steps": state.max_steps, **logs})


class StartKeeper(TrainerCallback):
    """Makes the state before the first step one of those that the kept state is chosen from."""

    def __init__(self, trainer: Tuner) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Measure and keep the start of a run that is not resumed."""
        if state.global_step == 0 and self.trainer.selection is not None:
            self.trainer.keep_start()


class StateKeeper(TrainerCallback):
    """Saves a state every `save_every` steps, and at the end of the step in which Ctrl-C comes.

    Args:
        interrupts: entered while the trainer runs; it raises once the state is written completely.
        save_every: steps between states, in addition to those of evaluations; None: none.
    """

    def __init__(self, interrupts: Interrupts, save_every: int | None) -> None:
        self.interrupts, self.save_every = interrupts, save_every

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Hold Ctrl-C back during the step; several processes would have to agree on the step."""
        if args.world_size == 1:
            self.interrupts.hold()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ask for a state if one is due."""
        if self.interrupts.waiting or (self.save_every and state.global_step % self.save_every == 0):
            control.should_save = True
        else:
            self.interrupts.release()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Let Ctrl-C through."""
        self.interrupts.release()


class StepReporter(TrainerCallback):
    """Reports every step of a trainer."""

    def __init__(self, trainer: Trainer, report: Callable[[TuneStep], None]) -> None:
        self.trainer, self.report = trainer, report

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Note the first step, which is a later one in a resumed run."""
        self.start, self.first = time.perf_counter(), state.global_step
        self.before = float(meter_of(self.trainer).total)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Report the step."""
        total, seconds = float(meter_of(self.trainer).total), time.perf_counter() - self.start
        left = seconds / (state.global_step - self.first) * (state.max_steps - state.global_step)
        self.report(TuneStep(state.global_step, state.max_steps, total - self.before, seconds, left))
        self.before = total


def check_report_to(value: str) -> tuple[str, ...]:
    """Read `none`, or names of trackers separated by commas, before anything slow is done.

    Raises:
        UnknownNameError: for a name that the Trainer does not know.
        ConfigError: if the package of one is not installed.
    """
    installed = integration_utils.get_available_reporting_integrations()
    return check_names(value, list(integration_utils.INTEGRATION_TO_CALLBACK), installed)


def trackers(value: str, tensorboard: str | Path) -> list[TrainerCallback]:
    """Return the Trainer's callbacks for trackers; TensorBoard's files go to a folder that is kept after the run."""
    callbacks = []
    for name in check_report_to(value):
        callback = integration_utils.INTEGRATION_TO_CALLBACK[name]()
        if name == TENSORBOARD:
            callback.logging_dir = str(tensorboard)
        callbacks.append(callback)
    return callbacks
