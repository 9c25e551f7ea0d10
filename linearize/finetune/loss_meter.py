"""The mean training loss of a whole run, a resumed one included: its sum goes into the trainer's checkpoints."""

from __future__ import annotations

from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState


class LossMeter(TrainerCallback, ExportableState):
    """Holds the sum of the loss over all steps; the trainer stores and restores callbacks by their class's name.

    Attributes:
        total: the sum, a tensor on the model's device once there is a loss.
    """

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0

    def state(self) -> dict[str, object]:
        """See `ExportableState`."""
        return {"args": {}, "attributes": {"total": float(self.total)}}


def meter_of(trainer: Trainer) -> LossMeter:
    """Return a trainer's meter: a resume puts a new one in the place of the one that was given."""
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, LossMeter))
