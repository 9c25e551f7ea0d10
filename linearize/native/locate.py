"""Where the compiled native op lies: in the user's cache folder, or in the package.

The folder holds for each code and processor a record, `native-<fingerprint>.json`, and the library that it names.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path

from linearize.native.trust import objection, read_record, verified
from linearize.native.variants import packaged

SOURCES = (
    *("attention.c", "step.h", "causal_gradient.h", "causal.h", "bidirectional_gradient.h", "bidirectional.h"),
    *("window_gradient.h", "window.h", "window_step.h", "one_token.h", "features.h", "gradient.h", "call.h"),
    *("maps.h", "tile.h"),
)
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
NATIVE_FLAGS = ("-march=native",)
"""For the processor that compiles."""
FAILED = "failed"
"""Key of a record that says why compiling failed, instead of naming a library."""


def cache_folder() -> Path | None:
    """Return where libraries are kept: in the user's cache folder; None for a user without a home."""
    # A relative path is not valid there, and would be another one in every folder.
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return cache / "linearize" if cache.is_absolute() else None


def record_file() -> Path | None:
    """Return where the record of this code and processor lies or would lie."""
    folder = cache_folder()
    return None if folder is None else folder / f"native-{_fingerprint()}.json"


def sources_hash() -> str:
    """Return the hash of what a library is made of."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


@functools.lru_cache(maxsize=1)
def _fingerprint() -> str:
    # A home folder may be shared by machines whose processors differ.
    text = f"{sources_hash()} {' '.join(NATIVE_FLAGS)} {platform.machine()} {processor()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compiled() -> Path | None:
    """Return the library that was compiled here for this code and processor; None where there is none.

    Raises:
        OSError: if what lies there must not be loaded: others can write it, or it is not what was built.
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
    """Return the library that came with the package for such a processor; None where it came without.

    Raises:
        OSError: if it is damaged.
    """
    return packaged(sources_hash(), processor().split())


def processor() -> str:
    """Return what the processor can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
