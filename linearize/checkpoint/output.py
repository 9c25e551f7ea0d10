"""The folder that a command makes: checked and locked before the first slow step, written beside, renamed when whole.

Nothing of the user's is replaced (see `linearize.checkpoint.ownership`), one process at a time writes to an output, and
what a killed one left behind is cleared, or put back, by the next.
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
from typing import NoReturn

from filelock import FileLock, SoftFileLock, Timeout

from linearize.checkpoint.ownership import check_ours, mark
from linearize.errors import CheckpointError
from linearize.parsing import read_text, spare_name

Name = str | os.PathLike[str]
WAIT = 0.3
"""Seconds after which a lock counts as held: a process that is just letting it go is waited for."""
LOCK = ".lock-"
"""What the name of an output's lock begins with."""
LOCKED_BY = "locked by linearize, process "
LOCK_TEXT = re.compile(rf"|{LOCKED_BY}\d+\n|\d+\n{re.escape(platform.node())}\n[^\n]*\n?")
"""What a lock holds; the last form is filelock's own, where the file system knows no locks."""
AROUND = len(".new--") + 8
"""Letters that the names around an output have beside its own."""
SHARD = 50 * 10**9
"""Bytes of the largest file of weights that transformers writes."""

_claimed: ContextVar[frozenset[Path]] = ContextVar("_claimed", default=frozenset())


def check_target(target: Name, *, overwrite: bool = False, sources: Iterable[Name | None] = ()) -> Path:
    """Refuse a folder that cannot become the output, before any work is done.

    Args:
        target: folder to make.
        overwrite: whether a folder that linearize wrote, and that holds nothing else, may be replaced.
        sources: what the work reads (folders, files or names): none of it may be lost.

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
        if path.is_file():
            raise CheckpointError(f"output {shown!r} is a file, expected a folder; choose another name")
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"output {shown!r} is no folder; choose another name")
        if path.is_dir() and any(path.iterdir()):
            if not overwrite:
                raise CheckpointError(
                    f"output {shown!r} exists and is not empty; choose another folder or pass --overwrite"
                )
            check_ours(path, shown)
        _check_parent(path, shown)
    except OSError as error:
        raise CheckpointError(
            f"output {shown!r} cannot be used ({error.strerror or error}); choose another folder"
        ) from error
    return path


def _absolute(shown: str) -> Path:
    if "\0" in shown:
        raise CheckpointError(f"output {shown!r} holds a zero character; choose another name")
    given = Path(shown)
    if given.name in ("", ".."):
        return given.resolve()
    parent = given.absolute().parent
    try:
        size = len(given.name.encode("utf-8"))
        str(parent).encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(f"output {shown!r} is not UTF-8; choose another name") from None
    most = _longest_name(parent) - AROUND
    if size > most:
        raise CheckpointError(
            f"output {given.name[:40] + '...'!r} has a name of {size} bytes, expected at most {most}; "
            "choose a shorter one"
        )
    path = parent.resolve() / given.name
    if path.is_symlink():
        there = os.path.realpath(path)
        advice = "give that folder itself" if os.path.isdir(there) else "choose another name"
        raise CheckpointError(f"output {shown!r} is a link to {there!r}, expected a folder; {advice}")
    return path


def _longest_name(parent: Path) -> int:
    try:
        return os.pathconf(_existing(parent), "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):
        return 255


def _existing(path: Path) -> Path:
    """Return the nearest folder above that is there."""
    while not os.path.lexists(path):
        path = path.parent
    return path


def _check_place(path: Path, shown: str, sources: Iterable[Name | None]) -> None:
    """Refuse what must never be replaced: what is read, where the user stands, where the user lives, the root."""
    for source in sources:
        if source is None or not os.path.exists(name := os.path.expanduser(os.fspath(source))):
            continue
        if _same(path, Path(name)):
            raise CheckpointError(f"output {shown!r} is {os.fspath(source)!r}, which is read; choose another folder")
        if path in Path(name).resolve().parents:
            raise CheckpointError(f"output {shown!r} holds {os.fspath(source)!r}, which is read; choose another folder")
    if path.parent == path:
        raise CheckpointError(f"output {shown!r} is the root of the file system; choose another folder")
    try:
        home: Path | None = Path.home().resolve()
    except RuntimeError:
        home = None
    for place, called in ((Path.cwd(), "the current folder"), (home, "the home folder")):
        if place is not None and (path == place or path in place.parents):
            raise CheckpointError(f"output {shown!r} is or holds {called}; choose another folder")


def _same(path: Path, other: Path) -> bool:
    return path == other.resolve() or (path.exists() and path.samefile(other))


def _check_parent(path: Path, shown: str) -> None:
    parent = _existing(path.parent)
    if parent.is_symlink() or not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"output {shown!r}: {str(parent)!r} cannot be written to; choose another folder")


@contextlib.contextmanager
def claim(target: Name, *, overwrite: bool = False, sources: Iterable[Name | None] = ()) -> Iterator[Path]:
    """Check an output and keep it for this process while the block runs; a block within the block may claim it again.

    What a killed process left beside it is cleared; the folder that it was about to replace is put back where the
    replacement is not there.

    Args:
        target: as in `check_target`.
        overwrite: as in `check_target`.
        sources: as in `check_target`.

    Yields:
        The folder's absolute path.

    Raises:
        CheckpointError: as `check_target`, and if another process writes to it.
    """
    sources = list(sources)
    path = check_target(target, overwrite=overwrite, sources=sources)
    if path in _claimed.get():
        yield path
        return
    shown = os.fspath(target)
    made = _make_parents(path, shown)
    try:
        with _locked(path, shown):
            _clear_leftovers(path)
            # Looked at again: it may have come, or come back, while the lock was not held.
            check_target(target, overwrite=overwrite, sources=sources)
            token = _claimed.set(_claimed.get() | {path})
            try:
                yield path
            finally:
                _claimed.reset(token)
    finally:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()


def clear_leftovers(target: Name) -> None:
    """Clear what a killed process left beside an output that is whole, and beside those inside it, the locks too.

    What a living process is writing is left alone, and so is what cannot be removed.

    Args:
        target: a folder that is there.
    """
    folder = _absolute(os.fspath(target))
    locks = [folder.with_name(f"{LOCK}{folder.name}"), *folder.rglob(f"{LOCK}*")]
    for path in [file.with_name(file.name.removeprefix(LOCK)) for file in locks if file.is_file()]:
        with contextlib.suppress(CheckpointError), _locked(path, str(path)):
            _clear_leftovers(path)


def _make_parents(path: Path, shown: str) -> list[Path]:
    """Make the folders above, and return those that were not there, the lowest first."""
    made: list[Path] = []
    try:
        for parent in reversed([path.parent, *path.parent.parents]):
            if not parent.exists():
                parent.mkdir(exist_ok=True)
                made.insert(0, parent)
    except OSError as error:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise CheckpointError(
            f"output {shown!r} cannot be made ({error.strerror or error}); choose another folder"
        ) from error
    return made


@contextlib.contextmanager
def _locked(path: Path, shown: str) -> Iterator[None]:
    file = path.with_name(f"{LOCK}{path.name}")
    if not _is_lock(file):
        raise CheckpointError(
            f"{str(file)!r} lies where the lock of output {shown!r} would, and linearize did not write it; move it, or "
            "choose another output"
        )
    lock = FileLock(file)
    try:
        lock.acquire(timeout=WAIT, poll_interval=0.05)
    except Timeout:
        if not file.exists():
            raise CheckpointError(
                f"output {shown!r} cannot be locked, as no file can be made in {str(path.parent)!r}; choose another "
                "folder"
            ) from None
        raise CheckpointError(
            f"output {shown!r} is being written by {_owner(file)}; wait for its end, or choose another folder"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise CheckpointError(f"output {shown!r} cannot be locked ({error}); choose another folder") from error
    try:
        # Where the file system knows no locks, filelock writes the number itself, with more beside it.
        if not isinstance(lock, SoftFileLock):
            with contextlib.suppress(OSError):
                file.write_text(f"{LOCKED_BY}{os.getpid()}\n", encoding="utf-8")
        yield
    finally:
        # Removed while it is held: who waits for it sees that the file has no name any more, and makes a new one.
        with contextlib.suppress(OSError):
            file.unlink()
        lock.release()


def _is_lock(file: Path) -> bool:
    """Tell whether a file is missing, or a lock of ours or of filelock; an empty one was just made."""
    try:
        return not file.is_symlink() and (not file.exists() or LOCK_TEXT.fullmatch(read_text(file)) is not None)
    except (OSError, ValueError):
        return False


def _owner(file: Path) -> str:
    try:
        number = read_text(file).removeprefix(LOCKED_BY).split()[0]
    except (OSError, IndexError, ValueError):
        return "another process"
    return f"process {number}"


def _beside(path: Path, kind: str) -> list[Path]:
    """Return what lies beside an output under the names that `atomic_folder` gives."""
    pattern = re.compile(rf"\.{kind}-{re.escape(path.name)}-[0-9a-f]{{8}}")
    return sorted(one for one in path.parent.iterdir() if pattern.fullmatch(one.name))


def _clear_leftovers(path: Path) -> None:
    """Clear what no living process owns; called with the lock held."""
    for old in _beside(path, "old"):
        # The kill came between the renames of an overwrite: before the new folder had the name, or after.
        old.rename(spare_name(path) if path.exists() else path)
    for one in _beside(path, "new"):
        _remove(one)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def atomic_folder(target: Name, *, overwrite: bool = False, marked: bool = True) -> Iterator[Path]:
    """Give a fresh folder beside `target` that takes its name when the block ends well, and vanishes otherwise.

    A kill between the two renames of an overwrite leaves the old folder under a name that begins with `.old-`; the next
    `claim` of the same output puts it back.

    Args:
        target: as in `check_target`.
        overwrite: as in `check_target`.
        marked: whether the folder gets our marker, by which it may be replaced later.

    Raises:
        CheckpointError: if the target cannot be used, or the disk is full.
    """
    with claim(target, overwrite=overwrite) as path:
        fresh = spare_name(path)
        try:
            fresh.mkdir()
            yield fresh
            _share(fresh)
            if marked:
                mark(fresh)
            _sync(fresh)
            # Looked at once more: something may have been put there since the block began.
            check_target(target, overwrite=overwrite)
            _swap(fresh, path)
        except Exception as error:
            if is_write_error(error):
                _say_unwritten(target, error)
            raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _share(folder: Path) -> None:
    """Let others read what the umask lets them read: safetensors makes files for the user alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def is_write_error(error: BaseException) -> bool:
    """Tell whether something could not be written; torch and the libraries in Rust have their own errors for it."""
    return isinstance(error, OSError) or any(one in str(error) for one in ("(os error ", "inline_container"))


def _say_unwritten(target: Name, error: BaseException) -> NoReturn:
    reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
    raise CheckpointError(
        f"could not write {os.fspath(target)!r} ({reason}); nothing was left under that name: "
        "make room or choose another folder"
    ) from error


def _swap(fresh: Path, path: Path) -> None:
    """Put a folder in another's place; whatever happens, one of the two has the name in the end."""
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
    # The new one is there. What cannot be removed now, the next `claim` clears; a part of it is never put back.
    unwanted = spare_name(path)
    with contextlib.suppress(OSError):
        old.rename(unwanted)
    _remove(unwanted)


def _sync(folder: Path) -> None:
    """Have the files on disk before the folder gets its name."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())


def check_room(target: Name, size: int) -> None:
    """Write a file of the expected size beside an output that is claimed, and remove it.

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
                _reserve(handle.fileno(), max(1, min(SHARD, size - number * SHARD)))
    except OSError as error:
        raise CheckpointError(
            f"output {os.fspath(target)!r}: the {size / 1e6:,.1f} MB of the result cannot be written to "
            f"{str(path.parent)!r} ({error.strerror or error}); make room, or choose another folder"
        ) from error
    finally:
        for file in files:
            _remove(file)


def _reserve(handle: int, size: int) -> None:
    """Have the blocks of a file set aside; where the system cannot do that, compare with what is free."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
        return
    os.ftruncate(handle, size)
    free = os.fstatvfs(handle)
    if free.f_bavail * free.f_frsize < size:
        raise OSError(28, "No space left on device")


__all__ = ["atomic_folder", "check_room", "check_target", "claim", "clear_leftovers", "is_write_error"]
