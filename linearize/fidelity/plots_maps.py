"""Attention maps as matplotlib figures, softmax next to linear: all heads, single heads, and laid over a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from linearize.core.errors import DataError
from linearize.fidelity import plots_style as style
from linearize.fidelity.maps import LayerMaps

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

GAP = 0.12
"""Gap between two maps of a mosaic, as a fraction of a map."""
HEADS_PER_ROW = 16


def attention_grid(maps: Sequence[LayerMaps]) -> Figure:
    """Show all layers and heads: for every layer a row of softmax maps, and below it a row of the kernel's maps.

    Queries run downwards, keys to the right. All maps share one logarithmic scale of weights. Negative weights are red.
    """
    from matplotlib.patches import Rectangle

    blocks = [
        (layer, name, range(start, min(start + HEADS_PER_ROW, len(layer.softmax))))
        for layer, name in zip(maps, style.layer_names([m.module for m in maps]), strict=True)
        for start in range(0, len(layer.softmax), HEADS_PER_ROW)
    ]
    columns = max(len(heads) for _, _, heads in blocks)
    cell = min(1.0, 10.0 / columns)
    figure = style.new_figure(2.1 + cell * columns * (1 + GAP), 0.3 + len(blocks) * (2 * cell * (1 + GAP) + 0.35))
    places = style.axes_grid(figure, len(blocks), 1)
    for axes, (layer, name, heads) in zip(places, blocks, strict=True):
        tokens = layer.softmax.shape[-1]
        step = tokens + max(1, round(GAP * tokens))
        canvas = np.full((step + tokens, (columns - 1) * step + tokens), np.nan)
        for place, head in enumerate(heads):
            for row, weights in enumerate((layer.softmax[head], layer.linear[head])):
                top, left = row * step, place * step
                canvas[top : top + tokens, left : left + tokens] = style.shade(weights)
                corner = (left - 0.5, top - 0.5)
                axes.add_patch(Rectangle(corner, tokens, tokens, fill=False, edgecolor="#999999", linewidth=0.4))
        axes.imshow(canvas, cmap=_colours(), vmin=0.0, vmax=1.0, interpolation="nearest")
        style.tidy(axes, f"{name} ({layer.kernel})")
        middles = [place * step + tokens / 2 for place in range(len(heads))]
        axes.set_xticks(middles, [f"head {head}" for head in heads], fontsize=6)
        axes.set_yticks([tokens / 2, step + tokens / 2], ["softmax", "linear"], fontsize=7)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    style.weight_bar(figure, places)
    return figure


def _colours() -> Colormap:
    from matplotlib import colormaps

    return colormaps[style.WEIGHTS].with_extremes(under=style.NEGATIVE, bad="white")


def head_map(layer: LayerMaps, head: int, tokens: Sequence[str], title: str = "") -> Figure:
    """Show one head large, softmax next to linear, with the tokens on the axes; a cross marks negative weights.

    Args:
        layer: the layer's maps.
        head: number of the head.
        tokens: T labels.
        title: title above both maps; by default layer and head.
    """
    side = min(7.0, max(3.0, 0.14 * len(tokens) + 1.0))
    figure = style.new_figure(2 * side + 0.8, side + 0.5)
    panels = figure.subplots(1, 2)
    sides = (("softmax", layer.softmax[head]), (layer.kernel, layer.linear[head]))
    for axes, (name, weights) in zip(panels, sides, strict=True):
        axes.imshow(style.shade(weights), cmap=_colours(), vmin=0.0, vmax=1.0, interpolation="nearest")
        rows, columns = np.nonzero((weights < -style.LEAST_WEIGHT).numpy())
        axes.scatter(columns, rows, marker="x", s=8, c="black", linewidths=0.6)
        style.tidy(axes, name, "key", "query" if name == "softmax" else "")
        size = 7 if len(tokens) <= 32 else 5.5
        labels = [style.safe_label(token) for token in tokens]
        axes.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=size)
        axes.set_yticks(range(len(tokens)), labels, fontsize=size)
    style.weight_bar(figure, panels)
    style.headline(figure, title or f"{layer.module}, head {head}")
    return figure


def patch_grid(tokens: int, height: int, width: int) -> tuple[int, int, int]:
    """Return how T tokens cover a picture with square patches.

    Returns:
        The number of tokens before the patches (such as a class token), and the rows and columns of patches.

    Raises:
        DataError: if no grid of square patches fits that number of tokens.
    """
    for before in range(9):
        patches = tokens - before
        if patches < 1:
            break
        side = round((height * width / patches) ** 0.5)
        if side and height % side == 0 and width % side == 0 and (height // side) * (width // side) == patches:
            return before, height // side, width // side
    raise DataError(
        f"maps over a picture: got {tokens} tokens for {height} x {width} pixels, expected square patches in a grid; "
        "use the plain attention maps"
    )


def picture_maps(maps: Sequence[LayerMaps], picture: Tensor) -> Figure:
    """Lay the class token's attention over the picture, for softmax and linear in each layer, averaged over heads.

    If there is no token before the patches, the attention is averaged over all queries.

    Args:
        maps: one entry per layer, all for one picture.
        picture: the model's input [C, height, width]; it is shown scaled to the range 0 to 1.

    Raises:
        DataError: if the tokens do not form a grid.
    """
    from matplotlib import colormaps

    pixels = to_picture(picture)
    height, width = pixels.shape[:2]
    before, rows, columns = patch_grid(maps[0].softmax.shape[-1], height, width)
    count = 2 * len(maps) + 1
    figure = style.new_figure(9.0, 0.2 + 1.75 * -(-count // 6))
    places = style.axes_grid(figure, count, min(count, 6))
    titles = ["the picture"]
    places[0].imshow(pixels)
    colours = colormaps[style.FIGURES].with_extremes(under=style.NEGATIVE)
    for number, (layer, name) in enumerate(zip(maps, style.layer_names([one.module for one in maps]), strict=True)):
        for side, weights in enumerate((layer.softmax.mean(dim=0), layer.linear.mean(dim=0))):
            heat = style.shade((weights[0] if before else weights.mean(dim=0))[before:].reshape(rows, columns))
            axes = places[1 + 2 * number + side]
            # Draw the picture pale and grey, so that colour and brightness show only attention.
            axes.imshow(pixels.mean(axis=-1), cmap="gray", vmin=0, vmax=1.6)
            extent = (-0.5, width - 0.5, height - 0.5, -0.5)
            axes.imshow(heat, cmap=colours, alpha=0.65, extent=extent, vmin=0.0, vmax=1.0)
            titles.append(f"{name}, {('softmax', 'linear')[side]}")
    for axes, title in zip(places, titles, strict=True):
        style.tidy(axes, title)
        axes.set_xticks([])
        axes.set_yticks([])
    style.weight_bar(figure, places)
    return figure


def to_picture(pixels: Tensor) -> np.ndarray:
    """Return normalised pixels [C, height, width] as [height, width, 3] scaled to 0 to 1."""
    low, high = pixels.amin(), pixels.amax()
    shown = ((pixels - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0).float().cpu().numpy()
    return np.repeat(shown, 3, axis=-1) if shown.shape[-1] == 1 else shown[..., :3]
