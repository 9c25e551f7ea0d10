"""The machine that measures: what it is, and how fast it multiplies matrices."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from linearize.attention.backends.fla import chunk_kernel
from linearize.attention.native import engine
from linearize.core.errors import ConfigError, unknown_name
from linearize.evaluation.bench.meter import seconds_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

PEAKS = (1024, 2048)
"""Rows of the square matrices among which the fastest product is."""


@dataclass(frozen=True)
class Machine:
    """The machine that measured.

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


def describe(device: str, dtype: str) -> Machine:
    """Describe the machine and measure its fastest matrix product."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fastest = peak_rate(device, dtype)
    native = device == "cpu" and engine() is not None
    fla = chunk_kernel(torch.device(device)) is not None
    threads, version = torch.get_num_threads(), torch.__version__
    return Machine(device, device_name(device), threads, cores, dtype, fastest, version, native, fla)


def peak_rate(device: str, dtype: str, sizes: tuple[int, ...] = PEAKS, repeats: int = 5) -> float:
    """Return the operations per second of the fastest of a few square matrix products."""
    best = 0.0
    for size in sizes:
        matrix = torch.ones(size, size, device=device, dtype=DTYPES[dtype])
        multiply = functools.partial(torch.matmul, matrix, matrix)
        seconds = min(seconds_of(multiply) for _ in range(repeats))
        best = max(best, 2.0 * size**3 / seconds)
    return best


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
