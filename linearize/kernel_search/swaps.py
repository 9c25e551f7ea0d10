"""The final choice: layers weighed by what their error does to the output, then greedy swaps tried on the whole model.

Figures of single layers misrank: what a layer adds to the output's error depends on all that comes behind it. After
Distill-then-Replace (arXiv 2601.11667), which swaps layers greedily by what the whole model says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from linearize.kernel_search.choose import choose
from linearize.kernel_search.table import Table
from linearize.kernel_search.whole import Choice, WholeError, WholeModel
from linearize.modeling.plan import SOFTMAX

MOST = 100
"""Plans that are tried unless asked otherwise, of models with many layers."""
SWEEP = 5
"""Further limits of cost that the table of points shows the best choice for."""


def trials_of(trials: int | None, layers: int) -> int:
    """Return how many plans greedy swaps try at most: those asked for or L (L + 1) / 2 for L layers, at most `MOST`."""
    return min(MOST, layers * (layers + 1) // 2) if trials is None else trials


@dataclass
class Swap:
    """A change that made the whole model better.

    Attributes:
        numbers: the layers whose kernels changed.
        before: the error before.
        after: the error with it.
        was: what these layers had before.
    """

    numbers: tuple[int, ...]
    before: float
    after: float
    was: tuple[str, ...]


@dataclass
class Chosen:
    """The choice, and how it came about.

    Attributes:
        choice: one label per layer.
        error: of the whole model.
        swaps: what greedy swaps changed.
        tried: how many plans they tried.
    """

    choice: Choice
    error: WholeError | None = None
    swaps: list[Swap] = field(default_factory=list)
    tried: int = 0


class Chooser:
    """Chooses under a limit of cost and of softmax layers.

    Attributes:
        best: the best choice so far, or None.
    """

    def __init__(self, table: Table, whole: WholeModel, limit: float, softmax: int) -> None:
        self.table, self.whole, self.limit, self.softmax = table, whole, limit, softmax
        self.numbers = tuple(table.rows)
        self.best: Chosen | None = None

    def additive(self, limit: float | None = None) -> Choice | None:
        """Return the best choice if errors of layers added up."""
        limit = self.limit if limit is None else limit
        return choose(self.table.options(softmax=self.softmax > 0), limit, self.softmax)

    def weigh(self) -> None:
        """Weigh layers: the whole model's error with one of them replaced by its best candidate, over that's own."""
        everywhere = (SOFTMAX,) * len(self.numbers)
        alone = []
        for place, number in enumerate(self.numbers):
            labels = list(everywhere)
            labels[place] = self.table.best_of(number)
            alone.append(tuple(labels))
        scores = [error.score for error in self.whole.errors(alone)]
        for place, number in enumerate(self.numbers):
            entry = self.table.rows[number][alone[place][place]]
            own = (entry.error or 0.0) ** 2
            self.table.weights[number] = scores[place] / own if own > 0 else 0.0

    def run(self, trials: int | None, tried: Callable[[int], None], out_of_time: Callable[[], bool]) -> Chosen:
        """Choose.

        Args:
            trials: how many plans greedy swaps try at most; None: L (L + 1) / 2 for L layers, `MOST` at most.
            tried: called with the number of plans tried so far.
            out_of_time: whether to stop with what there is.
        """
        layers = len(self.numbers)
        most = trials_of(trials, layers)
        plain = self.additive()
        assert plain is not None
        self.best = Chosen(plain)
        if not out_of_time():
            self.weigh()
        weighed = self.additive()
        assert weighed is not None
        same = [(label,) * layers for label in self.table.everywhere() if label in self.table.allowed]
        starts = list(dict.fromkeys([weighed, plain, *(choice for choice in same if self._allowed(choice))]))
        found = self.whole.errors(starts)
        error, start = min(zip(found, starts, strict=True), key=lambda pair: pair[0].score)
        best = self.best = Chosen(start, error)
        open_layers = set(range(layers))
        while open_layers and best.tried < most and not out_of_time():
            moves = self._moves(best.choice, open_layers)[: most - best.tried]
            if not moves:
                break
            scored = list(zip(self.whole.errors([choice for _, choice in moves]), moves, strict=True))
            best.tried += len(moves)
            tried(best.tried)
            error, (place, choice) = min(scored, key=lambda one: one[0].score)
            assert best.error is not None
            if not error.score < best.error.score:
                break
            self._take(best, choice, error)
            open_layers.discard(place)
        return best

    def _take(self, best: Chosen, choice: Choice, error: WholeError) -> None:
        assert best.error is not None
        changed = [i for i, label in enumerate(choice) if label != best.choice[i]]
        best.swaps.append(
            Swap(
                tuple(self.numbers[i] for i in changed),
                best.error.error,
                error.error,
                tuple(best.choice[i] for i in changed),
            )
        )
        best.choice, best.error = choice, error

    def _moves(self, choice: Choice, open_layers: set[int]) -> list[tuple[int, Choice]]:
        """Return for each open layer the change not tried yet that promises most, the most promising first."""
        found: dict[Choice, int] = {}
        promises: list[tuple[float, int, Choice]] = []
        for place in sorted(open_layers):
            changes = (one for one in self._changes(choice, place) if one not in self.whole.known)
            options = [(self.table.error(one), one) for one in changes if self._allowed(one)]
            if options:
                error, one = min(options)
                promises.append((error, place, one))
        for _, place, one in sorted(promises):
            found.setdefault(one, place)
        return [(place, one) for one, place in found.items()]

    def _changes(self, choice: Choice, place: int) -> Iterator[Choice]:
        """Yield choices with another kernel in one layer, or with two layers' kernels exchanged."""
        row = self.table.rows[self.numbers[place]]
        labels = [x for x in self.table.allowed if x in row and not row[x].diverged]
        for label in [*labels, *([SOFTMAX] if self.softmax else [])]:
            if label != choice[place]:
                yield (*choice[:place], label, *choice[place + 1 :])
        for other, label in enumerate(choice):
            if label != choice[place]:
                made = list(choice)
                made[place], made[other] = label, choice[place]
                yield tuple(made)

    def _allowed(self, choice: Choice) -> bool:
        known = all(
            label == SOFTMAX or not self.table.rows[number][label].diverged
            for number, label in zip(self.numbers, choice, strict=True)
        )
        cheap = self.table.cost(choice) <= self.limit * (1 + 1e-9)
        return known and cheap and sum(label == SOFTMAX for label in choice) <= self.softmax

    def sweep(self) -> list[Choice]:
        """Return the best choices without softmax at limits of cost from the cheapest plan's to the dearest one's."""
        options = self.table.options(softmax=False)
        if not all(options):
            return []
        low = sum(min(one.cost for one in layer) for layer in options)
        high = sum(max(one.cost for one in layer) for layer in options)
        limits = [low + (high - low) * i / (SWEEP - 1) for i in range(SWEEP)]
        found = [choose(options, limit) for limit in limits]
        return list(dict.fromkeys(one for one in found if one is not None))
