"""Pictures of what a kernel has learned, in a table by kernel that other packages can extend.

    register_picture("my_kernel", draw)     # draw(maps) -> Figure

`maps` are the layers of that kernel alone, with the queries and keys that they saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from linearize.fidelity.maps import LayerMaps
from linearize.fidelity.plots import heatmap
from linearize.fidelity.plots_style import FIGURES, LINEAR, SOFTMAX, THIRD, layer_panels, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Drawing = Callable[[Sequence[LayerMaps]], "Figure"]


@dataclass(frozen=True)
class KernelPicture:
    """A picture of one kernel's learned numbers.

    Attributes:
        draw: makes the figure of the layers of this kernel.
        caption: what the picture shows, one or two sentences.
    """

    draw: Drawing
    caption: str


_PICTURES: dict[str, KernelPicture] = {}


def register_picture(kernel: str, draw: Drawing, caption: str = "") -> None:
    """Add the picture of a kernel, or replace it."""
    _PICTURES[kernel] = KernelPicture(draw, caption)


def kernel_picture(kernel: str) -> KernelPicture | None:
    """Return the picture of a kernel; None if it has no picture."""
    return _PICTURES.get(kernel)


def _map(layer: LayerMaps) -> Any:
    return layer.layer.mixer.keys


def _moved(weight: Tensor) -> Tensor:
    """Return how far the rows that started as the identity have moved: [H, F, D] -> [H, at most D, D]."""
    first = weight[:, : weight.shape[-1]]
    return first - torch.eye(*first.shape[-2:])


@torch.no_grad()
def hedgehog_weights(maps: Sequence[LayerMaps]) -> Figure:
    """Show Hedgehog's W of the head in each layer that moved furthest from the identity, and all heads' distances."""
    figure, panels, (last,) = layer_panels(maps, 4, more=1)
    distances = []
    for axes, layer, name in panels:
        weight = _map(layer).weight.float().cpu()
        distances.append((_moved(weight).norm(dim=(-2, -1)) / weight.shape[-1] ** 0.5).numpy())
        head = int(_moved(weight).norm(dim=(-2, -1)).argmax())
        image = axes.imshow(weight[head].numpy(), cmap=FIGURES, interpolation="nearest", vmin=-1.0, vmax=1.0)
        bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
        bar.set_ticks([-1, 0, 1], labels=["≤-1", "0", "≥1"])
        bar.ax.tick_params(labelsize=6)
        tidy(axes, f"{name}, head {head}: W")
    heatmap(figure, last, np.stack(distances), [name for _, _, name in panels], "|W - I| / |I|", numbers=False)
    return figure


@torch.no_grad()
def luna_channels(maps: Sequence[LayerMaps], head: int = 0) -> Figure:
    """Show LUNA's scalar functions psi_l of one head per layer, over the histogram of their inputs."""
    figure, panels, _ = layer_panels(maps, 3)
    for axes, layer, name in panels:
        kernel = _map(layer)
        mine = head % kernel.heads
        inputs = _luna_inputs(layer, kernel, mine, head)
        low, high = np.quantile(inputs, [0.005, 0.995])
        margin = 0.3 * (high - low) + 1e-3
        u = torch.linspace(low - margin, high + margin, 200)
        histogram = axes.twinx()
        histogram.hist(inputs, bins=40, range=(float(u[0]), float(u[-1])), color=THIRD, alpha=0.35)
        histogram.set_yticks([])
        for number, line in enumerate(_luna_psi(kernel, mine, u)):
            axes.plot(
                u.numpy(), line.numpy(), color=SOFTMAX, linestyle=("-", "--", ":", "-.")[number % 4], linewidth=1.1
            )
        axes.set_zorder(histogram.get_zorder() + 1)
        axes.patch.set_visible(False)
        tidy(axes, f"{name}, head {mine}", "u = w . x + b", "psi(u)")
    return figure


def _luna_inputs(layer: LayerMaps, kernel: Any, mine: int, head: int) -> np.ndarray:
    keys = layer.k[head % len(layer.k)]
    queries = layer.q[head % len(layer.q)]
    both = torch.cat([keys, queries])
    return (both @ kernel.weight[mine].float().cpu().T + kernel.bias[mine].float().cpu()).flatten().numpy()


def _luna_psi(kernel: Any, mine: int, u: Tensor) -> Tensor:
    """Return the scalar MLPs' values at u: [L, len(u)]."""
    slope, offset, out = (p[mine].float().cpu() for p in (kernel.slope, kernel.offset, kernel.out_weight))
    hidden = (slope[..., None] * u + offset[..., None]).relu()
    return ((out[..., None] * hidden).sum(dim=-2) + kernel.out_bias[mine].float().cpu()[:, None]).relu()


def frequencies(maps: Sequence[LayerMaps]) -> Figure:
    """Draw the learned frequencies of Fourier kernels."""
    figure, panels, _ = layer_panels(maps, 3)
    for axes, layer, name in panels:
        _spectrum(axes, layer)
        tidy(axes, name, "frequency (one coordinate)", "density")
    figure.axes[0].legend(fontsize=6, frameon=False, loc="upper right")
    return figure


@torch.no_grad()
def _spectrum(axes: Axes, layer: LayerMaps) -> None:
    drawn = _map(layer).frequencies(layer.scaling)
    values = {name: numbers.float().cpu().flatten().numpy() for name, numbers in drawn.items()}
    limit = max(2.5, *(float(np.quantile(np.abs(v), 0.999)) for v in values.values()))
    x = np.linspace(-limit, limit, 200)
    for (name, numbers), colour, dashes in zip(values.items(), (SOFTMAX, LINEAR), ("-", "--"), strict=False):
        axes.hist(
            numbers, bins=60, range=(-limit, limit), density=True, label=f"learned {name}", histtype="step",
            color=colour, linestyle=dashes,
        )  # fmt: skip
    axes.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), color=THIRD, linestyle=":", label="softmax's own")


register_picture(
    "hedgehog",
    hedgehog_weights,
    "Hedgehog's learned W of the head that moved furthest from the identity, layer by layer, all on "
    "one scale from -1 to 1; last panel: how far W is from the identity in every head.",
)
register_picture(
    "luna",
    luna_channels,
    "LUNA's learned scalar functions (one line per channel) of head 0, layer by layer; in grey their inputs, from "
    "queries and keys of the first text or picture.",
)
for _name in ("flexformer_s", "flexformer_n"):
    register_picture(
        _name,
        frequencies,
        "Flexformer's learned frequencies, all heads of a layer, against the Gaussian density whose random features "
        "would give softmax itself.",
    )
