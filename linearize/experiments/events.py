"""Events of a recipe's run, beside those of the jobs in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from linearize.events import Event

if TYPE_CHECKING:
    from linearize.experiments.results import ResultRow


@dataclass(frozen=True)
class CellStarted(Event):
    """A cell of the table begins.

    Attributes:
        number: which, from 1.
        count: of how many.
        key: what it is called.
    """

    number: int
    count: int
    key: str


@dataclass(frozen=True)
class CellDone(Event):
    """A cell is finished; its line of the results."""

    row: ResultRow
