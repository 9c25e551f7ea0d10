"""A task's rows as the batches of stage one: trained on training rows, measured on some that were held out of them.

The rows held out are those of stage two (`linearize.finetune.selection`); the validation rows are only reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset

from linearize.finetune.prepared import Row, RowSet, TaskData
from linearize.finetune.selection import hold_out

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")


class TaskBatches:
    """What stage one asks of a data source, see `linearize.distillation.loop.Batches`.

    Args:
        data: a task's rows; those without a label (pairs made anew, further texts) are learned from as well.
        batch_size: rows per batch and process.
        holdout: how many of the rows held out of the training rows to measure on.
        seed: of the order of the training rows, new for each pass, and of the choice of those held out.
    """

    def __init__(self, data: TaskData, batch_size: int, holdout: int, seed: int) -> None:
        self.data, self.batch_size, self.holdout, self.seed = data, batch_size, holdout, seed
        split = hold_out(data, seed=seed)
        self.held: RowSet | None = split.selection
        self.train: RowSet | ConcatDataset[Row] = (
            ConcatDataset([split.train, split.extra]) if split.extra else split.train
        )

    @property
    def steps_per_epoch(self) -> int:
        """Batches that make one pass over the training rows."""
        return max(1, math.ceil(len(self.train) / self.batch_size))

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        """Give batches for ever; the processes share every `world_size * batch_size` rows."""
        everyone = self.batch_size * world_size
        rows = len(self.train)
        for number in range(start, 2**63):
            places = range(number * everyone + rank * self.batch_size, number * everyone + (rank + 1) * self.batch_size)
            yield self._batch(self.train, [self._place(place, rows) for place in places])

    def holdout_batches(self) -> list[dict[str, Tensor]]:
        """Give the rows to measure on."""
        held = self.held
        assert held is not None
        count = min(self.holdout, len(held))
        return [
            self._batch(held, list(range(begin, min(begin + self.batch_size, count))))
            for begin in range(0, count, self.batch_size)
        ]

    def digest(self) -> str:
        """Identify the rows."""
        return self.data.digest()

    def _place(self, place: int, rows: int) -> int:
        turn = place // rows
        if getattr(self, "_turn", None) != turn:
            self._turn, self._order = turn, np.random.default_rng([self.seed, turn]).permutation(rows)
        return int(self._order[place % rows])

    def _batch(self, rows: RowSet | ConcatDataset[Row], places: list[int]) -> dict[str, Tensor]:
        batch = self.data.collate([rows[place] for place in places])
        return {name: value for name, value in batch.items() if name in INPUTS}
