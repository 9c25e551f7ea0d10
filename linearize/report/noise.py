"""Which differences between conversions are more than noise: paired over inputs, and over the turns of a timing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

LEVEL = 0.05
"""Of the test: a difference that chance alone makes more often than this is noise."""
EXACT = 12
"""Inputs up to which all signs are tried; more of them are drawn."""
DRAWN = 4096
FEWEST = 6
"""Inputs without which no difference can pass the test: 2 of 2^5 signs are more than 5 %."""


def p_value(differences: Sequence[float], seed: int = 0) -> float:
    """Return how often random signs give a mean difference as large (Fisher's paired randomisation test, two-sided).

    Args:
        differences: of the two conversions, one per input.
        seed: of the signs that are drawn.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) <= EXACT:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(values))))
    else:
        signs = np.random.default_rng(seed).choice((-1.0, 1.0), size=(DRAWN, len(values)))
    means = np.abs(signs @ values)
    # Within rounding, as the same numbers are added in other orders.
    return float(np.mean(means >= np.abs(values.sum()) * (1 - 1e-9)))


def verdict(figure: str, per_input: Mapping[str, Sequence[float]], *, larger_is_better: bool = False) -> str:
    """Say which conversion is the best by a figure, and of which others it cannot be told from noise.

    Args:
        figure: its name.
        per_input: the figure on each input, by conversion; the same inputs for all.
        larger_is_better: for cosines.
    """
    means = {name: float(np.mean(values)) for name, values in per_input.items()}
    best = (max if larger_is_better else min)(means, key=lambda name: means[name])
    count = len(per_input[best])
    if count < FEWEST:
        return f"{figure}: {count} inputs are too few to tell a difference from noise; --inputs {FEWEST} or more"
    noise: list[str] = []
    worse: list[str] = []
    for name, values in per_input.items():
        if name != best:
            apart = p_value(np.asarray(values) - np.asarray(per_input[best])) <= LEVEL
            (worse if apart else noise).append(name)
    return _said(figure, best, worse, noise)


def verdict_of_times(timings: Mapping[str, tuple[float, float]]) -> str:
    """Say which conversion is the fastest; timings whose quartiles overlap are the same.

    Args:
        timings: median seconds and the distance of the quartiles over it, by conversion.
    """
    best = min(timings, key=lambda name: timings[name][0])
    most = timings[best][0] * (1 + timings[best][1] / 2)
    others = [name for name in timings if name != best]
    worse = [name for name in others if timings[name][0] * (1 - timings[name][1] / 2) > most]
    return _said("seconds", best, worse, [name for name in others if name not in worse])


def _said(figure: str, best: str, worse: Sequence[str], noise: Sequence[str]) -> str:
    parts = [f"better than {', '.join(worse)}"] if worse else []
    parts += [f"within noise of {', '.join(noise)}"] if noise else []
    return f"{figure}: {best} is {' and '.join(parts)}"
