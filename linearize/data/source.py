"""Data as training and measuring use it: a description and batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from linearize.checkpoint.fingerprint import data_digest
from linearize.core.errors import ConfigError
from linearize.data.config import DataConfig
from linearize.data.encode import Encoder
from linearize.data.feeds import MapFeed
from linearize.data.records import Example

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Source:
    """Training and held-out batches of one data set or mixture.

    Attributes:
        description: One line: what the data is, and how much there is.
        fallback: Whether it is the built-in data, because no data set was given and the Hub cannot be reached.
        num_train: Training examples (packed rows with packing).
        num_holdout: Held-out examples (packed rows with packing).
        skipped: Rows without text, image or label that were left out.
        duplicates: Further rows left out of training because they equal a held-out one.
    """

    description: str
    fallback: bool = False
    num_train: int
    num_holdout: int
    skipped: int
    duplicates: int
    _config: DataConfig = field(repr=False)
    _encoder: Encoder = field(repr=False)
    _train: MapFeed = field(repr=False)
    _held: MapFeed = field(repr=False)

    @property
    def options(self) -> dict[str, object]:
        """The options of the batches; two runs with the same options and data see the same batches."""
        return asdict(self._config)

    def digest(self) -> str:
        """Identify the examples by the sizes of all, and the contents of some."""
        return data_digest([self._train.digest(), self._held.fetch(range(self.num_holdout))])

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        """Yield training batches for ever, in an order that depends on the seed only.

        The processes share every global batch of ``world_size * batch_size`` examples: their batches, joined in the
        order of the ranks, are the batch of one process with that batch size. For that, each pads its texts to the
        longest of the global batch.

        Args:
            start: Number of the first batch, to resume as if there had been no interruption. Batches before it are not
                read.
            rank: Number of this process.
            world_size: How many processes there are.

        Yields:
            ``input_ids`` and ``attention_mask`` (``token_type_ids`` too if the tokenizer has them), long [B, T]; or
            ``pixel_values``, float [B, C, H, W].

        Raises:
            ConfigError: If a number is out of range.
        """
        if start < 0 or world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                f"got start {start}, rank {rank} and world_size {world_size}, "
                "expected start of at least 0 and a rank below world_size."
            )
        return self._batches(start, rank, world_size)

    @property
    def row_length(self) -> int:
        """Tokens that every row to train on has with packing; 0 without."""
        return self._config.max_length if self._config.packing else 0

    def holdout_examples(self, most: int) -> list[Example]:
        """Return the first held-out examples, unchanged; fewer if fewer are held out."""
        return self._held.fetch(range(min(most, self.num_holdout)))

    def holdout_batches(self) -> list[dict[str, Tensor]]:
        """Return all held-out examples as batches, the same on every process; the last one may be smaller."""
        held, size = range(self.num_holdout), self._config.batch_size
        groups = [held[begin : begin + size] for begin in range(0, len(held), size)]
        return [self._encoder(self._held.fetch(group), slice(None)) for group in groups]

    def _batches(self, start: int, rank: int, world_size: int) -> Iterator[dict[str, Tensor]]:
        size = self._config.batch_size
        mine = slice(rank * size, (rank + 1) * size)
        for items in self._train.batches(size * world_size, start):
            if self._encoder.needs_all:
                yield self._encoder(self._train.fetch(items), mine)
            else:
                yield self._encoder(self._train.fetch(items[mine]), slice(None))


INPUTS = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
"""What a model reads of a batch; the rest are labels."""


class RowBatches:
    """Batches of rows that are made already, such as a task's, for stage one and the alignment.

    Args:
        train: Rows to learn from, by number.
        held: Rows to measure on.
        collate: Makes a batch of tensors from rows.
        digest: Identifies the rows.
        batch_size: Rows per batch and process.
        holdout: How many of the rows to measure on are used.
        seed: Seed of the order of the training rows, which is new for each pass.
    """

    def __init__(
        self,
        train: Any,
        held: Any,
        collate: Callable[[list[Any]], dict[str, Tensor]],
        digest: Callable[[], str],
        batch_size: int,
        holdout: int,
        seed: int,
    ) -> None:
        self.train, self.held, self.collate, self.digest = train, held, collate, digest
        self.batch_size, self.holdout, self.seed = batch_size, min(holdout, len(held)), seed

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the training rows."""
        return max(1, -(-len(self.train) // self.batch_size))

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        """Yield batches for ever; the processes share every `world_size * batch_size` rows."""
        rows, first = len(self.train), rank * self.batch_size
        order = functools.lru_cache(2)(lambda turn: np.random.default_rng([self.seed, turn]).permutation(rows))
        for batch in count(start):
            begin = batch * world_size * self.batch_size + first
            numbers = range(begin, begin + self.batch_size)
            yield self._batch(self.train, [int(order(number // rows)[number % rows]) for number in numbers])

    def holdout_batches(self) -> list[dict[str, Tensor]]:
        """Return the rows to measure on as batches; the last one may be smaller."""
        begins = range(0, self.holdout, self.batch_size)
        return [self._batch(self.held, range(begin, min(begin + self.batch_size, self.holdout))) for begin in begins]

    def _batch(self, rows: Any, numbers: Iterable[int]) -> dict[str, Tensor]:
        batch = self.collate([rows[number] for number in numbers])
        return {name: value for name, value in batch.items() if name in INPUTS}
