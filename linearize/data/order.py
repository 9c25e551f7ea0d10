"""The order of examples: the held-out choice, the mixture, every epoch, and batches.

Everything here is a function of the seed and a position, so a run can resume at any batch without reading the batches
before it. (`datasets.interleave_datasets` and `train_test_split` would draw other rows for the same seed.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TypeVar

import numpy as np

from linearize.core.errors import DataError
from linearize.data.records import Records

Item = TypeVar("Item")
# Batches sorted by length together: enough for little padding, few enough for a random order.
POOL = 50
# Second numbers of a seed, so that no two draws of a run share their random numbers.
HOLDOUT, ORDER, MIX, BATCHES = range(4)


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
