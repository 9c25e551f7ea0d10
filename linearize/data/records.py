"""Examples by number: the common interface of tables, image folders and built-in data; and re-paired texts.

Re-paired texts are rows without a label, to be labelled by a teacher.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

SCAN_ROWS = 10_000
FETCH_ROWS = 1_000
hashed = partial(blake2b, digest_size=16)
"""The hash of an example's bytes."""


Label: TypeAlias = "str | float | tuple[str | float | None, ...] | None"
"""A class, a number, or several of them."""


class Example(NamedTuple):
    """One example as read: ``value`` is a text, a PIL image or a packed row of token ids."""

    value: Any
    pair: str | None = None
    label: Label = None


class Records(Protocol):
    """Examples by number.

    ``sizes`` [N] is cheap to compute: characters of a text, bytes of an image. Equal examples have equal sizes, so only
    examples with the size of a held-out one need a digest.
    """

    sizes: np.ndarray
    skipped: int = 0
    names: tuple[str, ...] | None = None
    lists: bool = False
    """Whether labels are lists."""

    def fetch(self, rows: Sequence[int]) -> list[Example]:
        """Read the examples with these numbers, in this order."""

    def each(self, rows: Sequence[int]) -> Iterator[Example]:
        """Yield the examples with these numbers, without holding all of them in memory."""
        groups = (rows[begin : begin + FETCH_ROWS] for begin in range(0, len(rows), FETCH_ROWS))
        return chain.from_iterable(map(self.fetch, groups))

    def labels(self, rows: Sequence[int]) -> list[Label]:
        """Return the labels of these examples."""
        return [example.label for example in self.fetch(rows)]

    def digests(self, rows: Sequence[int]) -> Iterable[bytes]:
        """Return a digest of each example, equal for equal texts or image files."""


class TableRecords(Records):
    """The usable rows of a table. Others are left out and counted in ``skipped``.

    Args:
        table: A table from `linearize.data.columns.uniform`.
        names: Names of the classes, if the labels are classes.

    Attributes:
        rows: Numbers [N] of the usable rows in the table.
    """

    def __init__(self, table: Dataset, names: tuple[str, ...] | None = None) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc
        from datasets import ClassLabel, LargeList, List

        parts = []
        for batch in table.with_format("arrow").iter(batch_size=SCAN_ROWS):
            good, sizes = self.measure(batch)
            if "label" in batch.column_names:
                labels = batch["label"]
                known = pc.is_valid(labels)
                # Missing labels may also be negative classes, NaN, and empty texts.
                if isinstance(table.features["label"], ClassLabel):
                    known = pc.and_(known, pc.fill_null(pc.greater_equal(labels, 0), False))
                elif pa.types.is_floating(labels.type):
                    known = pc.and_(known, pc.invert(pc.fill_null(pc.is_nan(labels), True)))
                elif pa.types.is_string(labels.type) or pa.types.is_large_string(labels.type):
                    known = pc.and_(known, pc.fill_null(pc.not_equal(labels, ""), False))
                good &= known.to_numpy()
            parts.append((good, sizes))
        usable, sizes = map(np.concatenate, zip(*parts, strict=True))
        self.rows = np.flatnonzero(usable)
        self.table = table if usable.all() else table.select(self.rows)
        self.sizes, self.skipped, self.names = sizes[usable], int((~usable).sum()), names
        self.lists = isinstance(table.features.get("label"), List | LargeList)

    @staticmethod
    def measure(batch: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows [N] are complete, regardless of labels, and their sizes [N]."""
        raise NotImplementedError

    def labels(self, rows: Sequence[int]) -> list[Label]:
        return named_labels(self.table.select_columns(["label"])[list(rows)]["label"], self.names)


class TextRecords(TableRecords):
    """Rows with the columns ``text`` and perhaps ``pair`` and ``label``; blank ones are not usable."""

    @staticmethod
    def measure(batch: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows [N] have all texts, and their numbers of characters [N]."""
        import pyarrow.compute as pc

        good, total = np.ones(batch.num_rows, dtype=bool), np.zeros(batch.num_rows, dtype=np.int32)
        for name in ("text", "pair"):
            if name in batch.column_names:
                length = pc.fill_null(pc.utf8_length(pc.utf8_trim_whitespace(batch[name])), 0).to_numpy()
                good &= length > 0
                total += length.astype(np.int32)
        return good, total

    def fetch(self, rows: Sequence[int]) -> list[Example]:
        columns, none = self.table[list(rows)], [None] * len(rows)
        labels = named_labels(columns["label"], self.names) if "label" in columns else none
        return [*starmap(Example, zip(columns["text"], columns.get("pair", none), labels, strict=True))]

    def digests(self, rows: Sequence[int]) -> Iterable[bytes]:
        digests = []
        for text, pair, _ in self.each(rows):
            # White space around texts does not count. The length distinguishes ("ab", "c") from ("a", "bc").
            first = text.strip().encode("utf-8", "surrogatepass")
            second = (pair or "").strip().encode("utf-8", "surrogatepass")
            digests.append(hashed(b"%d:" % len(first) + first + second).digest())
        return digests


class PackedRecords(Records):
    """Packed rows of token ids.

    Args:
        rows: Arrays [T] of token ids.
    """

    def __init__(self, rows: list[np.ndarray]) -> None:
        self.rows = rows
        self.sizes = np.array([len(row) for row in rows], dtype=np.int32)

    def fetch(self, rows: Sequence[int]) -> list[Example]:
        return [Example(self.rows[row]) for row in rows]

    def digests(self, rows: Sequence[int]) -> Iterable[bytes]:
        return [hashed(self.rows[row].tobytes()).digest() for row in rows]


def named_labels(labels: Sequence[object], names: tuple[str, ...] | None) -> list[Any]:
    """Turn class numbers into class names, as the parts of a mixture may number their classes differently."""
    if names is not None:
        labels = [names[label] if isinstance(label, int) and label >= 0 else label for label in labels]
    return [tuple(named_labels(label, names)) if isinstance(label, list) else label for label in labels]


NEIGHBOURS = 6
"""A hard partner is drawn from this many nearest second texts."""
CANDIDATES = 20_000
"""Most second texts that are searched, so that a large set costs no more than a medium one."""
_STREAM = 0x9A12


def paired_anew(firsts: Sequence[str], seconds: Sequence[str], count: int, seed: int) -> list[tuple[int, int]]:
    """Pair first texts with other rows' second texts: half at random, half with one that shares words.

    Random partners are mostly unrelated; partners with shared words (cosine of TF-IDF) are near misses, for which a
    model must compare the texts. First texts stay first, as the columns of a pair may have different meanings.

    Args:
        firsts: first texts [N].
        seconds: second texts [N].
        count: pairs to make.
        seed: seed of the choice; the same seed gives the same pairs.

    Returns:
        `count` pairs (row of the first text, row of the second text), never of the same row or with an equal second
        text. Empty if there are fewer than two rows or all second texts are the same.
    """
    total = len(firsts)
    if count < 1 or total < 2 or len(set(seconds)) < 2:
        return []
    chance = np.random.default_rng([seed, _STREAM])
    turns = -(-count // total)
    anchors = np.concatenate([chance.permutation(total) for _ in range(turns)])[:count]
    hard = np.arange(count) % 2 == 0
    near = _near(firsts, seconds, anchors[hard], chance)
    pairs = []
    for place, anchor in enumerate(anchors.tolist()):
        fitting = [other for other in near.get(anchor, ()) if seconds[other] != seconds[anchor] and other != anchor]
        if hard[place] and fitting:
            pairs.append((anchor, fitting[int(chance.integers(len(fitting)))]))
            continue
        other = anchor
        while seconds[other] == seconds[anchor]:
            other = int(chance.integers(total))
        pairs.append((anchor, other))
    return pairs


def _near(
    firsts: Sequence[str], seconds: Sequence[str], anchors: np.ndarray, chance: np.random.Generator
) -> dict[int, list[int]]:
    """Return the rows of the nearest second texts for the first text of each given row; empty without any words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.neighbors import NearestNeighbors

    asked = np.unique(anchors)
    searched = np.arange(len(seconds))
    if len(searched) > CANDIDATES:
        searched = np.sort(chance.choice(searched, CANDIDATES, replace=False))
    vectors = TfidfVectorizer(token_pattern=r"(?u)\b\w+\b")
    try:
        table = vectors.fit_transform([seconds[place] for place in searched.tolist()])
    except ValueError:  # There is not a single word.
        return {}
    queries = vectors.transform([firsts[place] for place in asked.tolist()])
    index = NearestNeighbors(n_neighbors=min(NEIGHBOURS, len(searched)), metric="cosine", algorithm="brute").fit(table)
    found = index.kneighbors(queries, return_distance=False)
    return {int(anchor): searched[row].tolist() for anchor, row in zip(asked, found, strict=True)}
