"""The best choice of one option per layer under a limit of cost and of softmax layers, where errors add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BINS = 2000
"""States are told apart by cost in so many steps of the limit, where there are more of them."""


class Option(NamedTuple):
    """What one layer can become.

    Attributes:
        label: of the candidate, or "softmax".
        cost: share of the time of all layers under softmax.
        error: what it adds to the error.
        softmax: whether the layer stays softmax.
    """

    label: str
    cost: float
    error: float
    softmax: bool = False


class _State(NamedTuple):
    cost: float
    error: float
    softmax: int
    labels: tuple[str, ...]


def choose(layers: Sequence[Sequence[Option]], limit: float, softmax: int = 0) -> tuple[str, ...] | None:
    """Choose one option per layer: least error, and of equal errors the cheapest.

    It is a knapsack with one choice per layer, solved layer by layer: of all partial choices those are kept that no
    other one beats in cost, error and number of softmax layers at once.

    Args:
        layers: the options of each layer.
        limit: of the sum of costs.
        softmax: most layers that may stay softmax.

    Returns:
        The labels; None where nothing meets the limits.
    """
    slack = limit * (1 + 1e-9)
    # What the layers behind must take at least.
    rest = [0.0] * (len(layers) + 1)
    for place in range(len(layers) - 1, -1, -1):
        cheapest = [one.cost for one in layers[place] if not one.softmax or softmax]
        if not cheapest:
            return None
        rest[place] = rest[place + 1] + min(cheapest)
    states = [_State(0.0, 0.0, 0, ())]
    for place, options in enumerate(layers):
        made = [
            _State(s.cost + o.cost, s.error + o.error, s.softmax + o.softmax, (*s.labels, o.label))
            for s in states
            for o in options
        ]
        made = [s for s in made if s.softmax <= softmax and s.cost + rest[place + 1] <= slack]
        states = _undominated(made, limit)
        if not states:
            return None
    return min(states, key=lambda s: (s.error, s.cost, s.labels)).labels


def cheapest(layers: Sequence[Sequence[Option]]) -> tuple[str, ...]:
    """Return the cheapest option of every layer, softmax left out."""
    return tuple(
        min((o for o in options if not o.softmax), key=lambda o: (o.cost, o.error)).label for options in layers
    )


def _undominated(states: list[_State], limit: float) -> list[_State]:
    """Drop what another state beats; of many states the best in each of `BINS` steps of cost."""
    kept: list[_State] = []
    # The least error so far, all of them cheaper, by number of softmax layers.
    least: dict[int, float] = {}
    for state in sorted(states, key=lambda s: (s.cost, s.error, s.softmax, s.labels)):
        if all(state.error < least.get(count, math.inf) for count in range(state.softmax + 1)):
            kept.append(state)
            least[state.softmax] = state.error
    if len(kept) <= BINS or limit <= 0:
        return kept
    best: dict[tuple[int, int], _State] = {}
    for state in kept:
        place = (int(BINS * state.cost / limit), state.softmax)
        if place not in best or state.error < best[place].error:
            best[place] = state
    return list(best.values())
