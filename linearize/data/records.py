"""Examples that can be fetched by number: the common shape of tables, image folders and built-in data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

SCAN_ROWS = 10_000
DIGEST_ROWS = 1_000


class Example(NamedTuple):
    """One example as read: ``value`` is a text, a PIL image or a packed row of token ids."""

    value: Any
    pair: str | None = None
    label: str | float | None = None


class RawImage(TypedDict):
    """An undecoded image of `datasets`: the bytes of its file, or where that lies."""

    bytes: bytes | None
    path: str | None


class TableRow(TypedDict, total=False):
    """A row of a uniform table, see `linearize.data.columns.uniform`."""

    text: str
    pair: str | None
    image: RawImage
    label: str | float | None


class Records(Protocol):
    """Examples by number.

    ``sizes`` [N] is cheap to have: characters of a text, bytes of an image. Two equal examples have equal sizes, so
    only examples of a held-out one's size need a ``digest``; and texts are grouped by it to pad less.
    """

    sizes: np.ndarray
    skipped: int
    names: tuple[str, ...] | None

    def fetch(self, rows: Sequence[int]) -> list[Example]:
        """Read the examples of these numbers, in this order."""

    def digests(self, rows: Sequence[int]) -> Iterator[bytes]:
        """Give what makes each example itself: equal for equal texts or equal image files."""


def text_digest(text: str, pair: str | None) -> bytes:
    """Identify a text or a pair of texts; white space around a text does not make it another one."""
    # The length in front keeps ("ab", "c") apart from ("a", "bc").
    first = text.strip().encode("utf-8", "surrogatepass")
    second = (pair or "").strip().encode("utf-8", "surrogatepass")
    return blake2b(b"%d:" % len(first) + first + second, digest_size=16).digest()


class TextRecords:
    """The usable rows of a table with the columns ``text`` and perhaps ``pair`` and ``label``.

    Rows whose text, pair or label is missing or blank are left out and counted in ``skipped``.

    Args:
        table: A uniform table, see `linearize.data.columns.uniform`.
        names: Class names behind the labels, if they have any.
    """

    def __init__(self, table: Dataset, names: tuple[str, ...] | None = None) -> None:
        usable, sizes = scan(table, _text_sizes)
        self.table = table if usable.all() else table.select(np.flatnonzero(usable))
        self.sizes, self.skipped, self.names = sizes[usable], int((~usable).sum()), names

    def fetch(self, rows: Sequence[int]) -> list[Example]:
        columns = self.table[list(rows)]
        none = [None] * len(rows)
        labels = named_labels(columns.get("label", none), self.names)
        return [Example(*row) for row in zip(columns["text"], columns.get("pair", none), labels, strict=True)]

    def digests(self, rows: Sequence[int]) -> Iterator[bytes]:
        for begin in range(0, len(rows), DIGEST_ROWS):
            for example in self.fetch(rows[begin : begin + DIGEST_ROWS]):
                yield text_digest(example.value, example.pair)


class PackedRecords:
    """Rows of token ids, each already as long as a row may be.

    Args:
        rows: Arrays [T] of token ids.
    """

    def __init__(self, rows: list[np.ndarray]) -> None:
        self.rows = rows
        self.sizes = np.array([len(row) for row in rows], dtype=np.int32)
        self.skipped = 0
        self.names: tuple[str, ...] | None = None

    def fetch(self, rows: Sequence[int]) -> list[Example]:
        return [Example(self.rows[row]) for row in rows]

    def digests(self, rows: Sequence[int]) -> Iterator[bytes]:
        return (blake2b(self.rows[row].tobytes(), digest_size=16).digest() for row in rows)


def named_labels(labels: Sequence[str | float | None], names: tuple[str, ...] | None) -> list[str | float | None]:
    """Turn class numbers into class names, so that the parts of a mixture may number their classes differently."""
    return [names[label] if names is not None and isinstance(label, int) else label for label in labels]


def usable_label(label: object, names: tuple[str, ...] | None) -> bool:
    """Whether a label says something: not missing, blank or NaN, and not the -1 of a test set without labels."""
    if label is None or label == "" or label != label:
        return False
    return not (names is not None and isinstance(label, int) and not 0 <= label < len(names))


def scan(
    table: Dataset, sizes_of: Callable[[pa.Table], tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Go through the Arrow data once: which rows are usable [N], and their sizes [N]."""
    from datasets import ClassLabel

    is_class = isinstance(table.features.get("label"), ClassLabel)
    usable, sizes = [], []
    for batch in table.with_format("arrow").iter(batch_size=SCAN_ROWS):
        good, size = sizes_of(batch)
        if "label" in batch.column_names:
            good &= _labelled(batch["label"], is_class)
        usable.append(good)
        sizes.append(size)
    return np.concatenate(usable), np.concatenate(sizes)


def _text_sizes(batch: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow.compute as pc

    good, total = np.ones(batch.num_rows, dtype=bool), np.zeros(batch.num_rows, dtype=np.int32)
    for name in ("text", "pair"):
        if name in batch.column_names:
            length = pc.fill_null(pc.utf8_length(pc.utf8_trim_whitespace(batch[name])), 0).to_numpy()
            good &= length > 0
            total += length.astype(np.int32)
    return good, total


def _labelled(column: pa.ChunkedArray, is_class: bool) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.compute as pc

    good = pc.is_valid(column)
    if is_class:
        good = pc.and_(good, pc.fill_null(pc.greater_equal(column, 0), False))
    elif pa.types.is_floating(column.type):
        good = pc.and_(good, pc.invert(pc.fill_null(pc.is_nan(column), True)))
    elif pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        good = pc.and_(good, pc.fill_null(pc.not_equal(column, ""), False))
    return good.to_numpy()
