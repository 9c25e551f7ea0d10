"""What a run of stage two reports after every step, and the sum of its loss, which its checkpoints keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerCallback


@dataclass(frozen=True)
class TuneStep:
    """Reported to the caller after every step.

    Attributes:
        step: steps done.
        steps: steps planned.
        loss: loss on the step's rows.
        seconds: seconds since the start or the resume.
        pace: seconds per step since then.
        tokens: tokens read since the start or the resume, without padding; 0 if the rows are not single texts.
        stage: "stage two".
        phase: always empty.
        losses: always empty: there is only `loss`.
        held_out: always None: it is in the trainer's log.
    """

    step: int
    steps: int
    loss: float
    seconds: float
    pace: float
    tokens: int
    stage: ClassVar[str] = "stage two"
    phase: ClassVar[str] = ""
    losses: ClassVar[Mapping[str, float]] = {}
    held_out: ClassVar[float | None] = None

    @property
    def left(self) -> float:
        """Seconds left at that pace."""
        return self.pace * (self.steps - self.step)


class LossMeter(TrainerCallback, ExportableState):
    """Holds the sum of the loss over all steps of a run, including those before a resume.

    The trainer stores and restores it in its checkpoints, by the name of this class.

    Attributes:
        total: the sum, a tensor on the model's device after the first loss.
    """

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0

    def state(self) -> dict[str, object]:
        """Return the values that a checkpoint keeps."""
        return {"args": {}, "attributes": {"total": float(self.total)}}


def meter_of(trainer: Trainer) -> LossMeter:
    """Return a trainer's meter, which a resume replaces with another one."""
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, LossMeter))
