"""Style of all pictures: colours distinguishable for the colour-blind and in greyscale; no global state."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

SOFTMAX, LINEAR, THIRD = "#1b3a5c", "#e08214", "#8a8a8a"
"""Dark blue and orange differ in brightness and hue; lines also differ in their dashes."""
WEIGHTS = "Blues"
"""Colours of weights, from light (no weight) to dark."""
FIGURES = "cividis"
NEGATIVE = "#d7301f"
LEAST_WEIGHT = 1e-3
"""Lower end of the logarithmic scale of weights, which ends at 1; the same for all attention maps."""
WEIGHT_SCALE = "weight, logarithmic"
DISTANCE_SCALE = "0: equal to softmax"
"""Labels of the colour scales, written next to their bars."""
MAX_PIXELS = 2200
"""Longest side of a saved picture, so that the page for a model with many layers can still be opened."""
LETTERS = 11
"""Characters of a title that fit into an inch."""
LONGEST_NAME = 24
"""Longest name of a layer on an axis, in characters."""


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of a given size in inches, without pyplot: it needs no display and leaves no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def axes_grid(figure: Figure, count: int, columns: int) -> list[Axes]:
    """Lay out `count` axes in rows of `columns`; the other cells stay empty."""
    rows = -(-count // columns)
    cells = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for empty in cells[count:]:
        empty.set_axis_off()
    return cells[:count]


def tidy(axes: Axes, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Label axes and remove the box; a title that is wider than the panel is wrapped."""
    spec, figure = axes.get_subplotspec(), axes.get_figure(root=True)
    assert figure is not None
    width = figure.get_figwidth() / (1 if spec is None else spec.get_gridspec().ncols)
    axes.set_title(textwrap.fill(title, max(8, int(LETTERS * width))), fontsize=9, loc="left")
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def shade(weights: Tensor) -> np.ndarray:
    """Return the positions of weights [T, S] on the scale of all maps, 0 to 1; -1 for weights below -`LEAST_WEIGHT`."""
    import numpy as np

    values = weights.numpy()
    decades = -np.log10(LEAST_WEIGHT)
    # Rounding must not make a weight of 0 negative.
    places = np.clip(1 + np.log10(np.clip(values, LEAST_WEIGHT, 1.0)) / decades, 0.0, 1.0)
    return np.where(values < -LEAST_WEIGHT, -1.0, places)


def weight_bar(figure: Figure, axes: Sequence[Axes]) -> None:
    """Draw the scale of weights next to maps made with `shade`."""
    bar = figure.colorbar(axes[-1].images[-1], ax=list(axes), pad=0.01, fraction=0.025, aspect=30)
    bar.set_ticks([0, 1 / 3, 2 / 3, 1], labels=["≤0.001", "0.01", "0.1", "1"])
    bar.ax.tick_params(labelsize=7)
    bar.set_label(WEIGHT_SCALE, fontsize=7)


def to_png(figure: Figure, dpi: int = 110) -> tuple[bytes, int, int]:
    """Draw a figure.

    Returns:
        The PNG, and its width and height in pixels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # Figures remember the canvas last attached to them.
    canvas = FigureCanvasAgg(figure)
    dpi = max(30, min(dpi, int(MAX_PIXELS / max(figure.get_size_inches()))))
    figure.set_dpi(dpi)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A token may be in a script that matplotlib's font does not cover; it is shown as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="png", dpi=dpi)
    width, height = canvas.get_width_height()
    return buffer.getvalue(), int(width), int(height)


def headline(figure: Figure, text: str) -> None:
    """Put a title above a whole figure, wrapped at its width."""
    figure.suptitle(textwrap.fill(text, max(8, int(LETTERS * figure.get_figwidth() * 0.9))), fontsize=10)


def layer_names(modules: list[str]) -> list[str]:
    """Return short, distinct names of modules: "layer 3", or the parts of their names that differ."""
    numbers = [[part for part in module.split(".") if part.isdigit()] for module in modules]
    names = [f"layer {'.'.join(number)}" for number in numbers]
    if not all(numbers) or len(set(names)) < len(names):
        parts = [module.split(".") for module in modules]
        shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set(parts[0][:-1])
        names = [".".join(part for part in name if part.isdigit() or part not in shared) for name in parts]
    cut = [name if len(name) <= LONGEST_NAME else f"{name[:8]}…{name[9 - LONGEST_NAME :]}" for name in names]
    return cut if len(set(cut)) == len(cut) else [f"attention {number}" for number in range(len(modules))]


def safe_label(text: str) -> str:
    """Make a token usable as a label: short, on one line, and not a formula for matplotlib."""
    shown = "".join(sign if sign.isprintable() else "?" for sign in text.strip()) or "_"
    return (shown if len(shown) <= 14 else f"{shown[:13]}…").replace("$", r"\$")
