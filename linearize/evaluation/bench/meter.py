"""The meter: calls timed in turns, A B A B ..., so that other work on the machine slows all of them alike; the machine,
and how quiet it was meanwhile."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from linearize.attention.backends.fla import chunk_kernel
from linearize.attention.native import engine
from linearize.checkpoint.loading import wait
from linearize.core.errors import ConfigError, unknown_name

Call = Callable[[], object]
Name = TypeVar("Name")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

AIM, LEAST, MOST = 10.0, 3, 200
"""Without a number of turns: all of them together take this many seconds, with at least and at most this many turns."""
PROBE, PROBES = 768, 7
"""Rows of the square matrices whose product is timed again and again (a few milliseconds), and how often at a time."""
MOST_SPREAD, MOST_OTHERS = 0.10, 0.25
"""A machine is too noisy if the probes' quartiles are further apart, or if others use more of its cores."""


@dataclass(frozen=True)
class Timing:
    """How long one call takes.

    Attributes:
        seconds: median over the turns; a turn with more than one call counts as their mean.
        spread: distance of the quartiles over the median.
        repeats: turns.
        first: median of the first calls of the turns, which find in the caches what the other side left there.
        fastest: of the turns.
    """

    seconds: float
    spread: float
    repeats: int
    first: float
    fastest: float

    @classmethod
    def of(cls, times: Sequence[float], calls: int = 1) -> Timing:
        """Summarise seconds per call, `calls` calls per turn, one turn or more."""
        turns = [statistics.fmean(times[i : i + calls]) for i in range(0, len(times), calls)]
        first = statistics.median(times[::calls])
        return cls(statistics.median(turns), spread(turns), len(turns), first, min(turns))


def spread(times: Sequence[float]) -> float:
    """Return the distance of the quartiles over the median; 0 for fewer than two numbers."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def seconds_of(call: Call) -> float:
    """Time one call; waits for the work of an accelerator before and after it."""
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


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
        repeats: turns; None: as many as take `aim` seconds, from `least` to `most`.
        warm_up: seconds that one call of each took, if it has been made already; None: it is made first.
        calls: of one function in a row, in each turn.
        aim: seconds for all turns together.
        least: turns at least.
        most: turns at most.
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


@dataclass
class Noise:
    """How quiet the machine was.

    Attributes:
        probes: seconds of one fixed matrix product, before, between and after the measurements.
        others: cores that other processes used on average; None if the system does not report it.
        load: load average of the last minute before the start; None if the system does not report it.
    """

    probes: list[float] = field(default_factory=list)
    others: float | None = None
    load: float | None = None

    @property
    def spread(self) -> float:
        """Distance of the probes' quartiles over their median."""
        return spread(self.probes)

    @property
    def too_noisy(self) -> bool:
        """Whether the figures are too noisy to trust."""
        return self.spread > MOST_SPREAD or (self.others or 0.0) > MOST_OTHERS

    @property
    def text(self) -> str:
        """How quiet the machine was, in one line."""
        others = "" if self.others is None else f", others used {self.others:.2f} cores"
        verdict = "too noisy, measure again on a quiet machine" if self.too_noisy else "quiet"
        return f"{verdict} (a fixed matrix product varied by {self.spread:.0%}{others})"

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        shown = asdict(self) | {"spread": self.spread, "too_noisy": self.too_noisy, "text": self.text}
        return shown | {"probes": len(self.probes)}


class NoiseWatch:
    """Watches from now on how quiet the machine is."""

    def __init__(self, device: str) -> None:
        self.noise = Noise(load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None)
        self.matrix = torch.ones(PROBE, PROBE, device=device)
        self.start, self.own, self.all = time.perf_counter(), _own_seconds(), _all_seconds()
        for _ in range(3):
            seconds_of(self._multiply)
        self.probe()

    def _multiply(self) -> torch.Tensor:
        return self.matrix @ self.matrix

    def probe(self) -> None:
        """Time the fixed product a few times."""
        self.noise.probes += [seconds_of(self._multiply) for _ in range(PROBES)]

    def stop(self) -> Noise:
        """Return how quiet it was."""
        self.probe()
        now = _all_seconds()
        if self.all is not None and now is not None:
            others = (now - self.all) - (_own_seconds() - self.own)
            self.noise.others = max(0.0, others) / (time.perf_counter() - self.start)
        return self.noise


def _own_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _all_seconds() -> float | None:
    """Processor time of all processes, and time that the host took from a virtual machine; None if unknown."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    # user nice system idle iowait irq softirq steal
    ticks = [int(number) for number in stat.read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Machine:
    """The machine that measured.

    Attributes:
        device: as torch calls it.
        name: processor or GPU.
        threads: of torch on the CPU.
        cores: that this process may use.
        dtype: type of the numbers.
        torch: its version.
        native: whether the native op was compiled and is used.
        fla: whether causal attention may go through flash-linear-attention's kernels.
    """

    device: str
    name: str
    threads: int
    cores: int
    dtype: str
    torch: str
    native: bool = False
    fla: bool = False


def describe(device: str, dtype: str) -> Machine:
    """Describe the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    native = device == "cpu" and engine() is not None
    fla = chunk_kernel(torch.device(device)) is not None
    return Machine(device, device_name(device), torch.get_num_threads(), cores, dtype, torch.__version__, native, fla)


def device_name(device: str) -> str:
    """Return the name of the GPU or of the processor, as the system reports it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def check_dtype(dtype: str, device: str) -> str:
    """Return the name of a type that the device can multiply and attend with.

    Raises:
        UnknownNameError: for an unknown name.
        ConfigError: if the device lacks it.
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
