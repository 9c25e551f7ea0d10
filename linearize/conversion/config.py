"""What a conversion does, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ConversionConfig:
    """Options of `linearize.convert` and `linearize.plan`.

    Attributes:
        kernel: name of the kernel, or of a preset, for all layers that `layers` does not name; None if it names all.
        kernel_args: arguments of that kernel.
        layers: kernels by layer number, `{0: "hedgehog", 1: ("luna", {...})}` or "0-5=hedgehog,6-11=elu".
        keep_softmax: numbers of layers that stay softmax; or "1/4" for the last layer of every four.
        window: W of a softmax window joined to the kernels, in all layers whose kernel has a feature map and a
            denominator (see `linearize.ops.window`); None: none. Single layers take it among their arguments.
        sinks: first tokens that get softmax's weights too (attention sinks).
        exact_keys: keys per head, outside the window, that get softmax's weights too: those with the largest learned
            scale (see `linearize.ops.window_causal`).
        scale: learned log-scales of queries and keys: "none", "linear" or "network"; None: linear with a window, else
            none (see `linearize.attention.hybrid`).
        softmax_heads: query heads that stay softmax, by layer number: `{4: [0]}` or "4:0,11:7". Their keys are cached.
        max_length: longest input that the model shall take, in tokens; None: what it takes now.
        positions: how learned positions are extended, "tile" or "interpolate".
        seed: seed of the kernels' starting values.
        example_inputs: inputs for the trial run, if they cannot be made up from the config.
        local_as_full: whether layers with a sliding window or chunks are converted too, as full attention: they then
            see everything, and equal the original at most up to the window's length.
    """

    kernel: str | None = "hedgehog"
    kernel_args: Mapping[str, object] | None = None
    layers: Mapping[int, str | tuple[str, Mapping[str, object]]] | str | None = None
    keep_softmax: Iterable[int] | str = ()
    window: int | None = None
    sinks: int = 0
    exact_keys: int = 0
    scale: str | None = None
    softmax_heads: Mapping[int, Iterable[int]] | str | None = None
    max_length: int | None = None
    positions: str = "tile"
    seed: int = 0
    example_inputs: Mapping[str, Tensor] | None = None
    local_as_full: bool = False

    @property
    def additions(self) -> dict[str, object]:
        """The additions that all layers with a kernel get."""
        asked = {name: getattr(self, name) for name in ("sinks", "exact_keys", "scale") if getattr(self, name)}
        return asked if self.window is None else {"window": self.window, **asked}
