"""Pictures of how close linear attention is to softmax, as matplotlib figures that are neither shown nor saved.

    from linearize.fidelity import measure
    from linearize.fidelity.plots import fidelity_heatmaps
    fidelity_heatmaps(measure(original, converted, batches)).savefig("heads.png")

Maps of the attention itself are in `plots_maps`, learned kernels in `plots_kernels`, several conversions in
`plots_compare`. matplotlib is loaded with the first figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from linearize.core.errors import DataError
from linearize.fidelity import plots_style as style
from linearize.fidelity.maps import LayerMaps, rank_correlation
from linearize.fidelity.measure import Fidelity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIDELITY_FIGURES = {
    "kl": "KL divergence, nats per query",
    "total_variation": "total variation",
    "negative_share": "share of negative weights",
    "output_error": "error of the head's output",
}
POINTS = 1500
"""Weights per side and layer that a scatter shows."""


def fidelity_heatmaps(fidelity: Fidelity) -> Figure:
    """Show KL, total variation, negative share and output error per layer and head; bright is far from softmax.

    All are on one scale, which ends at 1; the numbers in the cells may be larger.
    """
    shown = [name for name in FIDELITY_FIGURES if any(name in layer.heads for layer in fidelity.layers)]
    if not shown:
        raise DataError("fidelity heat maps: got no converted layer, expected at least one; measure a converted model")
    heads = max(len(layer.heads["output_error"]) for layer in fidelity.layers)
    names = style.layer_names([layer.module for layer in fidelity.layers])
    figure = style.new_figure(max(8.0, 1.0 * heads), 1.2 + 2 * max(1.5, 0.28 * len(names) + 0.5))
    for axes, name in zip(style.axes_grid(figure, len(shown), 2), shown, strict=True):
        table = np.full((len(names), heads), np.nan)
        for row, layer in enumerate(fidelity.layers):
            values = layer.heads.get(name, [])
            table[row, : len(values)] = values
        heatmap(figure, axes, table, names, FIDELITY_FIGURES[name])
    return figure


def heatmap(
    figure: Figure, axes: Axes, table: np.ndarray, rows: Sequence[str], title: str, *, numbers: bool = True
) -> None:
    """Draw a table of distances [layers, heads] on their common scale, with numbers if there is room."""
    image = axes.imshow(table, cmap=style.FIGURES, aspect="auto", vmin=0.0, vmax=1.0)
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.set_ticks([0, 0.5, 1], labels=["0", "0.5", "≥1"])
    bar.ax.tick_params(labelsize=7)
    bar.set_label(style.DISTANCE_SCALE, fontsize=6.5)
    style.tidy(axes, title, "head")
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    if numbers:
        axes.set_xticks(range(table.shape[1]))
    else:
        style.whole_numbers(axes, 6)
    if not numbers or table.size > 200:
        return
    for (row, column), value in np.ndenumerate(table):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
            axes.text(column, row, _brief(float(value)), ha="center", va="center", fontsize=6.5, color=ink)


def _brief(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) < 0.005:
        # Python writes 7e-05.
        return f"{value:.0e}".replace("e-0", "e-")
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def weight_scatter(maps: Sequence[LayerMaps], seed: int = 0) -> Figure:
    """Show weight against q . k, all heads of a layer in one panel: softmax rises, a good kernel does too."""
    figure, panels, _ = style.layer_panels(maps, 4)
    for axes, layer, name in panels:
        visible = layer.visible.expand_as(layer.scores)
        scores = layer.scores[visible].numpy()
        pick = np.random.default_rng(seed).permutation(len(scores))[:POINTS]
        negative = False
        for weights, colour, marker, label in (
            (layer.softmax, style.SOFTMAX, "o", "softmax"),
            (layer.linear, style.LINEAR, "^", "linear"),
        ):
            values = weights[visible].numpy()[pick]
            negative |= bool((values < 0).any())
            axes.scatter(scores[pick], values, s=4, c=colour, marker=marker, alpha=0.35, linewidths=0, label=label)
        axes.set_yscale("symlog", linthresh=1e-4) if negative else axes.set_yscale("log")
        if not negative:
            axes.set_ylim(1e-6, 2.0)
        rank = float(rank_correlation(layer).mean())
        style.tidy(axes, f"{name}: rank corr. {rank:.2f}", "q . k (scaled)", "weight")
        axes.locator_params(axis="x", nbins=3)
    figure.axes[0].legend(fontsize=6, frameon=False, markerscale=2)
    return figure


def stage_one_curves(log: Sequence[Mapping[str, Any]]) -> Figure:
    """Show stage one's losses from the lines of `log.jsonl`.

    Raises:
        DataError: if there is no line with losses.
    """
    log = [entry for entry in log if entry.get("losses")]
    if not log:
        raise DataError("stage one's curves: got a log without losses; give the lines of log.jsonl")
    figure = style.new_figure(7.5, 3.2)
    axes = figure.subplots()
    steps = [entry["step"] for entry in log]
    layers = list(log[0]["losses"])
    for layer in layers:
        known = [entry["losses"].get(layer, np.nan) for entry in log]
        axes.plot(
            steps,
            known,
            color=style.THIRD,
            linewidth=0.6,
            alpha=0.6,
            label="single layers" if layer == layers[0] else None,
        )
    means = [np.mean(list(entry["losses"].values())) for entry in log]
    axes.plot(steps, means, color=style.SOFTMAX, linewidth=1.6, label="training batches, mean of the layers")
    held = [(entry["step"], entry["held_out"]) for entry in log if entry.get("held_out") is not None]
    if held:
        axes.plot(
            *zip(*held, strict=True), color=style.LINEAR, linestyle="--", marker="s", markersize=4, label="held out"
        )
    style.tidy(axes, "Stage one: how far each layer is from softmax", "step", "loss")
    style.whole_numbers(axes)
    axes.legend(fontsize=8, frameon=False)
    return figure


def stage_two_curves(log: Sequence[Mapping[str, Any]], chance: float | None = None) -> Figure:
    """Show stage two's loss and score from the lines of `log.jsonl`.

    Args:
        log: the lines.
        chance: the score of guessing; None: unknown.

    Raises:
        DataError: if there is no line with a loss or a metric.
    """
    losses = [(entry["step"], entry["loss"]) for entry in log if "loss" in entry]
    measured = [entry for entry in log if "eval_loss" in entry or "eval_score" in entry]
    if not losses and not measured:
        raise DataError("stage two's curves: got a log without losses; give the lines of log.jsonl")
    figure = style.new_figure(7.5, 3.2)
    one, two = figure.subplots(1, 2)
    if losses:
        one.plot(*zip(*losses, strict=True), color=style.SOFTMAX, linewidth=1.4, label="training")
    held = [(entry["step"], entry["eval_loss"]) for entry in measured if "eval_loss" in entry]
    if held:
        one.plot(
            *zip(*held, strict=True), color=style.LINEAR, linestyle="--", marker="s", markersize=4, label="validation"
        )
    style.tidy(one, "Stage two: loss", "step", "loss")
    if losses or held:
        one.legend(fontsize=8, frameon=False)
    score = [(entry["step"], entry["eval_score"]) for entry in measured if "eval_score" in entry]
    if score:
        two.plot(*zip(*score, strict=True), color=style.LINEAR, linestyle="--", marker="s", markersize=4)
    if chance is not None:
        two.axhline(chance, color=style.THIRD, linestyle=":", linewidth=1.2, label="chance")
        two.legend(fontsize=8, frameon=False)
    style.tidy(two, "the task's score on validation rows", "step", "score")
    for axes in (one, two):
        style.whole_numbers(axes)
    return figure
