"""Files of vectors: one row per document or span, as parquet or as one structured array (.npy)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from linearize.core.errors import ConfigError, first_line

ENDINGS = (".parquet", ".npy")
WHOLE = -1
"""The number of the span in the row of a whole document."""
MARK = b"linearize.embed"
"""Key in a parquet file's metadata."""
_COLUMNS = [("document", "<i8"), ("span", "<i4"), ("start", "<i8"), ("end", "<i8"), ("tokens", "<i4")]


def row_type(size: int) -> np.dtype[np.void]:
    """Return the type of a row.

    Its fields: `document` (its number), `span` (its number within the document, or `WHOLE`), `start` and `end`
    (characters of the text), `tokens`, and `vector` [size].
    """
    return np.dtype([*_COLUMNS, ("vector", "<f4", (size,))])


def check_replaceable(path: Path, option: str) -> None:
    """Refuse to replace an existing file that `write_vectors` did not write.

    Raises:
        ConfigError: if it did not.
    """
    if not path.exists():
        return
    try:
        if path.suffix.lower() == ".parquet":
            from pyarrow import parquet

            ours = MARK in (parquet.read_schema(path).metadata or {})
        else:
            names = np.load(path, mmap_mode="r", allow_pickle=False).dtype.names
            ours = names == row_type(1).names
    except Exception:  # The readers raise a dozen kinds of errors for other files.
        ours = False
    if not ours:
        raise ConfigError(
            f"{option}: {str(path)!r} was not written by `linearize embed`, so --overwrite does not replace it; choose "
            "another file"
        )


def write_vectors(parts: Sequence[Path], path: Path, kind: str, facts: dict[str, object]) -> None:
    """Join parts, .npy files of rows, into one file, without holding all of them in memory.

    Args:
        parts: at least one.
        path: the file to write.
        kind: its ending, one of `ENDINGS`.
        facts: written into the metadata of a parquet file.

    Raises:
        OSError: if it cannot be written.
    """
    first = np.load(parts[0], mmap_mode="r", allow_pickle=False)
    if kind == ".npy":
        count = sum(len(rows) for rows in _read(parts))
        joined = np.lib.format.open_memmap(path, mode="w+", dtype=first.dtype, shape=(count,))
        begin = 0
        for rows in _read(parts):
            joined[begin : begin + len(rows)] = rows
            begin += len(rows)
        joined.flush()
        return
    import pyarrow as pa
    from pyarrow import parquet

    size = first.dtype["vector"].shape[0]
    fields = [(name, pa.from_numpy_dtype(first.dtype[name])) for name, _ in _COLUMNS]
    schema = pa.schema([*fields, ("vector", pa.list_(pa.float32(), size))], {MARK: json.dumps(facts).encode()})
    with parquet.ParquetWriter(path, schema) as writer:
        for rows in _read(parts):
            columns = [pa.array(np.ascontiguousarray(rows[name])) for name, _ in _COLUMNS]
            flat = pa.array(np.ascontiguousarray(rows["vector"]).reshape(-1))
            writer.write_table(
                pa.Table.from_arrays([*columns, pa.FixedSizeListArray.from_arrays(flat, size)], schema=schema)
            )


def read_part(path: Path) -> np.ndarray:
    """Return the rows of a part.

    Raises:
        ConfigError: if the file is damaged.
    """
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(
            f"resume: {path.name!r} cannot be read ({first_line(error)}); start again with --overwrite"
        ) from error


def _read(parts: Iterable[Path]) -> Iterator[np.ndarray]:
    for part in parts:
        yield np.load(part, allow_pickle=False)
