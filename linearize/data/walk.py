"""Paths on the disk: whether one exists, and the files of a folder, following links."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from linearize.core.errors import DataError
from linearize.data.hub import cause

MOST_FOLDERS = 100_000


def exists(path: Path) -> bool:
    """Tell whether a file or folder exists.

    Raises:
        DataError: If the path cannot be read, is a broken link, or is a pipe or device, which may never end.
    """
    try:
        if path.is_file() or path.is_dir():
            return True
        if path.exists():
            raise DataError(f"got {str(path)!r}, which is a pipe or a device, expected a file or a folder; name one.")
        if path.is_symlink():
            raise DataError(f"got the link {str(path)!r}, which leads nowhere, expected a file or a folder; repair it.")
    except OSError as error:
        why = f"{type(error).__name__}: {error.strerror}"
        raise DataError(f"cannot look for data set {str(path)[:100]!r} ({why}); check the name.") from error
    return False


def files_in(folder: Path, _above: tuple[Path, ...] = (), _seen: list[int] | None = None) -> Iterator[Path]:
    """Yield the files in a folder and its folders, sorted, without hidden ones. Links are followed, loops left out.

    Broken links are included: whoever opens such a file finds it missing.

    Raises:
        DataError: If a folder cannot be read, or there are more than `MOST_FOLDERS`.
    """
    seen = [0] if _seen is None else _seen
    seen[0] += 1
    if seen[0] > MOST_FOLDERS:
        raise DataError(f"got more than {MOST_FOLDERS:,} folders up to {folder.name!r}, expected fewer; remove links.")
    try:
        real = folder.resolve()
        if real in _above:
            return
        inner = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        kinds = [path.is_dir() for path in inner]
    except (OSError, RuntimeError) as error:  # `resolve` calls a loop of links a RuntimeError.
        raise DataError(
            f"cannot read folder {folder.name!r}: {cause(error)}; expected one that may be read; check it."
        ) from error
    for path, is_folder in zip(inner, kinds, strict=True):
        if is_folder:
            yield from files_in(path, (*_above, real), seen)
        elif path.is_file() or path.is_symlink():
            yield path
