"""Differences between two models measured on the same rows, each with a paired 95 % interval.

A task's score has a bootstrap interval over rows (`stage_two.intervals`). A mean over a few inputs has the
interval of Hartigan 1969 ("Using subsample values as typical values", theorem 1), whose ends are means over subsets of
the inputs: it excludes 0 exactly when Fisher's paired randomisation test rejects at 5 %.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from linearize.core.figures import check_finite, span

if TYPE_CHECKING:
    from linearize.training.stage_two.intervals import Score
    from linearize.training.stage_two.tasks import Task

LEVEL = 0.05
"""A difference that chance alone produces more often than this is noise."""
EXACT = 12
"""Up to this many inputs, all subsets are used; for more inputs, `DRAWN` subsets are drawn."""
DRAWN = 4096
FEWEST = 6
"""With fewer inputs no difference can be distinguished from noise: 2 of 2^5 sign patterns are more than 5 %."""


@dataclass(frozen=True)
class SideDifference:
    """The difference between two sides on the same rows, as plain data.

    Attributes:
        side: name of the first side.
        minus: name of the side it is compared with.
        by: the figure that is compared.
        value: figure of `side` minus figure of `minus`.
        interval: 95 % paired interval of `value`.
        within_noise: whether the interval contains 0.
        sentence: the difference as a readable sentence.
    """

    side: str
    minus: str
    by: str
    value: float
    interval: tuple[float, float]
    within_noise: bool
    sentence: str = ""


def score_difference(
    task: Task, by: str, side: str, minus: str, ours: Score | None, theirs: Score | None
) -> SideDifference | None:
    """Return the difference of two models' task scores; None if it is undefined, if their rows differ, or for one row.

    Args:
        task: the task.
        by: name of the score.
        side: name of the first model.
        minus: name of the model it is compared with.
        ours: score of `side`.
        theirs: score of `minus`.
    """
    from linearize.training.stage_two.intervals import BALANCED, percentiles

    if ours is None or theirs is None or ours.units == 1 or (ours.units, ours.scored) != (theirs.units, theirs.scored):
        return None
    value = ours.score - theirs.score
    if math.isnan(value):
        return None
    # Both were resampled over the same units.
    low, high = percentiles(ours.resampled - theirs.resampled)
    noise = low <= 0 <= high
    scale, digits = (100, 2) if task.percent else (1, 3)
    better = "better" if (value < 0) == task.lower_is_better else "worse"
    size = f"{scale * abs(value):.{digits}f}{' points' if task.percent else ''}"
    text = f"{side} is {f'{size} {better} than' if value else 'level with'} {minus}"
    text += f" by {by}" if by == BALANCED else ""
    interval = span((scale * low, scale * high), f"+.{digits}f")
    text += f" (95 % interval of the difference: {interval}){': within the noise.' if noise else '.'}"
    return SideDifference(side, minus, by, value, (low, high), noise, text[0].upper() + text[1:])


def mean_difference(
    by: str, side: str, ours: Sequence[float], minus: str, theirs: Sequence[float]
) -> SideDifference | None:
    """Return the mean difference of two models' figures on the same inputs; None for fewer than `FEWEST` inputs.

    Args:
        by: name of the figure.
        side: name of the first model.
        ours: figure of `side` on each input.
        minus: name of the model it is compared with.
        theirs: figure of `minus` on each input.
    """
    if len(ours) < FEWEST:
        return None
    values = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    if len(values) <= EXACT:
        subsets = np.array(list(itertools.product((0.0, 1.0), repeat=len(values)))[1:])
    else:
        subsets = np.random.default_rng(0).integers(2, size=(DRAWN, len(values))).astype(np.float64)
    means = np.sort(subsets @ values / np.maximum(1, subsets.sum(axis=1)))
    # Sums of the same numbers in a different order are equal up to rounding.
    means[np.abs(means) <= 1e-9 * np.abs(values).max()] = 0.0
    rank = int(LEVEL / 2 * (len(means) + 1))
    low, high = float(means[rank - 1]), float(means[-rank])
    return SideDifference(side, minus, by, float(values.mean()), (low, high), low <= 0 <= high)


def best_by(
    by: str, per_input: Mapping[str, Sequence[float]], *, larger_is_better: bool = False
) -> tuple[str, list[SideDifference]]:
    """Return a sentence that names the best model by a figure, and the models within noise of it.

    Args:
        by: name of the figure.
        per_input: the figure on each input, by model; the same inputs for all.
        larger_is_better: whether larger figures are better, as for cosines.

    Returns:
        The sentence, and the differences between the best model and every other.

    Raises:
        DataError: if a figure is NaN or infinite.
    """
    for name, values in per_input.items():
        check_finite(f"{by}, {name}", values, "inputs")
    means = {name: float(np.mean(values)) for name, values in per_input.items()}
    best = (max if larger_is_better else min)(means, key=lambda name: means[name])
    others = [name for name in per_input if name != best]
    pairs = [mean_difference(by, best, per_input[best], name, per_input[name]) for name in others]
    differences = [difference for difference in pairs if difference is not None]
    if len(differences) < len(others):
        count = len(per_input[best])
        few = f"{by}: {count} inputs are too few to tell a difference from noise; use --inputs {FEWEST} or more"
        return few, []
    return _verdict(by, best, {each.minus: each.within_noise for each in differences}), differences


def fastest(timings: Mapping[str, tuple[float, float]]) -> str:
    """Return a sentence that names the fastest model; timings with overlapping quartiles count as equal.

    Args:
        timings: median seconds, and the interquartile range divided by it, by model.
    """
    best = min(timings, key=lambda name: timings[name][0])
    most = timings[best][0] * (1 + timings[best][1] / 2)
    others = {name: time * (1 - spread / 2) <= most for name, (time, spread) in timings.items() if name != best}
    return _verdict("seconds", best, others)


def _verdict(by: str, best: str, noise: Mapping[str, bool]) -> str:
    worse = ", ".join(name for name, within in noise.items() if not within)
    equal = ", ".join(name for name, within in noise.items() if within)
    parts = [f"better than {worse}"] if worse else []
    parts += [f"within noise of {equal}"] if equal else []
    return f"{by}: {best} is {' and '.join(parts)}"
