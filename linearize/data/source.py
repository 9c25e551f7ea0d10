"""Sources of batches for training and measuring, and the order of their examples.

The held-out choice, the mixture, every epoch and the batches are functions of the seed and a position, so a run can
resume at any batch without reading the batches before it. (`datasets.interleave_datasets` and `train_test_split` would
draw different rows for the same seed.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count, islice

import numpy as np
from torch import Tensor

from linearize.checkpoint.fingerprint import data_digest, spread
from linearize.core.errors import DataError
from linearize.core.heads import Row, RowSet
from linearize.data.config import DataConfig
from linearize.data.encode import Encoder, ImageEncoder, longest_input
from linearize.data.records import Example, Records

# Second numbers of a seed, so that no two draws of a run share their random numbers.
HOLDOUT, ORDER, MIX = range(3)
DIGESTS = 16_384


def apportion(total: int, weights: Sequence[float], most: Sequence[int] | None = None) -> list[int]:
    """Divide a whole number by weights, as fairly as whole numbers allow.

    Args:
        total: The number.
        weights: Weight of each part.
        most: Largest share of each part; any excess goes to the others.

    Returns:
        The shares; they sum to ``total``, or to less if ``most`` does.
    """
    exact = np.asarray(weights, dtype=float) / sum(weights) * total
    shares = np.floor(exact).astype(np.int64)
    for part in np.argsort(shares - exact, kind="stable")[: total - int(shares.sum())]:
        shares[part] += 1
    if most is None:
        return shares.tolist()
    shares = np.minimum(shares, most)
    for part, bound in enumerate(most):
        shares[part] += min(bound - shares[part], total - int(shares.sum()))
    return shares.tolist()


def split_off(
    parts: Sequence[Records], weights: Sequence[float], holdout: int, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Choose the held-out examples at random, then drop every other example equal to one of them.

    Args:
        parts: The parts of a mixture.
        weights: Their weights.
        holdout: How many examples to hold out in all.
        seed: Seed of the choice.

    Returns:
        The held-out rows of each part, its rows to train on, and how many rows were dropped in all.

    Raises:
        DataError: If nothing is left to train on.
    """
    orders = [np.random.default_rng([seed, HOLDOUT, k]).permutation(len(p.sizes)) for k, p in enumerate(parts)]
    total = sum(map(len, orders))
    if total < (least := holdout + len(orders)):
        raise DataError(
            f"got {total} usable examples and a holdout of {holdout}, expected at least {least} examples; "
            "lower the holdout or pass more data."
        )
    # Of a small part, an example is left to train on.
    shares = apportion(holdout, weights, [len(order) - 1 for order in orders])
    held = [order[:share] for order, share in zip(orders, shares, strict=True)]
    rest = [order[share:] for order, share in zip(orders, shares, strict=True)]
    known = {key for part, rows in zip(parts, held, strict=True) for key in part.digests(rows.tolist())}
    sizes = np.unique(np.concatenate([part.sizes[rows] for part, rows in zip(parts, held, strict=True)]))
    train = [without_doubles(part, rows, known, sizes) for part, rows in zip(parts, rest, strict=True)]
    duplicates = sum(map(len, rest)) - sum(map(len, train))
    for number, rows in enumerate(train):
        if not len(rows):
            which = f"part {number + 1} of the mixture" if len(train) > 1 else "the data"
            raise DataError(f"got no example of {which} to train on that is not held out; lower the holdout.")
    return held, train, duplicates


def without_doubles(part: Records, rows: np.ndarray, known: set[bytes], sizes: np.ndarray) -> np.ndarray:
    """Return those of the rows [N] that are not equal to held-out ones, given by their digests and sizes."""
    suspects = np.flatnonzero(np.isin(part.sizes[rows], sizes))
    if not known or not len(suspects):
        return rows
    doubles = [key in known for key in part.digests(rows[suspects].tolist())]
    return np.delete(rows, suspects[doubles])


def endless(sizes: Sequence[int], weights: Sequence[float], seed: int, position: int = 0) -> Iterator[int]:
    """Return the numbers of the training examples, endlessly, in the order of training.

    An epoch has as many examples as there are in total. Each part fills its weight's share of every epoch, and is
    shuffled again for each pass over it.

    Args:
        sizes: Number of examples of each part; numbers continue from part to part.
        weights: Weight of each part.
        seed: Seed of the order; epoch ``e`` is shuffled with ``seed + e``.
        position: How many examples to skip at the start; costs nothing.
    """
    total = sum(sizes)
    # At least one of each, or a small part of a small mixture would never be drawn.
    shares = [1 + share for share in apportion(total - len(sizes), weights)]
    offsets = np.cumsum([0, *sizes])

    def numbers(epoch: int) -> list[int]:
        drawn = []
        for part, (size, share) in enumerate(zip(sizes, shares, strict=True)):
            # This epoch's slice of the part's endless sequence of shuffled passes.
            begin = epoch * share
            first, last = begin // size, (begin + share - 1) // size
            passes = [np.random.default_rng([seed + n, ORDER, part]).permutation(size) for n in range(first, last + 1)]
            drawn.append(offsets[part] + np.concatenate(passes)[begin - first * size :][:share])
        order = drawn[0]
        if len(drawn) > 1:
            order = np.random.default_rng([seed + epoch, MIX]).permutation(np.concatenate(drawn))
        found: list[int] = order.tolist()
        return found

    first = position // total
    return chain(numbers(first)[position % total :], chain.from_iterable(map(numbers, count(first + 1))))


class Chosen:
    """Chosen rows of the parts of a mixture, numbered from part to part.

    Args:
        parts: The parts.
        rows: The numbers of the rows of each part.
    """

    def __init__(self, parts: Sequence[Records], rows: Sequence[np.ndarray]) -> None:
        self.parts, self.rows = parts, rows
        self.counts = [len(chosen) for chosen in rows]

    def digest(self) -> str:
        """Return a digest of the sizes of all examples and the contents of up to `DIGESTS` of each part."""
        parts = []
        for part, chosen in zip(self.parts, self.rows, strict=True):
            digests = part.digests(chosen[spread(len(chosen), DIGESTS)].tolist())
            parts.append([part.sizes[chosen], list(digests), list(part.names or ())])
        return data_digest(parts)

    def fetch(self, items: Sequence[int]) -> list[Example]:
        """Read the examples of these numbers."""
        numbers, offsets = np.asarray(items), np.cumsum([0, *self.counts])
        owners = np.searchsorted(offsets, numbers, side="right") - 1
        examples: dict[int, Example] = {}
        for part in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == part).tolist()
            rows = self.rows[part][numbers[mine] - offsets[part]]
            examples.update(zip(mine, self.parts[part].fetch(rows.tolist()), strict=True))
        return [examples[place] for place in range(len(items))]


class Source:
    """Training and held-out batches of one data set or mixture, made by `load_source`.

    Attributes:
        description: One line: what the data is, and how much there is.
        fallback: Whether it is the built-in data, because no data set was given and the Hub cannot be reached.
        num_train: Training examples (packed rows with packing).
        num_holdout: Held-out examples (packed rows with packing).
        skipped: Rows without text, image or label that were left out.
        duplicates: Further rows left out of training because they equal a held-out one.
    """

    def __init__(
        self,
        config: DataConfig,
        encoder: Encoder,
        train: Chosen,
        held: Chosen,
        origin: str,
        *,
        fallback: bool,
        skipped: int,
        duplicates: int,
    ) -> None:
        self._config, self._encoder, self._train, self._held = config, encoder, train, held
        self.fallback, self.skipped, self.duplicates = fallback, skipped, duplicates
        self.num_train, self.num_holdout = sum(train.counts), sum(held.counts)
        kind = "images" if isinstance(encoder, ImageEncoder) else "texts"
        unit = f"rows of {self.row_length} tokens" if config.packing else kind
        self.description = f"{origin}: {self.num_train:,} {unit} to train on, {self.num_holdout:,} held out"
        self.description += f", {skipped:,} blank or unlabelled left out" if skipped else ""
        self.description += f", {duplicates:,} equal to held-out ones left out" if duplicates else ""

    @property
    def options(self) -> dict[str, object]:
        """The options of the batches; two runs with the same options and data see the same batches."""
        return asdict(self._config)

    def digest(self) -> str:
        """Return a digest of the sizes of all examples, and the contents of some."""
        return data_digest([self._train.digest(), self._held.fetch(range(self.num_holdout))])

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        """Yield training batches endlessly, in an order that depends only on the seed.

        The processes share every global batch of ``world_size * batch_size`` examples: their batches, joined in the
        order of the ranks, are the batch of one process with that batch size. So each pads its texts to the
        longest of the global batch.

        Args:
            start: Number of the first batch, to resume as if there had been no interruption. Batches before it are not
                read.
            rank: Number of this process.
            world_size: How many processes there are.

        Yields:
            ``input_ids`` and ``attention_mask`` (``token_type_ids`` too if the tokenizer has them), long [B, T]; or
            ``pixel_values``, float [B, C, H, W].
        """
        size = self._config.batch_size
        mine = slice(rank * size, (rank + 1) * size)
        weights = [weight for _, weight in self._config.sources] or [1.0]
        numbers = endless(self._train.counts, weights, self._config.seed, start * size * world_size)
        while True:
            items = list(islice(numbers, size * world_size))
            read, kept = (items, mine) if self._encoder.needs_all else (items[mine], slice(None))
            yield self._encoder(self._train.fetch(read), kept)

    @functools.cached_property
    def row_length(self) -> int:
        """Tokens of the longest training row, found among the longest texts; 0 for images."""
        sizes = np.concatenate(
            [part.sizes[rows] for part, rows in zip(self._train.parts, self._train.rows, strict=True)]
        )
        if self._config.packing:
            return int(sizes.max())
        batch = self._encoder(self._train.fetch(np.argsort(-sizes)[:LONGEST].tolist()), slice(None))
        return int(batch["attention_mask"].sum(dim=1).max()) if "attention_mask" in batch else 0

    def holdout_examples(self, most: int) -> list[Example]:
        """Return the first held-out examples, unchanged; fewer if fewer are held out."""
        return self._held.fetch(range(min(most, self.num_holdout)))

    @functools.cached_property
    def _held_batches(self) -> list[dict[str, Tensor]]:
        held, size = range(self.num_holdout), self._config.batch_size
        groups = [held[begin : begin + size] for begin in range(0, len(held), size)]
        return [self._encoder(self._held.fetch(group), slice(None)) for group in groups]

    def holdout_batches(self) -> list[dict[str, Tensor]]:
        """Return all held-out examples as batches, the same on every process; the last one may be smaller."""
        return [{**batch} for batch in self._held_batches]


LONGEST = 8
"""How many of the texts with the most characters are tokenised to find the longest row."""
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
"""Fields of a batch that a model reads; the rest are labels."""


@dataclass(frozen=True)
class RowBatches:
    """Batches of rows that are already prepared, such as a task's, for stage one and the alignment.

    Attributes:
        train: Rows to learn from, by number.
        held: Rows to measure on.
        collate: Makes a batch of tensors from rows.
        digest: Identifies the rows.
        batch_size: Rows per batch and process.
        holdout: At most how many of the rows to measure on are used.
        seed: Seed of the order of the training rows, which is new for each pass.
    """

    train: RowSet
    held: RowSet
    collate: Callable[[list[Row]], dict[str, Tensor]]
    digest: Callable[[], str]
    batch_size: int
    holdout: int
    seed: int

    @functools.cached_property
    def row_length(self) -> int:
        """Tokens of the longest row; 0 for images."""
        return max(longest_input(self.train), longest_input(self.held))

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the training rows."""
        return max(1, -(-len(self.train) // self.batch_size))

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        """Yield batches endlessly; the processes share every `world_size * batch_size` rows."""
        rows, first = len(self.train), rank * self.batch_size
        order = functools.lru_cache(2)(lambda turn: np.random.default_rng([self.seed, turn]).permutation(rows))
        for batch in count(start):
            begin = batch * world_size * self.batch_size + first
            numbers = range(begin, begin + self.batch_size)
            yield self._batch(self.train, [int(order(number // rows)[number % rows]) for number in numbers])

    def holdout_batches(self) -> list[dict[str, Tensor]]:
        """Return the rows to measure on as batches; the last one may be smaller."""
        numbers = range(min(self.holdout, len(self.held)))
        begins = range(0, len(numbers), self.batch_size)
        return [self._batch(self.held, numbers[begin : begin + self.batch_size]) for begin in begins]

    def _batch(self, rows: RowSet, numbers: Iterable[int]) -> dict[str, Tensor]:
        batch = self.collate([rows[number] for number in numbers])
        return {name: value for name, value in batch.items() if name in INPUTS}
