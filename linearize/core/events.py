"""Events of long-running work: the callback gets one object per event, and each kind of event is a class.

`linearize.jobs.events` adds the events of jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class Event:
    """Base of all events."""


@dataclass(frozen=True)
class Started(Event):
    """Something slow has begun; the field describes it in a few words."""

    what: str


@dataclass(frozen=True)
class Advanced(Event):
    """A part of the slow work that has begun is done: `done` of `total` equal parts."""

    done: int
    total: int


@dataclass(frozen=True)
class Noted(Event):
    """A line that the reader should see."""

    text: str


Callback = Callable[[Event], None]
"""Called with every event."""


def ignore(event: Event) -> None:
    """Do nothing; the default callback."""
