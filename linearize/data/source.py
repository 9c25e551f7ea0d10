"""What training and measuring see of their data: a line that says what it is, and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from linearize.checkpoint.fingerprint import data_digest
from linearize.data.config import DataConfig
from linearize.data.encode import Encoder
from linearize.data.feeds import Feed
from linearize.data.order import batches
from linearize.data.records import Example
from linearize.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Source:
    """Training and held-out batches of one data set or mixture.

    Attributes:
        description: One line that says what the data is and how much of it there is.
        fallback: Whether it is the built-in data, because no data set was given and the Hub was out of reach.
        num_train: Training examples (packed rows with packing); None when streaming.
        num_holdout: Held-out examples (packed rows with packing).
        skipped: Rows without text, image or label that were left out; when streaming, those met at the start.
        duplicates: Further rows left out of training because they equal a held-out one; 0 when streaming, where they
            are left out as they come.
        label_names: Class names by number; None without labels, or where these are numbers to begin with.
    """

    description: str
    fallback: bool
    num_train: int | None
    num_holdout: int
    skipped: int
    duplicates: int
    label_names: tuple[str, ...] | None
    _config: DataConfig = field(repr=False)
    _encoder: Encoder = field(repr=False)
    _train: Feed = field(repr=False)
    _held: Sequence[object] = field(repr=False)
    _fetch_held: Callable[[Sequence[Any]], list[Example]] = field(repr=False)

    @property
    def options(self) -> dict[str, object]:
        """What the batches were asked to be; two runs with the same options and data see the same batches."""
        return asdict(self._config)

    def digest(self) -> str:
        """Identify the examples: their sizes all, their contents up to a number of rows, see `Feed.digest`."""
        return data_digest([self._train.digest(), self._fetch_held(self._held)])

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        """Give training batches for ever, in an order that only the seed decides.

        The processes share every global batch of ``world_size * batch_size`` examples: their batches, joined in the
        order of the ranks, are the batch of one process with that batch size. For that, each pads its texts to the
        longest of the global batch.

        Args:
            start: Number of the first batch: what follows is what would have followed without a break. Batches before
                it are not tokenised, except when packing a stream.
            rank: Number of this process.
            world_size: How many processes there are.

        Yields:
            ``input_ids`` and ``attention_mask`` (``token_type_ids`` too if the tokenizer has them), long [B, T]; or
            ``pixel_values``, float [B, C, H, W]; and ``labels`` [B] with a label column.

        Raises:
            ConfigError: If a number is out of range.
        """
        if start < 0 or world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                f"got start {start}, rank {rank} and world_size {world_size}, "
                "expected start of at least 0 and a rank below world_size."
            )
        return self._batches(start, rank, world_size)

    def holdout_examples(self, most: int) -> list[Example]:
        """Give the first held-out examples as they were read; fewer where fewer are held out."""
        return self._fetch_held(self._held[:most])

    def holdout_batches(self) -> list[dict[str, Tensor]]:
        """Give all held-out examples as batches; the last one may be smaller. The same on every process."""
        size = self._config.batch_size
        groups = [self._held[begin : begin + size] for begin in range(0, len(self._held), size)]
        return [self._encoder(self._fetch_held(group), slice(None)) for group in groups]

    def _batches(self, start: int, rank: int, world_size: int) -> Iterator[dict[str, Tensor]]:
        size = self._config.batch_size
        everyone, mine = size * world_size, slice(rank * size, (rank + 1) * size)
        length = self._train.length if self._config.bucketing else None
        pool = self._train.pool(everyone)
        for items in batches(self._train.open_at, everyone, start, length, pool, self._config.seed):
            if self._encoder.needs_all:
                yield self._encoder(self._train.fetch(items), mine)
            else:
                yield self._encoder(self._train.fetch(items[mine]), slice(None))
