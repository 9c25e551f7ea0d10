"""The bill of a dry run, as data: steps, time, memory and disk space of a job."""

from __future__ import annotations

from dataclasses import asdict, dataclass

HOW = "from real steps of this job on this machine, under its present load"


@dataclass(frozen=True)
class StageBill:
    """What one stage costs.

    Attributes:
        stage: its name.
        steps: optimizer steps.
        rows: rows per step.
        seconds_per_step: mean of the timed steps.
        timed: number of timed steps.
        evaluations: how often the held-out rows are measured.
        seconds: duration of the whole stage with its evaluations, unless it stops early.
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
        output: the folder that it makes.
        data: one line about the data.
        length: the most tokens of a row; None for images.
        stages: what is trained.
        device: the device's type.
        memory: peak bytes while the steps were timed: of the process on a CPU, of torch's tensors on another device;
            None if the system does not report it.
        memory_there: bytes available for it; None if the system does not report it.
        disk: bytes of the result and of the states.
        disk_there: free bytes at the output.
        problem: why it did not work when tried; empty otherwise.
        how: where the figures come from.
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
    how: str = HOW

    @property
    def seconds(self) -> float:
        """Duration of all stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def problems(self) -> list[str]:
        """Why it does not fit; empty if it does."""
        problems = [self.problem] if self.problem else []
        if self.memory is not None and self.memory_there is not None and self.memory > self.memory_there:
            problems.append(f"memory: {size(self.memory)} needed, {size(self.memory_there)} there")
        if self.disk > self.disk_there:
            problems.append(f"disk: {size(self.disk)} needed, {size(self.disk_there)} free")
        return problems

    def lines(self) -> list[str]:
        """Return the bill for people."""
        rows = "" if self.length is None else f"; rows of up to {self.length:,} tokens"
        lines = [f"Data: {self.data}{rows}", *(f"Time, {stage.text}" for stage in self.stages)]
        if len(self.stages) > 1:
            lines.append(f"Time, altogether: {duration(self.seconds)}")
        if self.stages:
            lines.append(f"Estimated {self.how}.")
        if self.memory is not None:
            available = "" if self.memory_there is None else f" of {size(self.memory_there)}"
            lines.append(f"Memory on {self.device}: {size(self.memory)}{available}")
        lines.append(f"Folder: {self.output}, {size(self.disk)} of {size(self.disk_there)} free")
        problems = "; ".join(self.problems)
        return [*lines, f"It does not fit: {problems}." if problems else "It fits. Nothing was written."]

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self) | {"seconds": self.seconds, "fits": not self.problems, "problems": self.problems}


def duration(seconds: float) -> str:
    """Write a duration for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: int) -> str:
    """Write a number of bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
