"""Figures: refused unless they are finite, and written as text."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from linearize.core.errors import DataError


def with_interval(figure: float, interval: tuple[float, float] | None) -> str:
    """Return a figure and its interval, such as "0.120 (0.100 to 0.140)"; the figure alone if there is no interval."""
    return f"{figure:.3f}" if interval is None else f"{figure:.3f} ({span(interval)})"


def span(interval: tuple[float, float], form: str = ".3f") -> str:
    """Return the ends of an interval, such as "0.100 to 0.140"; `form` is the format of both."""
    return f"{interval[0]:{form}} to {interval[1]:{form}}"


def check_finite(what: str, values: ArrayLike, entries: str = "rows") -> None:
    """Refuse figures [N, ...] of N entries that are not all finite: comparisons with NaN are false, so it would rank.

    Raises:
        DataError: with how many entries have NaN or infinity, and the first of them.
    """
    values = np.asarray(values)
    # Integers are finite, and checking them would take as long as a metric.
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    broken = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
    first = ", ".join(map(str, broken[:5])) + (" ..." if len(broken) > 5 else "")
    raise DataError(
        f"{what}: got NaN or infinity in {len(broken):,} of {len(values):,} {entries} (number {first}, from 0), "
        "expected finite numbers; check the weights of the model, and its dtype if it is fp16"
    )
