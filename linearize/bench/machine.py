"""The machine that measures: what it is, how fast it multiplies matrices, and whether it was quiet enough."""

from __future__ import annotations

import functools
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from linearize.attention.backends.fla import chunk_kernel
from linearize.bench.timing import seconds_of, spread
from linearize.errors import ConfigError, unknown_name
from linearize.native import engine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

PROBE = 768
"""Rows of the square matrices whose product is timed again and again: some milliseconds on a few cores."""

PEAKS = (1024, 2048)
"""Rows of those that the fastest product is looked for with."""

MOST_SPREAD, MOST_OTHERS = 0.10, 0.25
"""A machine is too noisy where the probe's quartiles lie further apart, or others use more of its cores."""


@dataclass
class Noise:
    """How quiet it was.

    Attributes:
        probes: seconds of one fixed matrix product, before, between and after the measurements.
        others: cores that other processes used on average meanwhile; None where the system does not say.
        load: load average of the last minute before the start; None where the system does not say.
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
        """Whether the figures are not to be trusted."""
        return self.spread > MOST_SPREAD or (self.others or 0.0) > MOST_OTHERS

    @property
    def text(self) -> str:
        """One line for people."""
        others = "" if self.others is None else f", others used {self.others:.2f} cores"
        verdict = "too noisy, measure again on a quiet machine" if self.too_noisy else "quiet"
        return f"{verdict} (a fixed matrix product varied by {self.spread:.0%}{others})"

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        shown = asdict(self) | {"spread": self.spread, "too_noisy": self.too_noisy, "text": self.text}
        return shown | {"probes": len(self.probes)}


class NoiseWatch:
    """Watches the machine from now on."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.noise = Noise(load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None)
        self.matrix = torch.ones(PROBE, PROBE, device=device)
        self.start, self.own, self.all = time.perf_counter(), _own_seconds(), _all_seconds()
        for _ in range(3):
            seconds_of(self._multiply)

    def _multiply(self) -> torch.Tensor:
        return self.matrix @ self.matrix

    def probe(self, times: int = 7) -> None:
        """Time the fixed product a few times."""
        self.noise.probes += [seconds_of(self._multiply) for _ in range(times)]

    def stop(self) -> Noise:
        """Say how quiet it was."""
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
    """Processor time of everybody, and what the host took from a virtual machine; None where unknown."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    # user nice system idle iowait irq softirq steal
    ticks = [int(number) for number in stat.read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Machine:
    """What measured.

    Attributes:
        device: as torch calls it.
        name: processor or GPU.
        threads: of torch on the CPU.
        cores: that this process may use.
        dtype: type of the numbers.
        peak: floating-point operations per second of the fastest square matrix product in that type.
        torch: its version.
        native: whether the native op was compiled and is used.
        fla: whether causal attention may go through flash-linear-attention's kernels.
    """

    device: str
    name: str
    threads: int
    cores: int
    dtype: str
    peak: float
    torch: str
    native: bool = False
    fla: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


def describe(device: str, dtype: str) -> Machine:
    """Look at the machine and measure its fastest matrix product."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else processor_name()
    fastest = peak_rate(device, dtype)
    native = device == "cpu" and engine() is not None
    fla = chunk_kernel(torch.device(device)) is not None
    return Machine(device, name, torch.get_num_threads(), cores, dtype, fastest, torch.__version__, native, fla)


def peak_rate(device: str, dtype: str, sizes: tuple[int, ...] = PEAKS, repeats: int = 5) -> float:
    """Return the operations per second of the fastest of a few square matrix products."""
    best = 0.0
    for size in sizes:
        matrix = torch.ones(size, size, device=device, dtype=DTYPES[dtype])
        multiply = functools.partial(torch.matmul, matrix, matrix)
        seconds = min(seconds_of(multiply) for _ in range(repeats))
        best = max(best, 2.0 * size**3 / seconds)
    return best


def processor_name() -> str:
    """Return the name of the processor, as the system says it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def check_dtype(dtype: str, device: str) -> str:
    """Return the name of a type that the device can multiply and attend with.

    Raises:
        UnknownNameError: for a name that is none.
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
