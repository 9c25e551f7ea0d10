"""Compile the native op, once per machine, into the user's cache folder (`linearize.attention.native.locate`).

Library and record are written to temporary files and renamed, the record last. So two processes may build at once, and
a killed one leaves nothing incomplete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from linearize.attention.native import SWITCH, engine, forget, locate
from linearize.attention.native.calls import Engine
from linearize.attention.native.locate import (
    FAILED,
    FLAGS,
    SOURCES,
    cache_folder,
    describe,
    objection,
    read_record,
    record_file,
    sync_folder,
    write_durably,
)
from linearize.core.errors import ConfigError

COMPILERS = ("cc", "gcc", "clang")
SECONDS = 300
"""Time limit of a compiler."""
BUILD_PREFIX = ".build-"
"""Start of the names of a compiler's working folders."""


def compiler() -> str | None:
    """Return the C compiler: the environment variable CC, or the first installed one of the usual names."""
    wanted = os.environ.get("CC")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, COMPILERS)), None)


def build() -> Path:
    """Compile the native op.

    Returns:
        The library, which is used from the next call on.

    Raises:
        ConfigError: if there is no C compiler, it fails, or other users can write the folder for the library.
    """
    program = compiler()
    if program is None:
        raise ConfigError(
            f"native op: got no C compiler (looked for {', '.join(COMPILERS)}), expected one; install gcc or clang, "
            "or set CC; everything works without the native op"
        )
    path = _writable_record()
    library = _compile_into(program, path)
    forget()
    return library


def _writable_record() -> Path:
    """Make the cache folder; return the path of the record.

    Raises:
        ConfigError: if it cannot be made, or others can write it, so that no library in it would be loaded.
    """
    path = record_file()
    if path is None:
        raise ConfigError("native op: the user has no home folder to keep it in; set XDG_CACHE_HOME to a folder")
    try:
        for folder in (*reversed(path.parent.parents), path.parent):
            # The mode that the XDG convention requires; with parents=True it would depend on the umask.
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"native op: {path.parent} cannot be made ({error.strerror}); set XDG_CACHE_HOME") from None
    if why := objection(path.parent):
        raise ConfigError(f"native op: {why}, so nothing in it would be loaded; correct that, or set XDG_CACHE_HOME")
    return path


def _compile_into(program: str, path: Path) -> Path:
    """Compile, and write the library and then its record."""
    try:
        with (
            _one_build_at_a_time(path.parent),
            tempfile.TemporaryDirectory(dir=path.parent, prefix=BUILD_PREFIX) as folder,
        ):
            made = Path(folder) / f"{path.stem}.so"
            if error := compile_library(program, made, locate.NATIVE_FLAGS):
                raise ConfigError(f"native op: {program} failed; everything works without it. It said: {error[-500:]}")
            entry = describe(made)
            # Named by its content, so that simultaneous builds never mix one's library with the other's record.
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


@contextlib.contextmanager
def _one_build_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for other builds into the folder, and delete the working folders of killed ones.

    A lock on the folder itself ends with its process, so under the lock all working folders are abandoned. Without such
    a lock (Windows, some network file systems), only folders older than any build are deleted.
    """
    handle = None
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        _sweep(folder, older=0.0)
    except (ImportError, OSError):
        _sweep(folder, older=4 * SECONDS)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _sweep(folder: Path, older: float) -> None:
    """Delete working folders of builds that started more than so many seconds ago."""
    for left in folder.glob(f"{BUILD_PREFIX}*"):
        with contextlib.suppress(OSError):
            if not older or time.time() - left.stat().st_mtime > older:
                shutil.rmtree(left)


def compile_library(program: str, made: Path, processor_flags: tuple[str, ...], *, load: bool = True) -> str:
    """Compile the sources into the file `made`.

    Args:
        program: the compiler.
        made: library to write.
        processor_flags: flags for the target processor.
        load: whether to load it too, to check that it runs here.

    Returns:
        The error; empty on success.
    """
    # With OpenMP's pragmas if the compiler has them; torch's own library has their functions.
    error = _compile(program, made, (*processor_flags, "-fopenmp"), load)
    return error if error and _compile(program, made, processor_flags, load) else ""


def _compile(program: str, made: Path, extra: tuple[str, ...], load: bool) -> str:
    """Compile, link and load; return the error."""
    source, unit = Path(__file__).parent / SOURCES[0], made.with_suffix(".o")
    steps = (
        [program, *FLAGS, *extra, "-c", str(source), "-o", str(unit)],
        # Without -fopenmp, so that no second OpenMP library with separate threads is loaded.
        [program, "-shared", str(unit), "-lm", "-o", str(made)],
    )
    try:
        for command in steps:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            if done.returncode:
                raise OSError(done.stderr.strip())
        if load:
            Engine(made)
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        made.unlink(missing_ok=True)
        return str(error) or f"{program} failed without a message"
    return ""


def worth_building() -> bool:
    """Tell whether the op should be compiled automatically: it is not built, and there is no obstacle."""
    return not os.environ.get(SWITCH) and engine() is None and not obstacle()


def obstacle() -> str:
    """Say why the op is not compiled automatically although it is not built; empty without an obstacle.

    Also empty if the environment variable LINEARIZE_NATIVE is set: 0 means no native op, 1 the existing one.
    """
    if os.environ.get(SWITCH) or engine() is not None:
        return ""
    path = record_file()
    if path is None:
        return "the user has no home folder; set XDG_CACHE_HOME to a folder for it"
    if compiler() is None:
        return f"no C compiler among {', '.join(COMPILERS)}; install gcc or clang, or set CC"
    try:
        folder = next(part for part in path.parents if part.exists())
        why = objection(folder) or ("" if os.access(folder, os.W_OK) else f"{folder} cannot be written")
        return f"{why}; correct that, or set XDG_CACHE_HOME to another folder" if why else _failed_before(path)
    except OSError as error:
        return f"{path.parent} cannot be read ({error.strerror})"


def _failed_before(path: Path) -> str:
    try:
        return (
            "it failed before; linearize native --build tries again and says why" if FAILED in read_record(path) else ""
        )
    except OSError:
        return ""


def note_failure(error: Exception) -> None:
    """Record that compiling failed or gave wrong results, so that it is not tried again automatically."""
    path = record_file()
    if path is not None:
        # If the record cannot be written, the next try fails again.
        with contextlib.suppress(OSError):
            write_durably(path, json.dumps({FAILED: str(error)[:1000]}).encode())
    forget()


def remove() -> list[Path]:
    """Delete and return everything that was built, for other versions and machines too."""
    folder = cache_folder()
    files = [] if folder is None else sorted((*folder.glob("native-*.so"), *folder.glob("native-*.json")))
    for file in files:
        file.unlink(missing_ok=True)
    if folder is not None:
        _sweep(folder, older=0.0)
    forget()
    return files
