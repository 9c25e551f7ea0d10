"""Whether a held-out loss was still falling when a training ended, and how many steps more it would pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST = 4
"""Evaluations without which nothing is said."""
WORTH = 0.05
"""Of all that the loss fell by: less than this share for as many steps again is not worth them."""
MOST = 4
"""How many times the steps done are looked ahead at most; further is a guess."""
EXPONENTS = np.linspace(-1.0, 3.0, 81)
"""Of the curve's step: -1 is a straight line, 0 a logarithm."""


@dataclass(frozen=True)
class Trend:
    """Where a held-out loss stood at the end.

    Attributes:
        verdict: "falling", "flat", "rising" (since the kept step), "start" (nothing was better than what it began
            with), or "unknown" (too few evaluations).
        steps: steps done.
        more: how many steps more would pay, while falling; from then on as many steps as were done bring less than 5 %
            of all that the loss fell by. An estimate: a + b (t^-c - 1) / c, fitted to the evaluations.
        capped: whether more than `more` might pay, which is too far ahead to say.
        gain: by how much the loss would fall in these steps, as a share of all that it fell by.
        best_step: the step with the smallest loss.
    """

    verdict: str
    steps: int
    more: int = 0
    capped: bool = False
    gain: float = 0.0
    best_step: int = 0

    @property
    def text(self) -> str:
        """One sentence."""
        if self.verdict == "unknown":
            return f"too few evaluations in {self.steps} steps to say whether the held-out loss still falls"
        if self.verdict == "rising":
            return f"the held-out loss has risen since step {self.best_step}, whose weights were kept"
        if self.verdict == "start":
            return f"none of {self.steps} steps measured better than what it began with, which was kept"
        if self.verdict == "flat":
            return "the held-out loss has stopped falling"
        if self.capped:
            return f"the held-out loss is still falling: at least {self.more:,} steps more would pay"
        return (
            f"the held-out loss is still falling: about {self.more:,} steps more would pay (estimated: a further "
            f"{self.gain:.0%} of all that it fell by)"
        )


def trend(points: Sequence[tuple[int, float]], steps: int) -> Trend:
    """Judge a held-out loss.

    Args:
        points: (step, loss), steps from 1 on, ascending; of one run with one loss.
        steps: steps done.
    """
    if len(points) < FEWEST:
        return Trend("unknown", steps)
    at = np.array([step for step, _ in points], dtype=np.float64)
    losses = np.array([loss for _, loss in points], dtype=np.float64)
    best = int(losses.argmin())
    kept = int(at[best])
    fell = losses[0] - losses[best]
    curve = fitted(at, losses)
    if losses[-1] - losses[best] > max(3 * scatter(losses), WORTH * fell):
        return Trend("rising", steps, best_step=kept)
    worth = max(WORTH * fell, 2 * curve.noise)
    if fell <= 0 or curve.gain(steps, 2 * steps) < worth:
        return Trend("flat", steps, best_step=kept)
    ahead = [steps + round(steps * quarter / 4) for quarter in range(1, 4 * MOST + 1)]
    end = next((to for to in ahead if curve.gain(to, to + steps) < worth), None)
    to = ahead[-1] if end is None else end
    return Trend("falling", steps, _rounded(to - steps), end is None, float(curve.gain(steps, to) / fell), kept)


@dataclass(frozen=True)
class Curve:
    """A curve whose fall from the step `start` on is `b` times `_shape`, and what it leaves of the points.

    Attributes:
        start: the first step.
        b: at least 0.
        c: the exponent.
        noise: root mean square of what is left.
    """

    start: float
    b: float
    c: float
    noise: float

    def gain(self, first: float, last: float) -> float:
        """Return by how much it falls from one step to another."""
        shapes = _shape(np.array([first, last]) / self.start, self.c)
        return float(self.b * (shapes[0] - shapes[1]))


def _shape(ratio: np.ndarray, c: float) -> np.ndarray:
    """Return (r^-c - 1) / c, which falls for every c; minus the logarithm for c = 0."""
    return -np.log(ratio) if abs(c) < 1e-9 else (ratio**-c - 1) / c


def fitted(at: np.ndarray, losses: np.ndarray) -> Curve:
    """Fit a + b (t^-c - 1) / c with b >= 0 by least squares, over a grid of exponents."""
    least, found = np.inf, Curve(float(at[0]), 0.0, 1.0, float(losses.std()))
    for c in EXPONENTS:
        x = _shape(at / at[0], float(c))
        spread = x - x.mean()
        b = max(0.0, float(spread @ losses / (spread @ spread)))
        left = losses - losses.mean() - b * spread
        error = float(left @ left)
        if error < least:
            least = error
            found = Curve(float(at[0]), b, float(c), (error / max(1, len(at) - 3)) ** 0.5)
    return found


def scatter(losses: np.ndarray) -> float:
    """Return how much single evaluations scatter around a smooth curve: from the second differences."""
    return float(np.sqrt(np.mean(np.diff(losses, 2) ** 2) / 6))


def _rounded(steps: int) -> int:
    """Round to two digits."""
    unit = 10 ** max(0, len(str(steps)) - 2)
    return max(1, round(steps / unit) * unit)
