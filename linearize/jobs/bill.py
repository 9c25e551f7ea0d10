"""What a job will cost, as data: steps, time, memory and room, from a few of its own steps on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.bench.memory import SHARE

if TYPE_CHECKING:
    from linearize.kernel_search.estimate import SearchEstimate

HOW = "from real steps of this job on this machine, as busy as it was"


@dataclass(frozen=True)
class StageBill:
    """What one stage costs.

    Attributes:
        stage: its name.
        steps: optimizer steps.
        rows: rows per step.
        seconds_per_step: mean of those that were timed.
        timed: how many were.
        evaluations: how often held-out rows are measured.
        seconds: of the whole stage, evaluations included; if it is not stopped early.
        evaluation: seconds of one evaluation.
    """

    stage: str
    steps: int
    rows: int
    seconds_per_step: float
    timed: int
    evaluations: int
    seconds: float
    evaluation: float = 0.0

    @property
    def text(self) -> str:
        """One line."""
        measured = f", measured {self.evaluations:,} times" if self.evaluations else ""
        return (
            f"{self.stage}: {self.steps:,} steps of {self.rows:,} rows at {self.seconds_per_step:.3g} s{measured}: "
            f"{duration(self.seconds)}"
        )


@dataclass(frozen=True)
class Bill:
    """What a job costs.

    Attributes:
        output: the folder to be made.
        data: one line about the data.
        length: the most tokens of a row; None for images.
        stages: what is trained.
        device: where.
        memory: peak bytes while the steps were timed: of the process on a CPU, of torch's tensors on another device;
            None where the system does not say.
        memory_there: bytes that there are for it; None where the system does not say.
        disk: bytes of the result.
        disk_there: bytes that are free where it goes.
        problem: why it does not fit, found by trying; empty otherwise.
        how: where the figures are from.
        search: what would be searched, where a search chooses the kernels.
    """

    output: str
    data: str
    length: int | None
    stages: tuple[StageBill, ...]
    device: str
    memory: int | None
    memory_there: int | None
    disk: int
    disk_there: int
    problem: str = ""
    how: str = field(default=HOW)
    search: SearchEstimate | None = None

    @property
    def seconds(self) -> float:
        """Of all stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def problems(self) -> list[str]:
        """Why it does not fit; empty where it does."""
        found = [self.problem] if self.problem else []
        if self.memory is not None and self.memory_there is not None and self.memory > self.memory_there:
            found.append(f"memory: {size(self.memory)} needed, {size(self.memory_there)} there")
        if self.disk > self.disk_there:
            found.append(f"disk: {size(self.disk)} needed, {size(self.disk_there)} free")
        return found

    def lines(self) -> list[str]:
        """Return the bill for people."""
        rows = "" if self.length is None else f"; rows of up to {self.length:,} tokens"
        found = [f"Data: {self.data}{rows}", *([] if self.search is None else self.search.lines())]
        found += [f"Time, {stage.text}" for stage in self.stages]
        if len(self.stages) > 1:
            found.append(f"Time, altogether: {duration(self.seconds)}")
        if self.stages:
            found.append(f"Estimated {self.how}.")
        there = "" if self.memory_there is None else f" of {size(self.memory_there)}"
        if self.memory is not None:
            found.append(f"Memory on {self.device}: {size(self.memory)}{there}")
        found.append(f"Folder: {self.output}, {size(self.disk)} of {size(self.disk_there)} free")
        problems = self.problems
        return [*found, f"It does not fit: {'; '.join(problems)}." if problems else "It fits. Nothing was written."]

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        search = None if self.search is None else self.search.to_dict()
        own = {name: value for name, value in vars(self).items() if name not in ("stages", "search")}
        own |= {"stages": [asdict(stage) for stage in self.stages], "search": search}
        return own | {"seconds": self.seconds, "fits": not self.problems, "problems": self.problems}


def duration(seconds: float) -> str:
    """Write a time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: int) -> str:
    """Write a number of bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def free_disk(target: str) -> int:
    """Return the free bytes where a folder is to be made."""
    import shutil

    path = Path(target).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


class Meter:
    """Peak memory on a device from now on."""

    def __init__(self, device: str) -> None:
        import torch

        from linearize.bench.memory import start_peak

        self.cuda = device.startswith("cuda")
        self.device = device
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)
        else:
            start_peak()

    def read(self) -> tuple[int | None, int | None]:
        """Return the peak so far, and what there is for it: what is free and what this process has of it."""
        import torch

        from linearize.bench.memory import free_memory, peak, resident

        if self.cuda:
            free, _ = torch.cuda.mem_get_info(self.device)
            own = torch.cuda.memory_reserved(self.device)
            return torch.cuda.max_memory_allocated(self.device), free + own
        if self.device != "cpu":
            return None, None
        free_bytes = free_memory()
        return peak(), None if free_bytes is None else int(SHARE * free_bytes) + resident()
