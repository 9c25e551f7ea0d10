"""Measurements: one row per length with a variant per way to compute it, and from which length on one is faster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from linearize.evaluation.bench.meter import Timing


@dataclass(frozen=True)
class Variant:
    """One way to compute it.

    Attributes:
        timing: None if it did not run.
        bytes: peak memory above what was there before, or None if it was not measured.
        problem: why it did not run, such as "out of memory".
    """

    timing: Timing | None = None
    bytes: int | None = None
    problem: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        timing = self.timing
        return {
            "seconds": None if timing is None else timing.seconds,
            "spread": None if timing is None else timing.spread,
            "repeats": None if timing is None else timing.repeats,
            "first_seconds": None if timing is None else timing.first,
            "bytes": self.bytes,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Row:
    """One length.

    Attributes:
        suite: what kind of measurement.
        what: the same with kernel, direction and type, for people.
        tokens: length of the input; of the context, if one token is decoded.
        pair: names of the two variants that are compared: the reference, and ours.
        variants: all that were measured, by name.
        figures: what follows from them, by name.
    """

    suite: str
    what: str
    tokens: int
    pair: tuple[str, str]
    variants: Mapping[str, Variant]
    figures: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def speedup(self) -> float | None:
        """The reference's time over ours; None if one of them did not run."""
        return self.times(self.pair[0])

    def times(self, variant: str, over: str | None = None) -> float | None:
        """Return a variant's time over another's (ours, unless named)."""
        return ratio(self.seconds(variant), self.seconds(over or self.pair[1]))

    def seconds(self, variant: str) -> float | None:
        """Return a variant's median time, or None."""
        timing = self.variants[variant].timing if variant in self.variants else None
        return None if timing is None else timing.seconds

    def first(self, variant: str) -> float | None:
        """Return the median time of a turn's first call, or None."""
        timing = self.variants[variant].timing
        return None if timing is None else timing.first

    def memory(self, variant: str) -> int | None:
        """Return a variant's peak memory in bytes, or None."""
        return self.variants[variant].bytes if variant in self.variants else None

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        reference, ours = self.pair
        return {
            "suite": self.suite,
            "what": self.what,
            "tokens": self.tokens,
            "reference": reference,
            "ours": ours,
            "speedup": self.speedup,
            "memory_ratio": ratio(self.memory(reference), self.memory(ours)),
            "sides": {name: variant.to_dict() for name, variant in self.variants.items()},
            "figures": dict(self.figures),
        }


def mebibytes(count: int | None) -> str:
    """Write a peak of memory in MiB; "-" if it was not measured."""
    return "-" if count is None else f"{count / 2**20:.0f}"


def ratio(one: float | None, other: float | None) -> float | None:
    """Divide; None if either is missing or the divisor is zero."""
    return None if one is None or not other else one / other


@dataclass(frozen=True)
class Crossover:
    """The length from which on ours is faster.

    Attributes:
        what: of which measurement.
        reference: what it is faster than.
        tokens: the length, interpolated; None if it is outside the measured ones.
        text: for people: "about 1,234 tokens", "below 512", "above 16,384", "not measured".
    """

    what: str
    reference: str
    tokens: float | None
    text: str


def crossover(what: str, reference: str, speedups: Mapping[int, float | None]) -> Crossover:
    """Return the length at which the speedup passes 1 for the last time, interpolating its log over the log of length.

    Args:
        what: of which measurement.
        reference: what the speedups are over.
        speedups: by length; None if a variant did not run.
    """
    points = sorted((tokens, speedup) for tokens, speedup in speedups.items() if speedup is not None and speedup > 0)
    if not points:
        return Crossover(what, reference, None, "not measured")
    if points[-1][1] < 1:
        return Crossover(what, reference, None, f"above {points[-1][0]:,}")
    for (short, before), (long, after) in zip(reversed(points[:-1]), reversed(points[1:]), strict=True):
        if before < 1 <= after:
            share = -math.log(before) / (math.log(after) - math.log(before))
            tokens = short * (long / short) ** share
            return Crossover(what, reference, tokens, f"about {tokens:,.0f} tokens")
    return Crossover(what, reference, None, f"below {points[0][0]:,}")


def crossovers(rows: Sequence[Row]) -> list[Crossover]:
    """Return them for every kind of measurement that has rows of more than one length."""
    speedups: dict[tuple[str, str], dict[int, float | None]] = {}
    for row in rows:
        speedups.setdefault((row.what, row.pair[0]), {})[row.tokens] = row.speedup
    return [crossover(*names, by_length) for names, by_length in speedups.items() if len(by_length) > 1]
