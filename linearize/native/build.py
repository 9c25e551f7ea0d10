"""Compile the native op, once per machine, into the user's cache folder; find what was compiled.

The folder holds for each code and processor a record, `native-<fingerprint>.json`, and the library that it names. Both
are written beside and renamed, the record last, so that two processes may build at once and a kill leaves nothing half.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from linearize.errors import ConfigError
from linearize.native.trust import objection, read_record, record, sync_folder, verified, write_durably
from linearize.native.variants import packaged

SOURCES = (
    *("attention.c", "step.h", "causal_gradient.h", "causal.h", "bidirectional_gradient.h", "bidirectional.h"),
    *("few.h", "features.h", "gradient.h", "call.h", "maps.h", "tile.h"),
)
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
HERE = ("-march=native",)
"""For the processor that compiles."""
COMPILERS = ("cc", "gcc", "clang")
SECONDS = 300
"""After so long a compiler is not waited for."""
WORKSHOP = ".build-"
"""How folders begin in which a compiler works."""
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
    text = f"{sources_hash()} {' '.join(HERE)} {platform.machine()} {processor()}"
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


def compiler() -> str | None:
    """Return the C compiler: that of the environment variable CC, or the first of the usual names."""
    wanted = os.environ.get("CC")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, COMPILERS)), None)


def build() -> Path:
    """Compile the native op.

    Returns:
        The library. It is used from the next call on.

    Raises:
        ConfigError: if there is no C compiler, it fails, or there is no folder for the library that nobody else can
            write.
    """
    program = compiler()
    if program is None:
        raise ConfigError(
            f"native op: got no C compiler (looked for {', '.join(COMPILERS)}), expected one; install gcc or clang, "
            "or set CC; everything works without the native op"
        )
    path = _writable_record()
    library = _made(program, path)
    from linearize.native import forget

    forget()
    return library


def _writable_record() -> Path:
    """Make the cache folder; return where the record goes.

    Raises:
        ConfigError: if there is no such folder, or others can write it: what lay there would not be loaded.
    """
    path = record_file()
    if path is None:
        raise ConfigError("native op: the user has no home folder to keep it in; set XDG_CACHE_HOME to a folder")
    try:
        for folder in (*reversed(path.parent.parents), path.parent):
            # Such as the convention wants a cache folder; with parents=True they would be as open as the umask is.
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"native op: {path.parent} cannot be made ({error.strerror}); set XDG_CACHE_HOME") from None
    if why := objection(path.parent):
        raise ConfigError(f"native op: {why}, so nothing in it would be loaded; mend that, or set XDG_CACHE_HOME")
    return path


def _made(program: str, path: Path) -> Path:
    """Compile, and put the library and then its record in place."""
    try:
        _sweep(path.parent, older=4 * SECONDS)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=WORKSHOP) as folder:
            made = Path(folder) / f"{path.stem}.so"
            if said := compile_library(program, made, HERE):
                raise ConfigError(f"native op: {program} failed; everything works without it. It said: {said[-500:]}")
            entry = record(made)
            # Named by its content: two builds at once never mix one's library with the other's record.
            entry["file"] = f"{path.stem}-{entry['sha256'][:16]}.so"
            with open(made, "rb") as handle:
                os.fsync(handle.fileno())
            os.chmod(made, 0o644)
            library = made.replace(path.parent / entry["file"])
            sync_folder(path.parent)
            write_durably(path, json.dumps(entry).encode())
    except OSError as error:
        raise ConfigError(f"native op: {path.parent} cannot be written ({error.strerror or error})") from None
    return library


def _sweep(folder: Path, older: float) -> None:
    """Delete what builds left that were killed more than so many seconds ago."""
    for left in folder.glob(f"{WORKSHOP}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > older:
                shutil.rmtree(left)


def compile_library(program: str, made: Path, processor_flags: tuple[str, ...], *, load: bool = True) -> str:
    """Compile the sources into the file `made`.

    Args:
        program: the compiler.
        made: library to write.
        processor_flags: which processor it is for.
        load: whether to load it too, which shows that it runs here.

    Returns:
        What went wrong; empty if nothing did.
    """
    # With OpenMP's pragmas where they come to something; their functions are those of torch's own library.
    error = _compile(program, made, (*processor_flags, "-fopenmp"), load)
    return error if error and _compile(program, made, processor_flags, load) else ""


def _compile(program: str, made: Path, extra: tuple[str, ...], load: bool) -> str:
    """Compile, link and load; return what went wrong."""
    source, unit = Path(__file__).parent / SOURCES[0], made.with_suffix(".o")
    steps = (
        [program, *FLAGS, *extra, "-c", str(source), "-o", str(unit)],
        # Without -fopenmp, so that no second OpenMP library with threads of its own comes in.
        [program, "-shared", str(unit), "-lm", "-o", str(made)],
    )
    try:
        for command in steps:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            if done.returncode:
                raise OSError(done.stderr.strip())
        if load:
            importlib.import_module("linearize.native.calls").Engine(made)
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        made.unlink(missing_ok=True)
        return str(error) or f"{program} ended without a word"
    return ""


def worth_building() -> bool:
    """Whether the op should be compiled unasked: it is not there, a compiler is, and it was not tried in vain before.

    Not where the environment variable LINEARIZE_NATIVE is set: 0 wants no native op, 1 the one that is there.
    """
    from linearize.native import SWITCH, engine

    path = record_file()
    if os.environ.get(SWITCH) or path is None or compiler() is None or engine() is not None:
        return False
    try:
        folder = next(part for part in path.parents if part.exists())
        return os.access(folder, os.W_OK) and not objection(folder) and not _tried(path)
    except OSError:
        return False


def _tried(path: Path) -> bool:
    try:
        return FAILED in read_record(path)
    except OSError:
        return False


def note_failure(error: Exception) -> None:
    """Write down that compiling failed, or made something of no use, so that it is not tried again unasked."""
    from linearize.native import forget

    path = record_file()
    if path is not None:
        # Where that cannot be written it is tried again, and fails again.
        with contextlib.suppress(OSError):
            write_durably(path, json.dumps({FAILED: str(error)[:1000]}).encode())
    forget()


def remove() -> list[Path]:
    """Delete what was built, for other versions and machines too; return what that was."""
    folder = cache_folder()
    found = [] if folder is None else sorted((*folder.glob("native-*.so"), *folder.glob("native-*.json")))
    for file in found:
        file.unlink(missing_ok=True)
    if folder is not None:
        _sweep(folder, older=0.0)
    from linearize.native import forget

    forget()
    return found
