"""How all pictures look: colours that the colour-blind tell apart and that stay apart in grey; no global state."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from torch import Tensor

SOFTMAX, LINEAR, THIRD = "#1b3a5c", "#e08214", "#8a8a8a"
"""Dark blue and orange differ in brightness as well as in hue; lines differ in their dashes too."""
WEIGHTS = "Blues"
"""Light to dark: none to much."""
FIGURES = "cividis"
NEGATIVE = "#d7301f"
LEAST_WEIGHT = 1e-3
"""Lower end of the scale of weights, which is logarithmic and ends at 1: the same for all maps of attention."""
WEIGHT_SCALE = "weight: 0.001 or less to 1, logarithmic"
DISTANCE_SCALE = "0: equal to softmax, 1: 1 or more"
"""Names of the scales, written beside the maps."""
MAX_PIXELS = 2200
"""Longest side of a saved picture, so that a model of many layers gives a page that still opens."""


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of a size in inches, without pyplot: no display is needed and nothing is kept."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def axes_grid(figure: Figure, count: int, columns: int, heights: Sequence[float] | None = None) -> list[Axes]:
    """Lay out `count` axes in rows of `columns` (of these relative heights); what is left over stays empty."""
    rows = -(-count // columns)
    cells = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel().tolist()
    for empty in cells[count:]:
        empty.set_axis_off()
    return cells[:count]


def tidy(axes: Axes, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Label axes and take the box off."""
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def shade(weights: Tensor) -> np.ndarray:
    """Place weights on the scale of all maps of attention: 0 to 1, and -1 where a weight is negative by as much."""
    import numpy as np

    values = weights.numpy()
    decades = -np.log10(LEAST_WEIGHT)
    # Rounding must not take what is nothing for negative.
    places = np.clip(1 + np.log10(np.clip(values, LEAST_WEIGHT, 1.0)) / decades, 0.0, 1.0)
    return np.where(values < -LEAST_WEIGHT, -1.0, places)


def weight_bar(figure: Figure, image: AxesImage | None, axes: Sequence[Axes]) -> None:
    """Put the scale of weights beside maps that `shade` has made."""
    assert image is not None, "there is a map to draw the scale of"
    bar = figure.colorbar(image, ax=list(axes), pad=0.01, fraction=0.025, aspect=30)
    bar.set_ticks([0, 1 / 3, 2 / 3, 1], labels=["≤0.001", "0.01", "0.1", "1"])
    bar.ax.tick_params(labelsize=7)
    bar.set_label(WEIGHT_SCALE, fontsize=7)


def whole_numbers(axes: Axes, ticks: int = 9) -> None:
    """Put ticks at whole numbers only: there is no half step and no half layer."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))


def to_png(figure: Figure, dpi: int = 110) -> tuple[bytes, int, int]:
    """Draw a figure on the Agg canvas.

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
        # A token may be in a script that matplotlib's font does not have: it shows a box then.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="png", dpi=dpi)
    width, height = canvas.get_width_height()
    return buffer.getvalue(), int(width), int(height)


def short(module: str) -> str:
    """Shorten a module's dotted name to what tells layers apart: its numbers, else its end."""
    numbers = [part for part in module.split(".") if part.isdigit()]
    return f"layer {'.'.join(numbers)}" if numbers else module.rpartition(".")[2] or module


def layer_names(modules: list[str]) -> list[str]:
    """Shorten all; the full names where two would be the same (encoder and decoder)."""
    names = [short(module) for module in modules]
    return names if len(set(names)) == len(names) else modules


def safe_label(text: str) -> str:
    """Make a token fit to be a label: short, on one line, and no formula to matplotlib."""
    shown = "".join(sign if sign.isprintable() else "?" for sign in text.strip()) or "_"
    return (shown if len(shown) <= 14 else f"{shown[:13]}…").replace("$", r"\$")
