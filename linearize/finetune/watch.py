"""Callbacks of stage two's trainer: its log, a loss that is no number, and a report of every step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from linearize.errors import TrainingError

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    from linearize.distillation.run import Interrupts
    from linearize.finetune.tuner import Tuner


@dataclass(frozen=True)
class TuneStep:
    """Reported to the caller after every step.

    Attributes:
        step: steps done.
        steps: steps planned.
        loss: of the step's rows.
        seconds: since the start, or since the resume.
        left: seconds left, if it goes on as it did.
        stage: "stage two".
        phase: none.
        losses: none apart from `loss`.
        held_out: none, the trainer's log has it.
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


def watch(on_log: Callable[[dict[str, float]], None] | None) -> TrainerCallback:
    """Make the callback that hands the log on and stops when the loss is no number."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        """Hands the log on."""

        def on_log(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            logs: dict[str, float] | None = None,
            **kwargs: object,
        ) -> None:
            """See `TrainerCallback.on_log`."""
            for name in ("loss", "eval_loss", "eval_selection", "grad_norm"):
                if not logs or name not in logs or math.isfinite(logs[name]):
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
            if on_log is not None and logs:
                on_log({"step": state.global_step, "steps": state.max_steps, **logs})

    return Watch()


def start_keeper(trainer: Tuner) -> TrainerCallback:
    """Make the callback that lets the state which training begins with be the one that is kept."""
    from transformers import TrainerCallback

    class StartKeeper(TrainerCallback):
        """Keeps the start."""

        def on_train_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
        ) -> None:
            """See `TrainerCallback.on_train_begin`."""
            if state.global_step == 0 and trainer.selection is not None:
                trainer.keep_start()

    return StartKeeper()


def state_keeper(interrupts: Interrupts, save_every: int | None) -> TrainerCallback:
    """Make the callback that saves a state every `save_every` steps, and at the end of the step in which Ctrl-C comes.

    Args:
        interrupts: entered while the trainer runs; it raises once the state is whole.
        save_every: steps between states, in addition to those of evaluations; None: none.
    """
    from transformers import TrainerCallback

    class StateKeeper(TrainerCallback):
        """Saves states."""

        def on_step_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
        ) -> None:
            """See `TrainerCallback.on_step_begin`."""
            # Several processes would have to agree on the step.
            if args.world_size == 1:
                interrupts.hold()

        def on_step_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
        ) -> None:
            """See `TrainerCallback.on_step_end`."""
            if interrupts.waiting or (save_every and state.global_step % save_every == 0):
                control.should_save = True
            else:
                interrupts.release()

        def on_save(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
        ) -> None:
            """See `TrainerCallback.on_save`."""
            interrupts.release()

    return StateKeeper()


def step_reporter(trainer: Trainer, on_step: Callable[[TuneStep], None]) -> TrainerCallback:
    """Make the callback that reports every step of a trainer."""
    from transformers import TrainerCallback

    from linearize.finetune.loss_meter import meter_of

    class Reporter(TrainerCallback):
        """Reports steps."""

        def on_train_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
        ) -> None:
            """See `TrainerCallback.on_train_begin`; a resumed run begins at a later step."""
            self.start, self.first, self.before = time.perf_counter(), state.global_step, float(meter_of(trainer).total)

        def on_step_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
        ) -> None:
            """See `TrainerCallback.on_step_end`."""
            total, seconds = float(meter_of(trainer).total), time.perf_counter() - self.start
            left = seconds / (state.global_step - self.first) * (state.max_steps - state.global_step)
            on_step(TuneStep(state.global_step, state.max_steps, total - self.before, seconds, left))
            self.before = total

    return Reporter()
