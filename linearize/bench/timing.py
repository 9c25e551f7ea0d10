"""Time calls in turns, A B A B ... or AA BB AA ..., so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from linearize.loading import wait

Call = Callable[[], object]

AIM, LEAST, MOST = 10.0, 3, 200
"""Unless told how often: so many seconds for all turns together, but at least and at most so many turns."""


@dataclass(frozen=True)
class Timing:
    """How long one call takes.

    Attributes:
        seconds: median over the turns; of a turn of several calls, their mean.
        spread: distance of the quartiles over the median.
        repeats: turns.
        first: median of the first calls of the turns, which find in the caches what the other variant left there.
    """

    seconds: float
    spread: float
    repeats: int
    first: float

    @classmethod
    def of(cls, times: Sequence[float], calls: int = 1) -> Timing:
        """Summarise seconds per call, `calls` calls a turn, one turn or more."""
        turns = [statistics.fmean(times[i : i + calls]) for i in range(0, len(times), calls)]
        return cls(statistics.median(turns), spread(turns), len(turns), statistics.median(times[::calls]))


def spread(times: Sequence[float]) -> float:
    """Return the distance of the quartiles over the median; 0 for fewer than two numbers."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def seconds_of(call: Call) -> float:
    """Time one call; work that an accelerator still has to do is waited for, before and after."""
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def in_turns(
    variants: Mapping[str, Call], repeats: int | None, *, warm_up: float | None = None, calls: int = 1
) -> dict[str, list[float]]:
    """Time functions in turn; seconds of every call.

    Args:
        variants: what to time, by name.
        repeats: turns; None: as many as take some ten seconds, 3 to 200.
        warm_up: seconds that one call of each took, where it has been made already; None: it is made first.
        calls: of one function in a row, before it is the next one's turn.
    """
    if warm_up is None:
        warm_up = sum(seconds_of(call) for call in variants.values())
    if repeats is None:
        repeats = max(LEAST, min(MOST, int(AIM / max(calls * warm_up, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, call in variants.items():
            times[name] += [seconds_of(call) for _ in range(calls)]
    return times
