"""What work that takes long says while it runs: its callback gets one object per event, one class for each kind.

Those that anything can send are here; `linearize.jobs.events` adds those of jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class Event:
    """Base of all events."""


@dataclass(frozen=True)
class Started(Event):
    """Something slow begins; says in a few words what."""

    what: str


@dataclass(frozen=True)
class Noted(Event):
    """A line that the reader should see."""

    text: str


Callback = Callable[[Event], None]
"""Called with every event."""


def ignore(event: Event) -> None:
    """Do nothing: the callback of a caller who wants none."""
