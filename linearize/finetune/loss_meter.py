"""The mean training loss of a whole run, a resumed one included: its sum goes into the trainer's checkpoints."""

from __future__ import annotations

import functools
from typing import Any


@functools.lru_cache(maxsize=1)
def _meter_class() -> Any:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    class LossMeter(TrainerCallback, ExportableState):
        """Holds the sum of the loss over all steps; the trainer stores and restores callbacks by their class's name.

        Attributes:
            total: the sum, a tensor on the model's device once there is a loss.
        """

        def __init__(self) -> None:
            self.total: Any = 0.0

        def state(self) -> dict[str, object]:
            """See `ExportableState`."""
            return {"args": {}, "attributes": {"total": float(self.total)}}

    return LossMeter


def loss_meter() -> Any:
    """Make the callback."""
    return _meter_class()()


def meter_of(trainer: Any) -> Any:
    """Return a trainer's meter: a resume puts a new one in the place of the one that was given."""
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, _meter_class()))
