"""What happens around the steps of a run of stage two: the start is kept, Ctrl-C waits, every step is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from linearize.training.processes import Interrupts
from linearize.training.stage_two.progress import TuneStep, meter_of
from linearize.training.stage_two.tuner import Tuner


class Hooks(TrainerCallback):
    """Acts around the steps of a run: keeps the start, delays Ctrl-C, asks for states, and reports every step.

    Args:
        trainer: the trainer of the run.
        on_step: called after every step, or None.

    Attributes:
        interrupts: to be entered while the trainer runs; it raises once the state is written completely.
        began: whether a step began, so that a resumed run has read its state.
    """

    def __init__(self, trainer: Tuner, on_step: Callable[[TuneStep], None] | None) -> None:
        self.trainer, self.on_step, self.interrupts = trainer, on_step, Interrupts()
        self.began = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Note the first step, which is a later one in a resumed run; keep the start of a run that is not resumed."""
        self.first = state.global_step
        if self.first and state.best_global_step is not None:
            # transformers would look for it under the path that the run had when it was saved.
            best = Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            state.best_model_checkpoint = str(best)
        self.before = float(meter_of(self.trainer).total)
        if self.first == 0 and self.trainer.selection is not None:
            self.trainer.keep_start()
        self.start = time.perf_counter()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Let the epoch decide masks, crops and groups of similar length, so that a resumed run has the same ones."""
        epoch = self.trainer.data.type.epoch = int(state.epoch or 0)
        self.trainer.groups.manual_seed(args.seed + epoch)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Delay Ctrl-C during the step; several processes would have to agree on the step."""
        self.began = True
        if args.world_size == 1:
            self.interrupts.hold()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Report the step, and ask for a state if one is due."""
        step, steps = state.global_step, state.max_steps
        if self.on_step is not None:
            total, seconds = float(meter_of(self.trainer).total), time.perf_counter() - self.start
            pace = seconds / (step - self.first)
            self.on_step(TuneStep(step, steps, total - self.before, seconds, pace, self.trainer.tokens))
            self.before = total
        if args.eval_strategy == "epoch" and (control.should_training_stop or float(state.epoch or 0.5).is_integer()):
            # The epoch ends: the trainer measures and saves now. A run resumed from an earlier state would not measure.
            return
        save_every = self.trainer.tune.save_every
        if self.interrupts.waiting or (save_every and step % save_every == 0):
            control.should_save = True
        else:
            self.interrupts.release()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Let Ctrl-C through."""
        self.interrupts.release()
