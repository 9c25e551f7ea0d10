"""Training examples in order: records by number, or streams.

The held-out choice, the mixture, every epoch and the batches are functions of the seed and a position, so a run can
resume at any batch without reading the batches before it. (`datasets.interleave_datasets` and `train_test_split` would
draw other rows for the same seed.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from linearize.checkpoint.fingerprint import data_digest, spread
from linearize.core.errors import DataError
from linearize.data.hub import rows_of
from linearize.data.images import decode, image_digest, raw_bytes
from linearize.data.records import Example, Records, TableRow, named_labels, text_digest, usable_label

if TYPE_CHECKING:
    from datasets import IterableDataset

    from linearize.data.encode import TextEncoder

Item = TypeVar("Item")
# Batches sorted by length together: enough for little padding, few enough for a random order.
POOL = 50
# Second numbers of a seed, so that no two draws of a run share their random numbers.
HOLDOUT, ORDER, MIX, BATCHES = range(4)
SHUFFLE_BUFFER = 1_000
DIGESTS = 16_384


@dataclass(frozen=True)
class Split:
    """Row numbers of each part. ``held`` and ``train`` share no example: ``duplicates`` rows were left out for that."""

    held: list[np.ndarray]
    train: list[np.ndarray]
    duplicates: int


def apportion(total: int, weights: Sequence[float], most: Sequence[int] | None = None) -> list[int]:
    """Divide a whole number by weights, as fairly as whole numbers allow.

    Args:
        total: The number.
        weights: Weight of each part.
        most: Largest share of each part; what exceeds it goes to the others.

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


def split_off(parts: Sequence[Records], weights: Sequence[float], holdout: int, limit: int | None, seed: int) -> Split:
    """Choose the held-out examples at random, then drop every other example equal to one of them.

    Args:
        parts: The parts of a mixture.
        weights: Their weights.
        holdout: How many examples to hold out in all.
        limit: Largest number of training examples in all.
        seed: Seed of the choice. A larger ``limit`` keeps both the held-out and the training examples of a smaller one.

    Raises:
        DataError: If nothing is left to train on.
    """
    orders = [np.random.default_rng([seed, HOLDOUT, k]).permutation(len(p.sizes)) for k, p in enumerate(parts)]
    total = sum(len(order) for order in orders)
    if total <= holdout:
        raise DataError(
            f"got {total} usable examples and a holdout of {holdout}, expected more examples than that; "
            "lower the holdout or pass more data."
        )
    shares = apportion(holdout, weights, [len(order) for order in orders])
    held = [order[:share] for order, share in zip(orders, shares, strict=True)]
    rest = [order[share:] for order, share in zip(orders, shares, strict=True)]
    known = {key for part, rows in zip(parts, held, strict=True) for key in part.digests(rows.tolist())}
    sizes = np.unique(np.concatenate([part.sizes[rows] for part, rows in zip(parts, held, strict=True)]))
    train = [_without(part, rows, known, sizes) for part, rows in zip(parts, rest, strict=True)]
    duplicates = sum(len(rows) for rows in rest) - sum(len(rows) for rows in train)
    for number, rows in enumerate(train):
        if not len(rows):
            which = f"part {number + 1} of the mixture" if len(train) > 1 else "the data"
            raise DataError(f"got no example of {which} to train on that is not held out; lower the holdout.")
    if limit is not None:
        most = apportion(limit, weights, [len(rows) for rows in train])
        train = [rows[: max(1, share)] for rows, share in zip(train, most, strict=True)]
    return Split(held, train, duplicates)


def _without(part: Records, rows: np.ndarray, known: set[bytes], sizes: np.ndarray) -> np.ndarray:
    suspects = np.flatnonzero(np.isin(part.sizes[rows], sizes))
    if not known or not len(suspects):
        return rows
    doubles = [key in known for key in part.digests(rows[suspects].tolist())]
    return np.delete(rows, suspects[doubles])


def endless(sizes: Sequence[int], weights: Sequence[float], seed: int, position: int = 0) -> Iterator[int]:
    """Yield the numbers of the training examples in the order of training, for ever.

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
    for epoch in count(position // total):
        drawn = [
            offsets[part] + _draw(size, epoch * share, share, seed, part)
            for part, (size, share) in enumerate(zip(sizes, shares, strict=True))
        ]
        numbers = drawn[0]
        if len(drawn) > 1:
            numbers = np.random.default_rng([seed + epoch, MIX]).permutation(np.concatenate(drawn))
        yield from numbers[position % total :].tolist()
        position = 0


def _draw(size: int, begin: int, length: int, seed: int, part: int) -> np.ndarray:
    """Return a slice of one part's endless sequence of shuffled passes."""
    first, last = begin // size, (begin + length - 1) // size
    passes = [np.random.default_rng([seed + n, ORDER, part]).permutation(size) for n in range(first, last + 1)]
    return np.concatenate(passes)[begin - first * size :][:length]


def batches(
    open_at: Callable[[int], Iterator[Item]],
    size: int,
    start: int = 0,
    length: Callable[[Item], int] | None = None,
    pool: int = POOL,
    seed: int = 0,
) -> Iterator[list[Item]]:
    """Cut an endless sequence of items into batches, of items with similar length if ``length`` is given.

    Args:
        open_at: Gives the items from a position on.
        size: Items per batch.
        start: Number of the first batch.
        length: Length of an item, to group by.
        pool: How many batches are grouped together.
        seed: Seed of the order of the batches in a pool.
    """
    pool = pool if length is not None else 1
    skipped = start % pool
    items = open_at((start - skipped) * size)
    for number in count(start // pool):
        group = list(islice(items, pool * size))
        if length is not None:
            group.sort(key=length)
        cut = [group[begin : begin + size] for begin in range(0, len(group), size)]
        order = np.random.default_rng([seed, BATCHES, number]).permutation(pool) if pool > 1 else range(1)
        yield from (cut[place] for place in list(order)[skipped:])
        skipped = 0


class MapFeed:
    """Feeds chosen rows of records; starting at any position costs nothing.

    Args:
        parts: The parts of a mixture.
        rows: The rows of each part that are used.
        weights: Weight of each part.
        seed: Seed of the order.
    """

    def __init__(
        self, parts: Sequence[Records], rows: Sequence[np.ndarray], weights: Sequence[float], seed: int
    ) -> None:
        self.parts, self.rows, self.weights, self.seed = parts, rows, weights, seed
        self.counts = [len(chosen) for chosen in rows]
        self.offsets = np.cumsum([0, *self.counts])
        self.sizes = np.concatenate([part.sizes[chosen] for part, chosen in zip(parts, rows, strict=True)])
        self.size: int | None = sum(self.counts)

    def open_at(self, position: int) -> Iterator[int]:
        """Yield the items from a position on, for ever."""
        return endless(self.counts, self.weights, self.seed, position)

    def length(self, item: int) -> int:
        """Return how long an item is, in a unit that grows with its tokens."""
        return int(self.sizes[item])

    def pool(self, batch: int) -> int:
        """Return how many batches of this size may be sorted by length together."""
        # At most an epoch: otherwise sorting by length would put the same text of two epochs side by side.
        return max(1, min(POOL, len(self.sizes) // batch))

    def digest(self) -> str:
        """Identify the examples by the sizes of all and the contents of up to `DIGESTS` of each part."""
        parts = []
        for part, chosen in zip(self.parts, self.rows, strict=True):
            some = [int(chosen[place]) for place in spread(len(chosen), DIGESTS)]
            parts.append([part.sizes[chosen], list(part.digests(some)), list(part.names or ())])
        return data_digest(parts)

    def fetch(self, items: Sequence[int]) -> list[Example]:
        """Read the examples of these items."""
        numbers = np.asarray(items)
        owners = np.searchsorted(self.offsets, numbers, side="right") - 1
        examples: dict[int, Example] = {}
        for part in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == part).tolist()
            rows = self.rows[part][numbers[mine] - self.offsets[part]]
            examples.update(zip(mine, self.parts[part].fetch(rows.tolist()), strict=True))
        return [examples[place] for place in range(len(items))]


@dataclass
class StreamPart:
    """One uniform streamed table of a mixture; ``skipped`` counts the unusable rows before the held-out ones end."""

    table: IterableDataset
    weight: float
    names: tuple[str, ...] | None
    origin: str
    skipped: int = 0
    held: list[TableRow] = field(default_factory=list)

    def hold_out(self, number: int) -> None:
        """Keep the first usable rows.

        Raises:
            DataError: If there are not more rows than that.
        """
        for row in rows_of(self.table, self.origin):
            if not row_usable(row, self.names):
                self.skipped += 1
            elif len(self.held) < number:
                self.held.append(row)
            else:
                return
        raise DataError(
            f"{self.origin}: got {len(self.held)} usable examples and a holdout of {number}, "
            "expected more examples than that; lower the holdout."
        )


class StreamFeed:
    """Feeds rows as they are read. Starting at a position reads the rows before it, without decoding or tokenising.

    The first usable rows are held out, and all rows equal to one of them are left out. The others pass through a
    shuffle buffer of 1000 rows, in a new order in every epoch.

    Args:
        parts: The streams.
        holdout: How many rows to hold out in all.
        limit: Largest number of training rows in all.
        seed: Seed of the order.

    Raises:
        DataError: If a stream has too few rows.
    """

    size: int | None = None

    def __init__(self, parts: Sequence[StreamPart], holdout: int, limit: int | None, seed: int) -> None:
        self.parts, self.seed = parts, seed
        self.weights = [part.weight for part in parts]
        for part, share in zip(parts, apportion(holdout, self.weights), strict=True):
            part.hold_out(share)
        self.held = [row for part in parts for row in part.held]
        known = {row_digest(row) for row in self.held}
        limits = [None] * len(parts) if limit is None else apportion(limit, self.weights)
        self.streams = []
        for part, most in zip(parts, limits, strict=True):
            stream = part.table.filter(_wanted(known, part.names))
            stream = stream if most is None else stream.take(max(1, most))
            self.streams.append(stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER))

    def open_at(self, position: int) -> Iterator[tuple[int, TableRow]]:
        return islice(self._mixed(), position, None)

    def fetch(self, items: Sequence[tuple[int, TableRow]]) -> list[Example]:
        return [row_example(row, self.parts[part].names) for part, row in items]

    def length(self, item: tuple[int, TableRow]) -> int:
        return sum(len(text) for text in (item[1].get("text"), item[1].get("pair")) if text)

    def pool(self, batch: int) -> int:
        return POOL

    def digest(self) -> str:
        # It would have to be read to its end for more.
        return "stream"

    def held_items(self) -> list[tuple[int, TableRow]]:
        """Return the held-out rows as items."""
        return [(number, row) for number, part in enumerate(self.parts) for row in part.held]

    def _mixed(self) -> Iterator[tuple[int, TableRow]]:
        sources = [self._repeated(number) for number in range(len(self.parts))]
        generator = np.random.default_rng([self.seed, MIX])
        chances = np.asarray(self.weights) / sum(self.weights)
        while True:
            part = int(generator.choice(len(sources), p=chances)) if len(sources) > 1 else 0
            yield part, next(sources[part])

    def _repeated(self, part: int) -> Iterator[TableRow]:
        for epoch in count():
            self.streams[part].set_epoch(epoch)
            got = False
            for row in rows_of(self.streams[part], self.parts[part].origin):
                got = True
                yield row
            if not got:
                raise DataError(f"{self.parts[part].origin}: got no row to train on that is not held out.")


class PackedFeed:
    """Feeds rows packed from a stream of texts as it is read; starting at a position tokenises what is before it."""

    size: int | None = None

    def __init__(self, source: StreamFeed, encoder: TextEncoder) -> None:
        self.source, self.encoder = source, encoder

    def open_at(self, position: int) -> Iterator[Example]:
        texts = (row["text"] for _, row in self.source.open_at(0))
        return islice((Example(ids) for ids in self.encoder.pack(texts, keep_rest=False)), position, None)

    def fetch(self, items: Sequence[Example]) -> list[Example]:
        return list(items)

    def length(self, item: Example) -> int:
        return len(item.value)

    def pool(self, batch: int) -> int:
        return 1

    def digest(self) -> str:
        return "packed stream"


Feed: TypeAlias = MapFeed | StreamFeed | PackedFeed
"""An endless sequence of items, each of which can be turned into an example. `size` is the number of different training
examples, or None if it is unknown."""


def row_usable(row: TableRow, names: tuple[str, ...] | None) -> bool:
    """Tell whether a row of a uniform table is complete."""
    if "label" in row and not usable_label(row["label"], names):
        return False
    if "image" in row:
        return row["image"] is not None
    texts = [value for name, value in row.items() if name in ("text", "pair")]
    return all(isinstance(text, str) and bool(text.strip()) for text in texts)


def row_digest(row: TableRow) -> bytes:
    """Identify the text or image of a row of a uniform table."""
    return image_digest(row["image"]) if "image" in row else text_digest(row["text"], row.get("pair"))


def row_example(row: TableRow, names: tuple[str, ...] | None) -> Example:
    """Turn a row of a uniform table into an example; images are decoded."""
    label = named_labels([row.get("label")], names)[0]
    if "image" in row:
        return Example(decode(raw_bytes(row["image"]), row["image"]["path"] or "of a stream"), None, label)
    return Example(row["text"], row.get("pair"), label)


def _wanted(known: set[bytes], names: tuple[str, ...] | None) -> Callable[[TableRow], bool]:
    return lambda row: row_usable(row, names) and row_digest(row) not in known
