"""The figures of all candidates in all layers, and the best choice under a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from linearize.core.errors import ConfigError
from linearize.kernel_search.candidates import Layout
from linearize.kernel_search.config import SearchConfig
from linearize.kernel_search.costs import Costs
from linearize.modeling.plan import SOFTMAX

Choice = tuple[str, ...]
"""One label per layer, or "softmax"."""
BINS = 2000
"""If there are more partial choices than this, costs are sorted into this many bins, and each bin keeps its best."""
TOLERANCE = 1 + 1e-9
"""Tolerance for rounding in sums of costs."""


@dataclass
class Entry:
    """One candidate in one layer.

    Attributes:
        share: its time, as a share of the layer's time under softmax.
        error: norm of the difference between the layer's output and softmax's, divided by the norm of softmax's, on
            held-out data; None until it is measured.
        diverged: whether its loss, gradient or error became NaN or infinite.
    """

    share: float
    error: float | None = None
    diverged: bool = False

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: the closest first, and among equally close ones the cheapest."""
        return (math.inf if self.error is None or self.diverged else self.error, self.share)


@dataclass
class Table:
    """The figures of all candidates in all layers.

    Attributes:
        rows: entries by layer number and label.
        times: each layer's share of the time of all layers under softmax.
        reference: the label that plans are compared with; it is always kept.
        allowed: labels that may be chosen, which need not include the reference.
        limit: maximum cost of a choice, as a share of the time of all layers under softmax.
        softmax: maximum number of layers that may stay softmax.
        weights: how much of a layer's squared error reaches the whole model's score, by number; 1 until measured.
    """

    rows: dict[int, dict[str, Entry]]
    times: Mapping[int, float]
    reference: str
    allowed: Sequence[str]
    limit: float = 1.0
    softmax: int = 0
    weights: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: Layout, costs: Costs, config: SearchConfig) -> Table:
        """Return a new table, with only costs measured, and the limits of a budget.

        Raises:
            ConfigError: if no plan meets the budget; the message names the nearest feasible budget.
        """
        times = {number: next(iter(row.values())).softmax_seconds for number, row in costs.items()}
        total = sum(times.values())
        rows = {number: {label: Entry(cost.share) for label, cost in row.items()} for number, row in costs.items()}
        shares = {number: seconds / total for number, seconds in times.items()}
        table = cls(rows, shares, layout.reference, layout.labels, softmax=config.softmax_layers)
        table.set_limit(config)
        return table

    def cost(self, choice: Sequence[str]) -> float:
        """Return the time of a choice, as a share of all layers' time under softmax."""
        pairs = zip(self.rows.items(), choice, strict=True)
        return sum(self.times[n] * (1.0 if label == SOFTMAX else row[label].share) for (n, row), label in pairs)

    def best_of(self, number: int) -> str:
        """Return the label with the smallest error in a layer."""
        row = self.rows[number]
        return min((label for label in row if label in self.allowed), key=lambda label: (row[label].rank, label))

    def everywhere(self) -> list[str]:
        """Return the labels that may be chosen and diverged in no layer; the reference comes first."""
        rows = self.rows.values()
        full = [x for x in self.allowed if all(x in row and not row[x].diverged for row in rows)]
        return sorted(full, key=lambda label: label != self.reference)

    def uniform(self) -> list[Choice]:
        """Return the choices with one of these labels in all layers that meet the cost limit."""
        choices = [(label,) * len(self.rows) for label in self.everywhere()]
        return [choice for choice in choices if self.cost(choice) <= self.limit * TOLERANCE]

    def options(self) -> list[list[Option]]:
        """Return the options of every layer: costs as shares of all layers' time, and weighted squared errors."""
        layers = []
        for number, row in self.rows.items():
            time, weight = self.times[number], self.weights.get(number, 1.0)
            options = [
                Option((label,), time * entry.share, weight * entry.rank[0] ** 2)
                for label, entry in row.items()
                if label in self.allowed and not entry.diverged
            ]
            layers.append([*options, Option((SOFTMAX,), time, 0.0, 1)] if self.softmax else options)
        return layers

    def best(self) -> Choice | None:
        """Return the best choice under the limits on cost and softmax layers, assuming that layers' errors add up."""
        return choose(self.options(), self.limit, self.softmax)

    def set_limit(self, config: SearchConfig) -> None:
        """Set the limit on the cost.

        If the budget has no cost, this is the cost of the reference in every layer, plus the additional cost of
        softmax in the most expensive layers, as many as may stay softmax.

        Raises:
            ConfigError: if no plan meets the budget; the message names the nearest feasible budget.
        """
        reference = {n: self.times[n] * row[self.reference].share for n, row in self.rows.items()}
        total = sum(reference.values())
        if config.cost is None:
            extra = sorted((max(0.0, self.times[n] - cost) for n, cost in reference.items()), reverse=True)
            self.limit, asked = total + sum(extra[: self.softmax]), f"the cost of {self.reference} in every layer"
        else:
            # Tables show three digits: the reference must meet the rounded cost that is shown for it.
            self.limit = max(config.cost, total) if f"{total:.3g}" == f"{config.cost:.3g}" else config.cost
            asked = f"cost={self.limit:.4g}"
        cheapest = [min(self.allowed, key=lambda label: row[label].share) for row in self.rows.values()]
        nearest = self.cost(cheapest)
        if nearest > self.limit * TOLERANCE:
            # Rounded up, so that the suggested budget can be met.
            raise ConfigError(
                f"budget: no plan meets {asked}: at {config.length:,} tokens the cheapest "
                f"({', '.join(dict.fromkeys(cheapest))}) takes {nearest:.4g} times softmax's time; the smallest "
                f"possible is --budget cost={nearest * 1.0005 + 5e-5:.4f}, or give a longer --length"
            )


class Option(NamedTuple):
    """A choice for one layer, or for the first layers.

    Attributes:
        labels: one label per layer, or "softmax".
        cost: its time, as a share of the time of all layers under softmax.
        error: its contribution to the total error.
        softmax: how many of the layers stay softmax.
    """

    labels: Choice
    cost: float
    error: float
    softmax: int = 0


def choose(layers: Sequence[Sequence[Option]], limit: float, softmax: int = 0) -> Choice | None:
    """Choose one option per layer with the smallest total error, and among equal errors the cheapest.

    This is a knapsack problem with one choice per layer, solved layer by layer: a partial choice is dropped if another
    is no worse in cost, error and number of softmax layers.

    Args:
        layers: the options of each layer.
        limit: maximum sum of costs.
        softmax: maximum number of layers that may stay softmax.

    Returns:
        The labels; None if no choice meets the limits.
    """
    cheapest = [min((o.cost for o in options if softmax or not o.softmax), default=math.inf) for options in layers]
    partial = [Option((), 0.0, 0.0)]
    for place, options in enumerate(layers):
        left = limit * TOLERANCE - sum(cheapest[place + 1 :])
        longer = [
            Option((*p.labels, *o.labels), p.cost + o.cost, p.error + o.error, p.softmax + o.softmax)
            for p in partial
            for o in options
        ]
        partial = _undominated([p for p in longer if p.softmax <= softmax and p.cost <= left], limit)
    return min(partial, key=lambda p: (p.error, p.cost, p.labels)).labels if partial else None


def _undominated(choices: list[Option], limit: float) -> list[Option]:
    kept: list[Option] = []
    # The smallest error so far by number of softmax layers; later choices cost as much or more.
    least: dict[int, float] = {}
    for choice in sorted(choices, key=lambda p: (p.cost, p.error, p.softmax, p.labels)):
        if all(choice.error < least.get(count, math.inf) for count in range(choice.softmax + 1)):
            kept.append(choice)
            least[choice.softmax] = choice.error
    if len(kept) <= BINS:
        return kept
    best: dict[tuple[int, int], Option] = {}
    for choice in kept:
        place = (int(BINS * choice.cost / limit), choice.softmax)
        if place not in best or choice.error < best[place].error:
            best[place] = choice
    return list(best.values())
