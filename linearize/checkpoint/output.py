"""A command's output folder: checked and locked before any slow step, renamed when complete.

The user's own files are never replaced (`linearize.checkpoint.ownership`), one process at a time writes to an output,
and the next process removes, or restores, the leftovers of a killed one.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from linearize.checkpoint.ownership import check_ours, mark
from linearize.core.errors import CheckpointError
from linearize.core.parsing import read_text, spare_name

Name = str | os.PathLike[str]
WAIT = 0.3
"""Seconds to wait for a lock, in case its process is just releasing it."""
LOCK = ".lock-"
"""Start of the name of an output's lock."""
LOCKED_BY = "locked by linearize, process "
LOCK_TEXT = re.compile(rf"|{LOCKED_BY}\d+\n|\d+\n{re.escape(platform.node())}\n[^\n]*\n?")
"""Content of a lock; the last form is filelock's, for file systems without locks."""
SHARD = 50 * 10**9
"""Bytes of the largest weights file that transformers writes."""

_claimed: ContextVar[frozenset[Path]] = ContextVar("_claimed", default=frozenset())


def _refused(shown: str, why: object, do: str = "choose another folder") -> CheckpointError:
    return CheckpointError(f"output {shown!r} {why}; {do}")


def check_target(target: Name, *, overwrite: bool = False, sources: Iterable[Name | None] = ()) -> Path:
    """Refuse a folder that cannot become the output, before any work is done.

    Args:
        target: folder to make.
        overwrite: whether a folder that linearize wrote, and that holds nothing else, may be replaced.
        sources: folders, files or names that the work reads and that must not be replaced.

    Returns:
        The folder's absolute path; links above it are followed.

    Raises:
        CheckpointError: if it is a file, a link, or one of the sources; holds something and `overwrite` is false, or
            something that linearize did not write; has a name that no folder can have; or cannot be written.
    """
    shown = os.fspath(target)
    try:
        path = _absolute(shown)
        _check_place(path, shown, sources)
        if path.exists() and not path.is_dir():
            kind = "a file" if path.is_file() else "a pipe or a device"
            raise _refused(shown, f"is {kind}, expected a folder", "choose another name")
        if path.is_dir() and any(path.iterdir()):
            if not overwrite:
                raise _refused(shown, "exists and is not empty", "choose another folder or pass --overwrite")
            check_ours(path, shown)
        parent = _nearest_existing(path.parent)
        if parent.is_symlink() or not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise _refused(shown, f"cannot be made: {str(parent)!r} cannot be written to")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _refused(shown, f"cannot be used ({reason})", "choose another name or folder") from error
    return path


def _absolute(shown: str) -> Path:
    """Return an output's absolute path.

    Raises:
        CheckpointError: if it is a link.
        OSError: if the name is too long.
        ValueError: if it has a null character, or is not UTF-8.
    """
    given = Path(shown)
    if given.name in ("", ".."):
        return given.resolve()
    parent = given.absolute().parent
    # The libraries that write the weights take only UTF-8.
    str(parent / given.name).encode("utf-8")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        # Temporary names are longer than the output's own.
        os.lstat(_nearest_existing(parent) / spare_name(given).name)
    path = parent.resolve() / given.name
    if path.is_symlink():
        there = os.path.realpath(path)
        advice = "give that folder itself" if os.path.isdir(there) else "choose another name"
        raise _refused(shown, f"is a link to {there!r}, expected a folder", advice)
    return path


def _nearest_existing(path: Path) -> Path:
    while not os.path.lexists(path):
        path = path.parent
    return path


def _check_place(path: Path, shown: str, sources: Iterable[Name | None]) -> None:
    """Refuse folders that must never be replaced: sources, the current folder, the home folder, the root."""
    for source in sources:
        if source is None or not os.path.exists(name := os.path.expanduser(os.fspath(source))):
            continue
        if path == Path(name).resolve() or (path.exists() and path.samefile(name)):
            raise _refused(shown, f"is {os.fspath(source)!r}, which is read")
        if path in Path(name).resolve().parents:
            raise _refused(shown, f"holds {os.fspath(source)!r}, which is read")
    if path.parent == path:
        raise _refused(shown, "is the root of the file system")
    places = [(Path.cwd(), "the current folder")]
    with contextlib.suppress(RuntimeError):
        places.append((Path.home().resolve(), "the home folder"))
    for place, called in places:
        if path == place or path in place.parents:
            raise _refused(shown, f"is or holds {called}")


@contextlib.contextmanager
def claim(target: Name, *, overwrite: bool = False, sources: Iterable[Name | None] = ()) -> Iterator[Path]:
    """Check an output and lock it for this process while the block runs; nested blocks may claim it again.

    Leftovers of a killed process are removed; a folder that it was about to replace is put back if the replacement is
    missing.

    Args:
        target: as in `check_target`.
        overwrite: as in `check_target`.
        sources: as in `check_target`.

    Yields:
        The folder's absolute path.

    Raises:
        CheckpointError: as in `check_target`, and if another process writes to it.
    """
    sources = list(sources)
    path = check_target(target, overwrite=overwrite, sources=sources)
    if path in _claimed.get():
        yield path
        return
    shown = os.fspath(target)
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(shown, f"cannot be made ({error.strerror or error})") from error
        with _locked(path, shown):
            _clear_leftovers(path)
            # Check again: the folder may have changed before the lock was held.
            check_target(target, overwrite=overwrite, sources=sources)
            token = _claimed.set(_claimed.get() | {path})
            try:
                yield path
            finally:
                _claimed.reset(token)
    finally:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()


@contextlib.contextmanager
def claim_file(target: Path) -> Iterator[Path]:
    """Lock an output file for this process while the block runs, and remove leftovers of a killed one.

    Yields:
        A temporary name in the same folder, for the block to fill and rename; what still has it afterwards is removed.

    Raises:
        CheckpointError: if another process writes to it.
    """
    path = target.absolute()
    with _locked(path, str(target)):
        _clear_leftovers(path)
        beside = spare_name(path)
        try:
            yield beside
        finally:
            _remove(beside)


def clear_leftovers(target: Name) -> None:
    """Remove the leftovers of killed processes next to a complete output and inside it, including locks.

    What a running process is writing stays, as does anything that cannot be removed.

    Args:
        target: an existing folder.
    """
    folder = _absolute(os.fspath(target))
    locks = [folder.with_name(f"{LOCK}{folder.name}"), *folder.rglob(f"{LOCK}*")]
    for path in [file.with_name(file.name.removeprefix(LOCK)) for file in locks if file.is_file()]:
        with contextlib.suppress(CheckpointError), _locked(path, str(path)):
            _clear_leftovers(path)


@contextlib.contextmanager
def _locked(path: Path, shown: str) -> Iterator[None]:
    file = path.with_name(f"{LOCK}{path.name}")
    try:
        # An empty file was just made, by us or by filelock.
        is_lock = not file.is_symlink() and (not file.exists() or LOCK_TEXT.fullmatch(read_text(file)))
    except (OSError, ValueError):
        is_lock = False
    if not is_lock:
        raise CheckpointError(
            f"{str(file)!r} is where the lock of output {shown!r} would be, and linearize did not write it; move it, "
            "or choose another output"
        )
    lock = FileLock(file)
    try:
        lock.acquire(timeout=WAIT, poll_interval=0.05)
    except Timeout:
        if not file.exists():
            raise _refused(shown, f"cannot be locked, as no file can be made in {str(path.parent)!r}") from None
        owner = "another process"
        with contextlib.suppress(OSError, IndexError, ValueError):
            owner = f"process {read_text(file).removeprefix(LOCKED_BY).split()[0]}"
        advice = "wait until it ends, or choose another folder"
        raise _refused(shown, f"is being written by {owner}", advice) from None
    except (OSError, NotImplementedError) as error:
        raise _refused(shown, f"cannot be locked ({error})") from error
    try:
        # On file systems without locks, filelock writes the process id itself.
        if not isinstance(lock, SoftFileLock):
            with contextlib.suppress(OSError):
                file.write_text(f"{LOCKED_BY}{os.getpid()}\n", encoding="utf-8")
        yield
    finally:
        # Remove it while it is held: a waiting process sees that the file is gone, and makes a new one.
        with contextlib.suppress(OSError):
            file.unlink()
        lock.release()


def _temporary(path: Path, kind: str) -> list[Path]:
    """Return the folders of a kind that `_swap` and `spare_name` name after an output."""
    pattern = re.compile(rf"\.{kind}-{re.escape(path.name)}-[0-9a-f]{{8}}")
    return sorted(entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name))


def _clear_leftovers(path: Path) -> None:
    """Remove the temporary folders of an output, or put them back; the caller holds the lock."""
    for old in _temporary(path, "old"):
        # The process was killed between the two renames of an overwrite, or after them.
        old.rename(spare_name(path) if path.exists() else path)
    for new in _temporary(path, "new"):
        _remove(new)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def atomic_folder(target: Name, *, overwrite: bool = False, marked: bool = True) -> Iterator[Path]:
    """Yield a fresh folder that takes the name of `target` when the block succeeds, and is removed otherwise.

    A process killed between the two renames of an overwrite leaves the old folder under a name that begins with
    `.old-`; the next `claim` of the same output puts it back.

    Args:
        target: as in `check_target`.
        overwrite: as in `check_target`.
        marked: whether the folder gets our marker, which allows it to be replaced later.

    Raises:
        CheckpointError: if the target cannot be used, or the disk is full.
    """
    with claim(target, overwrite=overwrite) as path:
        fresh = spare_name(path)
        try:
            fresh.mkdir()
            yield fresh
            # Apply the umask to weights files: safetensors makes files that only the user can read.
            mask = os.umask(0o077)
            os.umask(mask)
            for file in fresh.rglob("*.safetensors"):
                file.chmod(0o666 & ~mask)
            if marked:
                mark(fresh)
            _sync(fresh)
            # Check again: the folder may have changed since the block began.
            check_target(target, overwrite=overwrite)
            _swap(fresh, path)
        except Exception as error:
            if not is_write_error(error):
                raise
            reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
            raise CheckpointError(
                f"could not write {os.fspath(target)!r} ({reason}); nothing was left under that name: "
                "make room or choose another folder"
            ) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def is_write_error(error: BaseException) -> bool:
    """Tell whether a file could not be written; torch and Rust libraries raise their own errors for that."""
    return isinstance(error, OSError) or any(text in str(error) for text in ("(os error ", "inline_container"))


def _swap(fresh: Path, path: Path) -> None:
    """Replace a folder; whatever happens, the old or the new one ends up with the name."""
    if not path.exists() or not any(path.iterdir()):
        fresh.rename(path)
        return
    old = path.with_name(f".old-{path.name}-{secrets.token_hex(4)}")
    path.rename(old)
    try:
        fresh.rename(path)
    except BaseException:
        if not path.exists():
            old.rename(path)
        raise
    # Rename before removing: a folder that a kill has half removed must never be put back.
    unwanted = spare_name(path)
    with contextlib.suppress(OSError):
        old.rename(unwanted)
    _remove(unwanted)


def _sync(folder: Path) -> None:
    """Write the files to disk before the folder gets its name."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())


def free_disk(target: Name) -> int:
    """Return the free bytes on the disk where a folder will be created."""
    return shutil.disk_usage(_nearest_existing(_absolute(os.fspath(target)))).free


def check_room(target: Name, size: int) -> None:
    """Check for free space: write files of the expected size next to a claimed output, and remove them.

    Args:
        target: folder to make.
        size: bytes.

    Raises:
        CheckpointError: if the disk is full, or files of that size are not allowed.
    """
    path = _absolute(os.fspath(target))
    files = [spare_name(path) for _ in range(0, max(size, 1), SHARD)]
    try:
        for number, file in enumerate(files):
            with open(file, "xb") as handle:
                part = max(1, min(SHARD, size - number * SHARD))
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle.fileno(), 0, part)
                elif shutil.disk_usage(path.parent).free < part:
                    raise OSError(28, "No space left on device")
                else:
                    handle.truncate(part)
    except OSError as error:
        raise CheckpointError(
            f"output {os.fspath(target)!r}: the {size / 1e6:,.1f} MB of the result cannot be written to "
            f"{str(path.parent)!r} ({error.strerror or error}); make room, or choose another folder"
        ) from error
    finally:
        for file in files:
            _remove(file)
