"""A converted model and its softmax original on one long input: time in turns, memory in a process of its own each."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linearize.errors import LinearizeError


@dataclass(frozen=True)
class Comparison:
    """One length.

    Attributes:
        tokens: length of the input.
        softmax_seconds: median forward of the softmax model (SDPA).
        linear_seconds: median forward of the converted model.
        softmax_bytes: peak memory of that forward above the loaded model, or None.
        linear_bytes: the same of the converted model.
        repeats: forwards per side.
    """

    tokens: int
    softmax_seconds: float
    linear_seconds: float
    softmax_bytes: int | None
    linear_bytes: int | None
    repeats: int

    @property
    def speedup(self) -> float:
        """Softmax's time over the linear model's."""
        return self.softmax_seconds / self.linear_seconds


def in_turns(sides: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Time functions in turn, A B A B ..., after one warm-up each; seconds per call."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for call in sides.values():
        call()
    for _ in range(repeats):
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return times


@torch.no_grad()
def compare(
    softmax: Any, linear: Any, inputs: Mapping[str, Tensor], *, folders: tuple[Path, Path] | None, repeats: int = 3
) -> Comparison:
    """Compare two models on the same inputs.

    Args:
        softmax: the original, with SDPA.
        linear: the converted model.
        inputs: keyword arguments of both forwards.
        folders: where the two are saved, for the memory of each in a fresh process; None: no memory.
        repeats: forwards per side; medians are returned.
    """
    times = in_turns({"softmax": lambda: softmax(**inputs), "linear": lambda: linear(**inputs)}, repeats)
    tokens = next(iter(inputs.values())).shape[1]
    memory = (None, None) if folders is None else tuple(peak_memory(folder, tokens) for folder in folders)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return Comparison(tokens, medians["softmax"], medians["linear"], memory[0], memory[1], repeats)


def peak_memory(folder: Path, tokens: int) -> int:
    """Return by how many bytes one forward of a text model raises a fresh process's peak memory.

    Raises:
        LinearizeError: if the process fails.
    """
    code = "from linearize.bench.side_by_side import _measure; _measure()"
    request = json.dumps({"folder": str(folder), "tokens": tokens})
    # Threads keep arenas of their own; one malloc arena makes the figure that of the tensors.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "MALLOC_ARENA_MAX": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code], input=request, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise LinearizeError(f"the memory measurement of {folder.name!r} failed: {last}")
    return int(done.stdout.strip().splitlines()[-1])


@torch.no_grad()
def _measure() -> None:
    """Body of the fresh process: read the request, run one short and one long forward, write the difference."""
    from transformers import AutoModel

    import linearize  # noqa: F401 - makes the Auto classes know converted checkpoints

    request = json.loads(sys.stdin.read())
    model = AutoModel.from_pretrained(request["folder"]).eval()
    model(input_ids=torch.full((1, 8), 5))
    before = _start_peak()
    model(input_ids=torch.full((1, request["tokens"]), 5))
    sys.stdout.write(f"{max(0, _peak() - before)}\n")


_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _start_peak() -> int:
    """Forget the peak so far, which loading the weights has made, where the system can; return the memory now."""
    try:
        _RESET.write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    """Return the process's peak memory in bytes."""
    if _STATUS.exists():
        return _status("VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
