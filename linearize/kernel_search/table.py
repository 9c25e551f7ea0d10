"""The figures of all candidates in all layers, and successive halving: the better half of each layer goes on learning.

Successive halving: Jamieson and Talwalkar 2016, https://arxiv.org/abs/1502.07943.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from linearize.kernel_search.choose import Option
from linearize.modeling.plan import SOFTMAX


@dataclass
class Entry:
    """One candidate in one layer.

    Attributes:
        share: of the layer's time under softmax that it takes.
        error: norm of the difference of the layer's output to softmax's over the norm of softmax's, on held-out data;
            None where it was not measured yet.
        steps: optimizer steps that it had.
        left: whether it still learns.
        diverged: whether its loss or gradient became NaN or infinite.
    """

    share: float
    error: float | None = None
    steps: int = 0
    left: bool = True
    diverged: bool = False


@dataclass
class Table:
    """All entries.

    Attributes:
        rows: entries by layer number and label.
        times: each layer's share of the time of all layers under softmax.
        reference: the label that always stays, as plans are compared with it.
        allowed: labels that may be chosen; the reference may not be among them.
    """

    rows: dict[int, dict[str, Entry]]
    times: Mapping[int, float]
    reference: str
    allowed: Sequence[str]
    weights: dict[int, float] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """How many entries still learn."""
        return sum(entry.left for row in self.rows.values() for entry in row.values())

    @property
    def measured(self) -> bool:
        """Whether every entry has an error."""
        return all(entry.error is not None for row in self.rows.values() for entry in row.values())

    def rounds(self) -> int:
        """How many rungs there are: each halves what may be chosen, until two are left."""
        return rungs_of(len(self.allowed))

    def halve(self, fair: float, rung: int) -> None:
        """Keep the best of each layer (`survivors`), the reference, and the best one that a limit of cost can pay.

        Args:
            fair: the limit of the cost, as a share of softmax's time, if all layers had the same.
            rung: the rung to come, from 0.
        """
        count = survivors(len(self.allowed), rung)
        for row in self.rows.values():
            alive = [label for label, entry in row.items() if entry.left and label in self.allowed]
            ranked = sorted(alive, key=lambda label: (_error(row[label]), row[label].share, label))
            kept = {self.reference, *ranked[:count]}
            payable = [label for label in ranked if row[label].share <= fair * (1 + 1e-9)]
            kept |= set(payable[:1]) or {min(ranked, key=lambda label: row[label].share)}
            for label, entry in row.items():
                entry.left = entry.left and label in kept

    def options(self, *, softmax: bool) -> list[list[Option]]:
        """Return what every layer can become: costs as shares of all layers' time, squared errors by their weight.

        Args:
            softmax: whether a layer may stay softmax.
        """
        found = []
        for number, row in self.rows.items():
            time, weight = self.times[number], self.weights.get(number, 1.0)
            options = [
                Option(label, time * entry.share, weight * _error(entry) ** 2)
                for label, entry in row.items()
                if label in self.allowed and not entry.diverged
            ]
            found.append([*options, Option(SOFTMAX, time, 0.0, True)] if softmax else options)
        return found

    def cost(self, choice: Sequence[str]) -> float:
        """Return the share of all layers' time under softmax that a choice takes."""
        pairs = zip(self.rows.items(), choice, strict=True)
        return sum(self.times[n] * (1.0 if label == SOFTMAX else row[label].share) for (n, row), label in pairs)

    def error(self, choice: Sequence[str]) -> float:
        """Return the sum of the weighted squared errors of a choice."""
        pairs = zip(self.rows.items(), choice, strict=True)
        return sum(0.0 if x == SOFTMAX else self.weights.get(n, 1.0) * _error(row[x]) ** 2 for (n, row), x in pairs)

    def best_of(self, number: int) -> str:
        """Return the label of the least error in a layer."""
        row = self.rows[number]
        return min((x for x in row if x in self.allowed), key=lambda x: (_error(row[x]), row[x].share, x))

    def everywhere(self) -> list[str]:
        """Return what is worth a look in every layer: the reference, and whatever learned to the end in all of them."""
        rows = self.rows.values()
        full = [x for x in self.allowed if all(row[x].left and not row[x].diverged for row in rows)]
        return list(dict.fromkeys([self.reference, *full]))

    def to_dict(self) -> dict[str, object]:
        """Return plain data; numbers of layers become text, as JSON has them."""
        return {str(n): {label: asdict(entry) for label, entry in row.items()} for n, row in self.rows.items()}

    def load(self, data: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """Read what `to_dict` gave."""
        self.rows = {int(n): {label: Entry(**values) for label, values in row.items()} for n, row in data.items()}


def rungs_of(candidates: int) -> int:
    """Return how many rungs halve so many candidates until two are left."""
    return max(1, math.ceil(math.log2(max(1, candidates))))


def survivors(candidates: int, rung: int) -> int:
    """Return how many of a layer's candidates learn in a rung (from 0) by their rank: half as many as in the last."""
    return min(candidates, max(2, math.ceil(candidates / 2**rung)))


def rung_steps(steps: int, rungs: int) -> list[int]:
    """Share steps out over rungs: twice as many as in the one before, so that all rungs cost about the same."""
    whole = 2**rungs - 1
    ends = [round(steps * (2 ** (n + 1) - 1) / whole) for n in range(rungs)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _error(entry: Entry) -> float:
    return math.inf if entry.error is None or entry.diverged else entry.error
