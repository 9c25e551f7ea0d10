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
    from linearize.kernel_search.result import SearchResult, SearchStep
    from linearize.modeling.plan import Plan
    from linearize.training.alignment.loop import AlignResult, AlignStep
    from linearize.training.stage_one.loop import DistillResult, StepReport
    from linearize.training.stage_two.progress import TuneStep


@dataclass(frozen=True)
class Planned(Event):
    """The model is loaded, and its conversion is planned."""

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
