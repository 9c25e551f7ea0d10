"""Compile the native op, once per machine, into the user's cache folder; only on request."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from linearize.errors import ConfigError

SOURCES = (
    *("attention.c", "step.h", "causal_gradient.h", "causal.h", "bidirectional_gradient.h", "bidirectional.h"),
    *("few.h", "features.h", "gradient.h", "call.h", "maps.h", "tile.h"),
)
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
SECONDS = 300
"""After so long a compiler is not waited for."""


def library() -> Path:
    """Return where the compiled op lies or would lie: its name changes with the code and with the processor.

    Raises:
        ConfigError: if there is no folder for it: no HOME, and a user whom the system does not know.
    """
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise ConfigError(
            "native op: got no home folder, expected one for what is compiled; set HOME or XDG_CACHE_HOME"
        ) from None
    return Path(cache) / "linearize" / f"native-{_fingerprint()}.so"


@functools.lru_cache(maxsize=1)
def _fingerprint() -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    # A home folder may be shared by machines whose processors differ.
    digest.update(f"{platform.machine()} {processor()}".encode())
    return digest.hexdigest()[:16]


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
        ConfigError: if there is no C compiler, the processor lacks fused multiply-add, or the compiler fails.
    """
    program = compiler()
    if program is None:
        raise ConfigError(
            f"native op: got no C compiler (looked for {', '.join(COMPILERS)}), expected one; install gcc or clang, "
            "or set CC; everything works without the native op"
        )
    if platform.machine().lower() in ("x86_64", "amd64") and " fma " not in f" {processor()} ":
        raise ConfigError("native op: got a processor without fused multiply-add, expected one with; go on without it")
    target = library()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        # With OpenMP's pragmas where they come to something; their functions are those of torch's own library.
        errors = [error for extra in (("-fopenmp",), ()) if (error := _compile(program, made, extra))]
        if not made.exists():
            raise ConfigError(f"native op: {program} failed; everything works without it. It said: {errors[0][-500:]}")
        made.replace(target)
    from linearize.native import forget

    forget()
    return target


def _compile(program: str, made: Path, extra: tuple[str, ...]) -> str:
    """Compile, link and load unless that is done; return what went wrong."""
    if made.exists():
        return ""
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
        importlib.import_module("linearize.native.calls").Engine(made)
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        made.unlink(missing_ok=True)
        return str(error) or f"{program} ended without a word"
    return ""


def remove() -> list[Path]:
    """Delete what was built, for other versions and machines too; return what that was."""
    found = sorted(library().parent.glob("native-*.so"))
    for file in found:
        file.unlink()
    from linearize.native import forget

    forget()
    return found
