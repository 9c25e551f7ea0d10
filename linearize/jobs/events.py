"""Events that a job passes to its callback, in addition to those of `linearize.core.events`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.core.events import Advanced as Advanced
from linearize.core.events import Callback as Callback
from linearize.core.events import Event as Event
from linearize.core.events import Noted as Noted
from linearize.core.events import Started as Started
from linearize.core.events import ignore as ignore

if TYPE_CHECKING:
    from linearize.fidelity.ablate import KernelMerit
    from linearize.kernel_search.result import SearchResult, SearchStep
    from linearize.modeling.plan import Plan
    from linearize.training.alignment.loop import AlignResult, AlignStep
    from linearize.training.stage_one.loop import DistillResult, StepReport
    from linearize.training.stage_two.progress import TuneStep


@dataclass(frozen=True)
class WorstLayer:
    """The layer that is furthest from softmax.

    Attributes:
        module: name of the host module.
        index: its number, as `--keep-softmax` takes it; None if unknown.
        figure: name of the figure that ranks layers.
        value: the layer's figure.
        mean: mean over all layers.
    """

    module: str
    index: int | None
    figure: str
    value: float
    mean: float


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest held-out row (`seen`, without padding) and of the longest input (`promised`)."""

    seen: int
    promised: int


@dataclass(frozen=True)
class Findings:
    """The findings of a stage.

    Attributes:
        worst: the worst layer; None if layers were not measured, or if there is only one.
        lengths: longest measured row and longest input; None if the model reads no text or has no limit.
        load: Python code that loads the checkpoint.
        command: the suggested next command.
        why: its purpose in a few words.
        merit: the benefit of the kernels over their windows alone; None without windows.
    """

    worst: WorstLayer | None
    lengths: Lengths | None
    load: str
    command: str
    why: str
    merit: KernelMerit | None = None

    def lines(self) -> list[str]:
        """Return the findings as sentences."""
        lines = [f"Control, after stage one: {self.merit.text}."] if self.merit else []
        if self.worst:
            name, index = self.worst.module, self.worst.index
            keep = "" if index is None else f"; --keep-softmax {index} keeps it softmax"
            name = name if index is None else f"{index} ({name})"
            figures = f"{self.worst.figure} {self.worst.value:.3f}, {self.worst.mean:.3f} on average"
            lines.append(f"Worst layer: {name}, {figures}{keep}.")
        if self.lengths:
            seen, promised = self.lengths.seen, self.lengths.promised
            lines.append(
                f"Lengths: measured up to the longest input that the model takes, {promised:,} tokens."
                if seen >= promised
                else f"Lengths: measured on rows of up to {seen:,} tokens; longer inputs, up to the {promised:,} that "
                "the model takes, were not measured."
            )
        return [*lines, f"Load it: {self.load}", f"Next, {self.why}: {self.command}"]


@dataclass(frozen=True)
class Planned(Event):
    """The model is loaded, and its conversion is planned."""

    plan: Plan


@dataclass(frozen=True)
class HeadsChosen(Event):
    """The heads that keep softmax are known; the rest of the plan is unchanged."""

    plan: Plan


@dataclass(frozen=True)
class DataOpened(Event):
    """The data is open; one line describes it."""

    description: str


@dataclass(frozen=True)
class StepDone(Event):
    """A step of a search, of stage one, of the alignment or of stage two is done."""

    report: StepReport | AlignStep | TuneStep | SearchStep


@dataclass(frozen=True)
class Searched(Event):
    """The search for a plan is over."""

    result: SearchResult


@dataclass(frozen=True)
class Distilled(Event):
    """Stage one is over."""

    result: DistillResult


@dataclass(frozen=True)
class Aligned(Event):
    """The alignment is over."""

    result: AlignResult


@dataclass(frozen=True)
class Logged(Event):
    """The trainer of stage two wrote an entry of its log."""

    entry: dict[str, float]


@dataclass(frozen=True)
class Saved(Event):
    """The result was written."""

    output: Path


@dataclass(frozen=True)
class Concluded(Event):
    """The job is over; its findings name the next command."""

    findings: Findings
