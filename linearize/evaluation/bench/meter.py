"""Timing: calls take turns, A B A B ..., so that other work on the machine slows all of them alike.

Also describes the machine, and how noisy it was during the measurement.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from linearize.attention.backends.triton_calls import absence
from linearize.attention.native import engine
from linearize.core.errors import ConfigError, unknown_name
from linearize.training.processes import processor_name

Call = Callable[[], object]
Name = TypeVar("Name")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

AIM, LEAST, MOST = 10.0, 3, 200
"""If no number of turns is given: seconds for all turns in total, and the smallest and largest number of turns."""
PROBE, PROBES = 768, 7
"""Rows of the square matrices whose product is timed to probe for noise (a few milliseconds), and repeats per probe."""
MOST_SPREAD, MOST_OTHERS = 0.10, 0.25
"""A machine is too noisy if the spread of the probes, or the cores that other processes use, exceeds these limits."""


@dataclass(frozen=True)
class Timing:
    """How long one call takes.

    Attributes:
        seconds: median over the turns; a turn with several calls counts as their mean.
        spread: interquartile range divided by the median.
        repeats: number of turns.
        first: median of the first call in each turn, when the CPU caches still hold the other side's data.
        fastest: seconds of the fastest turn.
    """

    seconds: float
    spread: float
    repeats: int
    first: float
    fastest: float

    @classmethod
    def of(cls, times: Sequence[float], calls: int = 1) -> Timing:
        """Summarise the seconds of each call, with `calls` calls per turn and at least one turn."""
        turns = [statistics.fmean(times[i : i + calls]) for i in range(0, len(times), calls)]
        first = statistics.median(times[::calls])
        return cls(statistics.median(turns), spread(turns), len(turns), first, min(turns))


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range divided by the median; 0 for fewer than two numbers."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def seconds_of(call: Call) -> float:
    """Return the seconds of one call, with the accelerator synchronised before and after it."""
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    """Wait for the GPU, if one is in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


def in_turns(
    sides: Mapping[Name, Call],
    repeats: int | None = None,
    *,
    warm_up: float | None = None,
    calls: int = 1,
    aim: float = AIM,
    least: int = LEAST,
    most: int = MOST,
) -> dict[Name, Timing]:
    """Time functions in turns.

    Args:
        sides: the functions, by name.
        repeats: number of turns; None: as many as fit into `aim` seconds, from `least` to `most`.
        warm_up: total seconds of one call of each function, if the caller has warmed them up; None: warm up here.
        calls: how often each function is called in a row in each turn.
        aim: seconds for all turns in total.
        least: the smallest number of turns.
        most: the largest number of turns.
    """
    if warm_up is None:
        warm_up = sum(seconds_of(call) for call in sides.values())
    if repeats is None:
        repeats = max(least, min(most, int(aim / max(calls * warm_up, 1e-9))))
    times: dict[Name, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            times[name] += [seconds_of(call) for _ in range(calls)]
    return {name: Timing.of(values, calls) for name, values in times.items()}


class Noise:
    """How noisy the machine was, from construction until `stop`.

    Attributes:
        probes: seconds of one fixed matrix product, before, between and after the measurements.
        others: cores that other processes used on average; None before `stop`, or if the system does not report it.
        load: load average of the last minute before the start; None if the system does not report it.
    """

    def __init__(self, device: str) -> None:
        self.probes: list[float] = []
        self.others: float | None = None
        self.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self.matrix = torch.ones(PROBE, PROBE, device=device)
        self.start, self.own, self.all = time.perf_counter(), _own_seconds(), _all_seconds()
        for _ in range(3):
            seconds_of(self._multiply)
        self.probe()

    def _multiply(self) -> torch.Tensor:
        return self.matrix @ self.matrix

    def probe(self) -> None:
        """Time the fixed matrix product a few times."""
        self.probes += [seconds_of(self._multiply) for _ in range(PROBES)]

    def stop(self) -> Noise:
        """Probe for the last time, and return itself."""
        self.probe()
        now = _all_seconds()
        if self.all is not None and now is not None:
            others = (now - self.all) - (_own_seconds() - self.own)
            self.others = max(0.0, others) / (time.perf_counter() - self.start)
        return self

    @property
    def spread(self) -> float:
        """Interquartile range of the probes divided by their median."""
        return spread(self.probes)

    @property
    def too_noisy(self) -> bool:
        """Whether the figures are too noisy to trust."""
        return self.spread > MOST_SPREAD or (self.others or 0.0) > MOST_OTHERS

    @property
    def text(self) -> str:
        """How noisy the machine was, in one line."""
        others = "" if self.others is None else f", others used {self.others:.2f} cores"
        verdict = "too noisy, measure again on a quiet machine" if self.too_noisy else "quiet"
        return f"{verdict} (a fixed matrix product varied by {self.spread:.0%}{others})"

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        names = ("others", "load", "spread", "too_noisy", "text")
        return {"probes": len(self.probes), **{name: getattr(self, name) for name in names}}


def _own_seconds() -> float:
    """CPU time of this process and of its finished children."""
    return sum(os.times()[:4])


def _all_seconds() -> float | None:
    """CPU time of all processes, plus steal time in a virtual machine; None if unknown."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    # user nice system idle iowait irq softirq steal
    ticks = [int(number) for number in stat.read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def describe(device: str, dtype: str) -> dict[str, str | int]:
    """Return facts about the machine: its name and sizes, and whether its compiled kernels are used."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else processor_name()
    return {
        "device": device,
        "name": name,
        "threads": torch.get_num_threads(),
        # The cores that this process may use.
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "dtype": dtype,
        "torch": torch.__version__,
        "native": device == "cpu" and engine() is not None,
        "triton": device.startswith("cuda") and not absence(),
    }


def check_dtype(dtype: str, device: str) -> str:
    """Return the dtype's name after checking that the device can multiply and compute attention with it.

    Raises:
        UnknownNameError: for an unknown name.
        ConfigError: if the device does not support it.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if not _works(dtype, device):
        able = ", ".join(name for name in DTYPES if _works(name, device))
        raise ConfigError(f"dtype: got {dtype!r}, which {device} lacks; choose one of {able}")
    return dtype


def _works(dtype: str, device: str) -> bool:
    if dtype == "bfloat16" and device.startswith("cuda") and not torch.cuda.is_bf16_supported():
        return False
    try:
        x = torch.ones(1, 1, 8, 8, device=device, dtype=DTYPES[dtype])
        torch.nn.functional.scaled_dot_product_attention(x @ x, x, x)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True
