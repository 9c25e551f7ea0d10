"""Finds the compiled native op, in the user's cache folder or in the package, and decides whether it may be loaded.

For each version of the code and each processor, the cache folder holds a record, `native-<fingerprint>.json`, and the
library that it names. The package's folder `variants` holds libraries for several kinds of processors, built by
`scripts/make_wheel.py`. Its `variants.json` has the hash of their sources and, for each library, its file, size, hash
and the processor features that it needs, fastest first.

A library runs with all the rights of the process. So it is loaded only from a folder that the user (or root) owns and
that no other user can write to, and only if its size and hash match its record. The record is written last, so a
planted, truncated or half-written file is rejected.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from linearize.core.registry import Values

SOURCES = (
    *("attention.c", "step.h", "causal_gradient.h", "causal.h", "bidirectional_gradient.h", "bidirectional.h"),
    *("window_gradient.h", "window.h", "window_step.h", "one_token.h", "features.h", "gradient.h", "call.h"),
    *("routed.h", "look_up.h", "choose_keys.h", "choice.h", "maps.h", "tile.h"),
)
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
NATIVE_FLAGS = ("-march=native",)
"""Flags for the processor of this machine."""
FAILED = "failed"
"""Key in a record that names no library, but says why compiling failed."""


def cache_folder() -> Path | None:
    """Return the folder of libraries, in the user's cache folder; None if the user has no home folder."""
    # A relative path is not valid in XDG_CACHE_HOME: it would depend on the working directory.
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return cache / "linearize" if cache.is_absolute() else None


def record_file() -> Path | None:
    """Return the path of the record of this code and processor, whether it exists or not."""
    folder = cache_folder()
    if folder is None:
        return None
    # Machines with different processors may share a home folder.
    text = f"{sources_hash()} {' '.join(NATIVE_FLAGS)} {platform.machine()} {processor()}"
    return folder / f"native-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def sources_hash() -> str:
    """Return the hash of the sources and flags of a library."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def compiled() -> Path | None:
    """Return the library that was compiled on this machine for this code and processor, or None.

    Raises:
        OSError: if it must not be loaded, because others can write to it or it is not the library that was built.
    """
    path = record_file()
    if path is None or not path.is_file():
        return None
    _refuse_others(path.parent)
    _refuse_others(path)
    entry = read_record(path)
    if FAILED in entry:
        return None
    library = verified(path.parent, entry)
    _refuse_others(library)
    return library


def _refuse_others(path: Path) -> None:
    if why := objection(path):
        raise OSError(why)


def shipped() -> Path | None:
    """Return the package's library for this processor, or None.

    Raises:
        OSError: if it is damaged.
    """
    return packaged(sources_hash(), processor().split())


def processor() -> str:
    """Return the features of the processor, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


RECORD_BYTES = 10_000
"""Largest size of a record."""


def objection(path: Path) -> str:
    """Return how another user could change a file or folder, so that it cannot be trusted; empty if no one else can.

    The parent folders are checked too, because a user who can rename one of them can replace it. In a folder with the
    sticky bit, such as /tmp, only owners can rename.
    """
    if not hasattr(os, "geteuid"):
        return "the system does not say who owns a file"
    try:
        above = dict.fromkeys([*path.absolute().parents, *path.resolve(strict=True).parents])
        reasons = [_objection(path, above=False), *[_objection(folder, above=True) for folder in above]]
    except (OSError, RuntimeError) as error:
        return f"{path} cannot be read ({error})"
    return next(filter(None, reasons), "")


def _objection(place: Path, *, above: bool) -> str:
    facts = os.lstat(place)
    if facts.st_uid not in (0, os.geteuid()):
        return f"{place} belongs to another user (number {facts.st_uid})"
    if stat.S_ISLNK(facts.st_mode):
        # A link among the parents is allowed: only its owner can change it, and its target is checked as well.
        return "" if above else f"{place} is a link"
    sticky = above and facts.st_mode & stat.S_ISVTX
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        return f"{place} can be written by others (mode {stat.S_IMODE(facts.st_mode):o}; chmod go-w fixes that)"
    return ""


def describe(path: Path) -> Values:
    """Describe a library for its record: name, size and hash."""
    data = path.read_bytes()
    return {"file": path.name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read_record(path: Path) -> Values:
    """Read a record.

    Raises:
        OSError: if the file is not a record.
    """
    try:
        with open(path, encoding="utf-8") as file:
            entry = json.loads(file.read(RECORD_BYTES))
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise OSError(f"{path} is damaged")
    return entry


def verified(folder: Path, entry: Mapping[str, object]) -> Path:
    """Return the library that an entry of a record names, after checking its size and hash.

    Raises:
        OSError: if a check fails; the message says which.
    """
    name = entry.get("file")
    if not isinstance(name, str) or os.path.basename(name) != name or not name.endswith(".so"):
        raise OSError(f"the record in {folder} names {name!r}, expected a library in the same folder")
    path = folder / name
    # Check the size first: a truncated file need not be read, and a huge one would fill the memory.
    if path.stat().st_size != entry.get("size") or describe(path)["sha256"] != entry.get("sha256"):
        raise OSError(f"{path} is not the library that was built: its size or hash is different")
    return path


def write_record(path: Path, entry: Mapping[str, object]) -> None:
    """Write a record to a temporary file and rename it, so that a reader sees all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(entry), encoding="utf-8")
        os.chmod(temporary, 0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


FOLDER = Path(__file__).parent / "variants"
INDEX = "variants.json"


def packaged(sources: str, able: Iterable[str], folder: Path = FOLDER) -> Path | None:
    """Return the fastest library in the package that runs here; None if it has none for this machine.

    Only the hash is checked, not the owner: a user who can change the package's folder can change its Python code too.

    Args:
        sources: hash of the current sources.
        able: features of this processor.
        folder: the folder of the libraries.

    Raises:
        OSError: if a library is missing or damaged, or was built from other sources.
    """
    index = folder / INDEX
    if not index.is_file():
        return None
    record = read_record(index)
    if record.get("machine") != platform.machine():
        return None
    if record.get("sources") != sources:
        raise OSError(f"{folder} holds libraries built from other sources")
    entries = record.get("libraries")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise OSError(f"{index} is damaged")
    able = set(able)
    fitting = (entry for entry in entries if able.issuperset(entry.get("needs") or ()))
    return next((verified(folder, entry) for entry in fitting), None)
