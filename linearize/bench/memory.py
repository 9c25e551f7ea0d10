"""Peak memory of a call: in a fresh process on the CPU, where only a process as a whole can be measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from linearize.errors import LinearizeError

OUT_OF_MEMORY = "out of memory"

SHARE = 0.8
"""Of the memory that is free, what a measured process may take: it shall fail by itself, not take others with it."""

MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""What makes glibc's figure that of the tensors: no arenas of threads, and what was freed goes back to the system at
once. By itself it keeps freed blocks of up to 32 MiB, and a tensor that takes one of them adds nothing to the peak."""

_STATUS, _RESET, _FREE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")


class OutOfMemoryError(LinearizeError):
    """A measured call needs more memory than there is: a result, not a fault."""


Request = TypeVar("Request")


def in_fresh_process(function: Callable[[Request], object], request: Request) -> Any:
    """Call a module's function in a new interpreter, offline; request and result travel as JSON.

    Raises:
        OutOfMemoryError: if memory runs out there.
        LinearizeError: if the process fails in another way.
    """
    module, name = function.__module__, function.__name__
    code = f"from linearize.bench.memory import serve; from {module} import {name}; serve({name})"
    environment = os.environ | MALLOC | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise OutOfMemoryError(OUT_OF_MEMORY)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise LinearizeError(f"a measurement in a process of its own failed: {last}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    if answer == OUT_OF_MEMORY:
        raise OutOfMemoryError(OUT_OF_MEMORY)
    return answer


def serve(function: Callable[[Any], object]) -> None:
    """Body of the fresh process: read the request, write the answer."""
    request = json.loads(sys.stdin.read())
    try:
        answer = function(request)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        answer = OUT_OF_MEMORY
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on the CPU or on a GPU."""
    text = str(error).lower()
    known = ("can't allocate memory", "out of memory", "bad_alloc", "cannot allocate memory")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(part in text for part in known))


def limit_memory() -> None:
    """Let this process fail, instead of the machine, when it needs more than `SHARE` of the free memory (Linux)."""
    if not (_STATUS.exists() and _FREE.exists()):
        return
    import resource

    limit = _entry(_STATUS, "VmSize") + int(SHARE * _entry(_FREE, "MemAvailable"))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def start_peak() -> int:
    """Forget the peak so far, which loading the weights has made, where the system can; return the memory now."""
    try:
        _RESET.write_text("5")
    except OSError:
        return peak()
    return _entry(_STATUS, "VmRSS")


def peak() -> int:
    """Return the process's peak memory in bytes."""
    if _STATUS.exists():
        return _entry(_STATUS, "VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int:
    """Return the memory that this process holds now, in bytes; its peak where the system does not say."""
    return _entry(_STATUS, "VmRSS") if _STATUS.exists() else peak()


def free_memory() -> int | None:
    """Return the memory that processes can still get, in bytes; None where the system does not say."""
    return _entry(_FREE, "MemAvailable") if _FREE.exists() else None


def _entry(file: Path, name: str) -> int:
    line = next(line for line in file.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
