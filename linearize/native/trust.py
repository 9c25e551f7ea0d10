"""Which compiled library may be loaded: who owns it, who can write it, and whether it is the one that was made.

A library runs with all rights of the process. It comes from a folder that its user (or root) owns and nobody else can
write, and only where its size and hash are those in the record beside it, which is written last: a planted, a cut-off
or a half-written file is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD_BYTES = 10_000
"""No record is longer."""


def objection(path: Path) -> str:
    """Say why a file or folder is not to be trusted: somebody else can change it. Empty if nobody can.

    The folders above count too: who can rename one of them can put another in its place. In a folder with the sticky
    bit, as /tmp, only owners rename.
    """
    if not hasattr(os, "geteuid"):
        return "the system does not say who owns a file"
    try:
        above = dict.fromkeys([*path.absolute().parents, *path.resolve(strict=True).parents])
        reasons = [_objection(path, above=False), *(_objection(folder, above=True) for folder in above)]
    except (OSError, RuntimeError) as error:
        return f"{path} cannot be looked at ({error})"
    return next(filter(None, reasons), "")


def _objection(place: Path, *, above: bool) -> str:
    found = os.lstat(place)
    if found.st_uid not in (0, os.geteuid()):
        return f"{place} belongs to another user (number {found.st_uid})"
    if stat.S_ISLNK(found.st_mode):
        # On the way a link does: only its owner can turn it, and where it leads is looked at as well.
        return "" if above else f"{place} is a link"
    sticky = above and found.st_mode & stat.S_ISVTX
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        return f"{place} can be written by others (mode {stat.S_IMODE(found.st_mode):o}; chmod go-w puts that right)"
    return ""


def record(path: Path) -> dict[str, Any]:
    """Describe a library for the record beside it: its name, size and hash."""
    data = path.read_bytes()
    return {"file": path.name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read_record(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        OSError: if it is none.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.loads(file.read(RECORD_BYTES))
    except (ValueError, RecursionError):
        raise OSError(f"{path} is damaged") from None
    if not isinstance(found, dict):
        raise OSError(f"{path} is damaged")
    return found


def verified(folder: Path, entry: Mapping[str, object]) -> Path:
    """Return the library that an entry of a record names, once its size and hash are those that were written down.

    Raises:
        OSError: saying what is wrong.
    """
    name = entry.get("file")
    if not isinstance(name, str) or os.path.basename(name) != name or not name.endswith(".so"):
        raise OSError(f"the record in {folder} names {name!r}, expected a library beside it")
    path = folder / name
    # The size first: what was cut off needs no reading, and what was blown up would take the memory.
    if path.stat().st_size != entry.get("size") or record(path)["sha256"] != entry.get("sha256"):
        raise OSError(f"{path} is not the library that was built: its size or hash is another")
    return path


def write_durably(path: Path, data: bytes) -> None:
    """Write a file beside, have it on disk, and give it its name: a reader sees all of it or nothing."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)
        os.replace(beside, path)
        sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Have a folder's names on disk, where the system can do that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
