"""Figures as text."""

from __future__ import annotations


def with_interval(figure: float, interval: tuple[float, float] | None) -> str:
    """Return a figure and its interval, such as "0.120 (0.100 to 0.140)"; the figure alone if there is no interval."""
    return f"{figure:.3f}" if interval is None else f"{figure:.3f} ({span(interval)})"


def span(interval: tuple[float, float], form: str = ".3f") -> str:
    """Return the ends of an interval, such as "0.100 to 0.140"; `form` is the format of both."""
    return f"{interval[0]:{form}} to {interval[1]:{form}}"
