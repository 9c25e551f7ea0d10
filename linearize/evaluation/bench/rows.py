"""Measurements as data and as a plot: one row per length, with one variant per way to compute the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from linearize.core.parsing import write_file
from linearize.core.registry import Values
from linearize.evaluation.bench.meter import Timing
from linearize.fidelity.plots_style import LINEAR, SOFTMAX, THIRD, new_figure, tidy, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = ((LINEAR, "s", "--"), ("#56b4e9", "^", "-."), ("#009e73", "D", ":"), ("#cc79a7", "v", (0, (5, 1))))
"""Colour, marker and line style of each kernel; they repeat after four."""


@dataclass(frozen=True)
class Variant:
    """The measurement of one way to compute the result, such as softmax.

    Attributes:
        timing: its times; None if it did not run.
        bytes: peak memory above the level before the call; None if it was not measured.
        problem: why it did not run, such as "out of memory".
    """

    timing: Timing | None = None
    bytes: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Row:
    """The measurements at one length.

    Attributes:
        suite: kind of measurement.
        what: readable description with kernel, direction and dtype.
        tokens: length of the input, or of the context if one token is decoded.
        pair: names of the two variants that are compared: the reference, and ours.
        variants: all measured variants, by name.
        figures: figures derived from them, by name.
    """

    suite: str
    what: str
    tokens: int
    pair: tuple[str, str]
    variants: Mapping[str, Variant]
    figures: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def speedup(self) -> float | None:
        """The reference's time divided by ours; None if either did not run."""
        return self.times(self.pair[0])

    def times(self, variant: str, over: str | None = None) -> float | None:
        """Return a variant's time divided by another's (by default ours)."""
        return ratio(self.seconds(variant), self.seconds(over or self.pair[1]))

    def timing(self, variant: str, figure: str) -> Any:
        """Return a figure of a variant's times (a field of `Timing`), or None."""
        return getattr(self.variants.get(variant, Variant()).timing, figure, None)

    def seconds(self, variant: str) -> float | None:
        """Return a variant's median time, or None."""
        return self.timing(variant, "seconds")

    def memory(self, variant: str) -> int | None:
        """Return a variant's peak memory in bytes, or None."""
        return self.variants.get(variant, Variant()).bytes

    def first_speedup(self) -> float | None:
        """Return the speed-up of each turn's first call (median times); None if either variant did not run."""
        return ratio(*(self.timing(name, "first") for name in self.pair))

    def side_by_side(self) -> Values:
        """Return time and memory of the two variants that are compared, as flat plain data."""
        return {
            "tokens": self.tokens,
            **{f"{name}_seconds": self.seconds(name) for name in self.pair},
            **{f"{name}_bytes": self.memory(name) for name in self.pair},
            "repeats": self.timing(self.pair[1], "repeats"),
            **{f"{name}_spread": self.timing(name, "spread") for name in self.pair},
            "speedup": self.speedup,
        }

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        reference, ours = self.pair
        times = {"seconds": "seconds", "spread": "spread", "repeats": "repeats", "first_seconds": "first"}
        sides = {
            name: {key: self.timing(name, figure) for key, figure in times.items()}
            | {"bytes": variant.bytes, "problem": variant.problem}
            for name, variant in self.variants.items()
        }
        return {
            "suite": self.suite,
            "what": self.what,
            "tokens": self.tokens,
            "reference": reference,
            "ours": ours,
            "speedup": self.speedup,
            "memory_ratio": ratio(self.memory(reference), self.memory(ours)),
            "sides": sides,
            "figures": dict(self.figures),
        }


def mebibytes(count: int | None, digits: int = 0) -> str:
    """Return memory in MiB as text, with some decimals; "-" if it was not measured."""
    return "-" if count is None else f"{count / 2**20:,.{digits}f}"


def ratio(one: float | None, other: float | None) -> float | None:
    """Divide; None if either is missing or the divisor is zero."""
    return None if one is None or not other else one / other


def faster_from(rows: Sequence[Row]) -> int | None:
    """Return the smallest measured length from which ours is always faster; None if there is no such length.

    Args:
        rows: rows of the same kind of measurement.
    """
    speedups = {row.tokens: row.speedup for row in rows if row.speedup is not None}
    slower = max((tokens for tokens, speedup in speedups.items() if speedup < 1), default=0)
    return min((tokens for tokens in speedups if tokens > slower), default=None)


def write_plot(rows: Sequence[Row], path: str) -> None:
    """Plot the rows and write a PNG file."""
    write_file(path, "--plot", to_png(time_and_memory(rows))[0])


def time_and_memory(rows: Sequence[Row]) -> Figure:
    """Plot seconds and peak memory against length: the reference once, and one line per kernel.

    Args:
        rows: rows of one suite; a variant that did not run has no point.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = new_figure(8.0, 3.4)
    panels = figure.subplots(1, 2)
    kinds: tuple[tuple[str, Callable[[Row, str], float | None]], ...] = (
        ("seconds", Row.seconds),
        ("peak memory, MiB", lambda row, variant: ratio(row.memory(variant), 2**20)),
    )
    for axes, (label, value) in zip(panels, kinds, strict=True):
        _panel(axes, rows, value)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        # Plain numbers, with ticks at 1, 2 and 5 if they span only a few decades.
        drawn = [float(y) for line in axes.get_lines() for y in np.asarray(line.get_ydata())]
        narrow = bool(drawn) and max(drawn) < 300 * min(drawn)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        lengths = sorted({row.tokens for row in rows})
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
        tidy(axes, label, "tokens")
        if axes.has_data():
            axes.legend(fontsize=7, frameon=False)
        else:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", fontsize=8)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], value: Callable[[Row, str], float | None]) -> None:
    kinds = list(dict.fromkeys(row.what for row in rows))
    names = short_names(kinds)
    drawn: set[str] = set()
    for number, kind in enumerate(kinds):
        mine = sorted((row for row in rows if row.what == kind), key=lambda row: row.tokens)
        reference, ours = mine[0].pair
        for variant in mine[0].variants:
            points = [(row.tokens, value(row, variant)) for row in mine]
            points = [(tokens, y) for tokens, y in points if y]
            if not points or variant in drawn:
                continue
            if variant == ours:
                colour, marker, dashes = OURS[number % len(OURS)]
                name = names[number] or ours
            else:
                # The other variants are the same for every kernel.
                drawn.add(variant)
                colour, marker, dashes = (SOFTMAX, "o", "-") if variant == reference else (THIRD, ".", "-")
                name = variant
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=dashes, label=name)


def short_names(kinds: Sequence[str]) -> list[str]:
    """Remove from each name the parts (between commas) that all names share; a single name becomes empty."""
    parts = [kind.split(", ") for kind in kinds]
    shared = set(parts[0]).intersection(*parts[1:]) if parts else set()
    return [", ".join(part for part in mine if part not in shared) for mine in parts]
