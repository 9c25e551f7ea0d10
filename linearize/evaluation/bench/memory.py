"""Peak memory of a call. On the CPU it is measured in a fresh process: only whole processes can be measured there."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from linearize.core.errors import LinearizeError
from linearize.evaluation.bench.meter import Call
from linearize.evaluation.bench.rows import Variant
from linearize.evaluation.bench.suites import Suite

OUT_OF_MEMORY = "out of memory"
SHARE = 0.8
"""Share of the free memory that a measured process may use, so that it fails before other processes do."""
WARM_UP = 8
"""Tokens of the warm-up call before the measured call."""
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Make glibc's peak match the tensors: no arenas per thread, and freed memory returns to the system at once.
By default glibc keeps freed blocks of up to 32 MiB, and a tensor that reuses one of them adds nothing to the peak."""

KILLED = -9, 137
"""Exit statuses of a process that the system killed: Python's, and a shell's."""

_STATUS, _RESET, _FREE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")


class OutOfMemoryError(LinearizeError):
    """A measured call needs more memory than is available; this is a result, not a failure."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on the CPU or on a GPU."""
    text = str(error).lower()
    known = ("can't allocate memory", "out of memory", "bad_alloc", "cannot allocate memory")
    return isinstance(error, MemoryError | OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(part in text for part in known)
    )


def out_of_memory(error: Exception) -> Variant:
    """Return a variant that ran out of memory, and free its memory; re-raise any other error."""
    if not is_out_of_memory(error):
        raise error
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Variant(problem=OUT_OF_MEMORY)


def memory_of(suite: Suite | Reading, variant: str, tokens: int) -> Variant:
    """Measure a variant's peak memory: in this process on a GPU, in a fresh one on the CPU; no figure elsewhere."""
    try:
        if suite.device == "cpu":
            return Variant(bytes=in_fresh_process(suite, variant, tokens))
        if suite.device.startswith("cuda"):
            return Variant(bytes=added_memory(suite, variant, tokens))
    except (RuntimeError, MemoryError, OutOfMemoryError) as error:
        return out_of_memory(error)
    return Variant()


def added_memory(suite: Suite | Reading, variant: str, tokens: int) -> int:
    """Return the bytes that a call adds after a short warm-up call; on the CPU only in a fresh process."""
    start, highest = peak_meter(suite.device)
    suite.prepare(variant, WARM_UP)()
    if suite.device == "cpu" and _STATUS.exists() and _FREE.exists():
        import resource

        # The process fails when it needs more than `SHARE` of the free memory.
        limit = _entry(_STATUS, "VmSize") + int(SHARE * _entry(_FREE, "MemAvailable"))
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    gc.collect()
    before = start()
    call = suite.prepare(variant, tokens)
    if not suite.counts_prepared:
        before = start()
    call()
    return max(0, highest() - before)


def peak_meter(device: str) -> tuple[Callable[[], int], Callable[[], int]]:
    """Return two functions: one resets a device's peak and returns its current bytes, one returns the peak in bytes.

    On a GPU they count the memory of torch's tensors, elsewhere that of this process.
    """
    if not device.startswith("cuda"):

        def reset() -> int:
            # Loading the weights raised the peak. Not every system can reset it.
            try:
                _RESET.write_text("5")
            except OSError:
                return peak()
            return _entry(_STATUS, "VmRSS")

        return reset, peak

    def start() -> int:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)

    def highest() -> int:
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)

    return start, highest


class Reading:
    """One forward pass of rows of tokens through a saved checkpoint, as a suite with one variant.

    Args:
        model: folder or Hub name, converted or not.
        auto_class: class of transformers that loads it.
        rows: texts (or chunks) in the batch.
        device: where it runs.
    """

    counts_prepared: ClassVar[bool] = False

    def __init__(self, model: str, auto_class: str, rows: int, device: str) -> None:
        self.model, self.auto_class, self.rows, self.device = model, auto_class, rows, device

    @cached_property
    def loaded(self) -> PreTrainedModel:
        import transformers

        import linearize  # noqa: F401 - registers converted checkpoints with the Auto classes
        from linearize.conversion.gguf import load_weights

        model = load_weights(getattr(transformers, self.auto_class), self.model).eval().to(self.device)
        if getattr(model.config, "pad_token_id", 0) is None:
            model.config.pad_token_id = 0
        return model

    def prepare(self, variant: str, tokens: int) -> Call:
        ids = torch.ones(self.rows, tokens, dtype=torch.long, device=self.device)
        mask = torch.ones_like(ids)
        return torch.no_grad()(lambda: self.loaded(input_ids=ids, attention_mask=mask))


def peak_of_reading(model: str, auto_class: str, rows: int, tokens: int, device: str = "cpu") -> int | None:
    """Return the bytes that a forward pass of `rows` texts of `tokens` tokens adds; None if they cannot be measured."""
    try:
        return memory_of(Reading(model, auto_class, rows, device), "linear", tokens).bytes
    except LinearizeError:
        # A comparison of scores does not fail because its memory cannot be measured.
        return None


def in_fresh_process(suite: Suite | Reading, variant: str, tokens: int) -> int:
    """Return `added_memory` in a new interpreter, offline, which gets the suite as a pickle and prints the bytes.

    Raises:
        OutOfMemoryError: if memory runs out there.
        LinearizeError: if the process fails in another way.
    """
    environment = os.environ | MALLOC | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if (module := sys.modules[type(suite).__module__.partition(".")[0]]).__name__ != __name__.partition(".")[0]:
        # A suite of another package, which the new interpreter may not find by itself.
        environment["PYTHONPATH"] = str(Path(str(module.__file__)).parents[1])
    done = subprocess.run(
        # -P: without it, a module in the current folder, such as a checkpoint's, would be imported.
        [sys.executable, "-P", "-c", "from linearize.evaluation.bench.memory import serve; serve()"],
        input=pickle.dumps((suite, variant, tokens, torch.get_num_threads())),
        capture_output=True,
        env=environment,
        check=False,
    )
    if done.returncode in KILLED:
        raise OutOfMemoryError(OUT_OF_MEMORY)
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise LinearizeError(f"a measurement in a separate process failed: {last}")
    return int(done.stdout.split()[-1])


def serve() -> None:
    """Measure what stdin names, and print the bytes; if memory runs out, exit as if the system had killed the process.

    This is the fresh process's only job.
    """
    suite, variant, tokens, threads = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    try:
        sys.stdout.write(f"\n{added_memory(suite, variant, tokens)}\n")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(KILLED[1])


def peak() -> int:
    """Return the process's peak memory in bytes."""
    if _STATUS.exists():
        return _entry(_STATUS, "VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int:
    """Return this process's current memory in bytes; its peak if the system does not report the current one."""
    return _entry(_STATUS, "VmRSS") if _STATUS.exists() else peak()


def free_memory() -> int | None:
    """Return the available memory in bytes; None if the system does not report it."""
    return _entry(_FREE, "MemAvailable") if _FREE.exists() else None


def _entry(file: Path, name: str) -> int:
    line = next(line for line in file.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
