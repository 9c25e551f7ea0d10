"""Remove parts of a converted attention, to measure how much each contributes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions, observed
from linearize.attention.layer import LinearAttention
from linearize.attention.parts import HEADS, NEAR, ROUTED, SCALED, check_parts, without
from linearize.core.errors import ConfigError, unknown_name
from linearize.core.figures import span, with_interval
from linearize.core.registry import Hybrid
from linearize.fidelity.teacher import Batch, exact_states, within_limit
from linearize.kernels.base import FeatureMap, Features, MapSpec
from linearize.kernels.none import nothing

PARTS = ("kernel", "window", "exact-keys", "routed", "attention")
"""Parts that can be removed: the kernel (keeping the window), the window with its sinks, exact keys and routed blocks
(keeping the kernel), the exact keys, the routed blocks, or the whole attention (converted layers return zeros)."""
RESAMPLES = 10_000


class _NoFeatures(FeatureMap):
    """A map whose features are set to zero; its log-scales are kept, because they determine the exact keys."""

    def __init__(self, map: FeatureMap) -> None:
        super().__init__(map.config, map.heads, map.head_dim)
        self.map = map
        self.scale_inputs, self.normalize = map.scale_inputs, map.normalize

    def reset_parameters(self, generator: torch.Generator) -> None:
        self.map.reset_parameters(generator)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        return _silent(self.map(x, positions))

    def forward_queries(self, x: Tensor, positions: Tensor | None = None) -> Features:
        return _silent(self.map.forward_queries(x, positions))

    def forward_keys(self, x: Tensor, positions: Tensor | None = None) -> Features:
        return _silent(self.map.forward_keys(x, positions))

    def map_spec(self) -> MapSpec | None:
        spec = self.map.map_spec()
        return None if spec is None or spec.scaled else nothing(self.heads, self.head_dim)


def _silent(features: Features) -> Features:
    return Features(torch.zeros_like(features.phi), features.log_scale)


@contextlib.contextmanager
def ablated(model: PreTrainedModel, part: str) -> Iterator[PreTrainedModel]:
    """Remove one part of a converted model's attention within the block.

    Args:
        model: a converted model.
        part: one of `PARTS`.

    Raises:
        UnknownNameError: for an unknown part.
        ConfigError: if no layer of the model has the part.
    """
    if part not in PARTS:
        raise unknown_name("part to remove", part, PARTS)
    layers = linear_attentions(model).values()
    for layer in layers:
        check_parts(layer.hybrid, NEAR | ROUTED | SCALED | HEADS, "ablate")
    with undone(map(_REMOVE[part], layers)) as found:
        if not found:
            have = {"kernel": "a window next to its kernel", "window": "a window", "exact-keys": "exact keys"}
            have |= {"routed": "routed blocks"}
            raise ConfigError(
                f"ablate: got {part!r}, but no layer of this model has {have.get(part, 'a kernel')}; leave it out"
            )
        yield model


@contextlib.contextmanager
def undone(changes: Iterable[Callable[[], None] | None]) -> Iterator[bool]:
    """Undo changes of layers after the block, given the functions that undo them; yield whether there are any."""
    with contextlib.ExitStack() as stack:
        yield bool([stack.callback(undo) for undo in changes if undo is not None])


def _has_kernel_and_window(layer: LinearAttention) -> bool:
    return layer.mixer.hybrid.window is not None and not layer.mixer.info.needs_window


def without_kernel(layer: LinearAttention) -> Callable[[], None] | None:
    """Remove the kernel next to a window; return a function that restores it, None without window or kernel."""
    if not _has_kernel_and_window(layer):
        return None
    mixer = layer.map_mixer
    keys, queries = mixer.keys, mixer.queries
    mixer.keys, mixer.queries = _NoFeatures(keys), None if queries is None else _NoFeatures(queries)
    mixer.memory.clear()

    def undo() -> None:
        mixer.keys, mixer.queries = keys, queries
        mixer.memory.clear()

    return undo


def changed(layer: LinearAttention, hybrid: Hybrid) -> Callable[[], None]:
    """Change a layer's additions; return a function that restores them."""
    mixer = layer.map_mixer
    before = mixer.hybrid
    mixer.change(hybrid)
    return lambda: mixer.change(before)


_REMOVE: Mapping[str, Callable[[LinearAttention], Callable[[], None] | None]] = {
    "kernel": without_kernel,
    "window": lambda layer: (
        changed(layer, without(layer.hybrid, NEAR | ROUTED)) if _has_kernel_and_window(layer) else None
    ),
    "exact-keys": lambda layer: (
        changed(layer, without(layer.hybrid, ["exact_keys"])) if "exact_keys" in layer.hybrid.changed else None
    ),
    "routed": lambda layer: changed(layer, without(layer.hybrid, ROUTED)) if layer.hybrid.routed_blocks else None,
    "attention": lambda layer: layer.register_forward_hook(lambda *call: torch.zeros_like(call[-1])).remove,
}
"""How to remove each part from a layer; returns a function that restores it, or None if the layer lacks the part."""


EXACT = 0.0005
"""An error below this is 0 in three digits."""


@dataclass(frozen=True)
class KernelMerit:
    """How much kernels add to their windows, measured at the last hidden state of the whole model, or in one layer.

    Attributes:
        error: norm of the difference from softmax's state or output, relative to its norm.
        window_only: the same without the kernels.
        difference: `window_only` minus `error`.
        interval: its 95 % bootstrap interval over rows; None if only one row was measured.
    """

    error: float
    window_only: float
    difference: float
    interval: tuple[float, float] | None

    @property
    def text(self) -> str:
        """The result in one sentence."""
        if self.window_only < EXACT:
            return "the last hidden state has no error even without the kernel, so these rows cannot show its gain"
        if self.interval is None:
            gain = f"a gain of {self.difference:.3f}, on one row and so without an interval"
        elif self.interval[0] > 0:
            gain = f"the kernel lowers it by {with_interval(self.difference, self.interval)}"
        elif self.interval[1] < 0:
            raised = -self.interval[1], -self.interval[0]
            gain = f"the kernel raises it by {with_interval(-self.difference, raised)}"
        else:
            gain = f"the kernel's gain cannot be told from noise ({span(self.interval)})"
        return (
            # Not "relative error": that of an alignment is relative to the spread, not to the norm.
            f"the error of the last hidden state is {self.window_only:.3f} of its norm without the kernel and "
            f"{self.error:.3f} with it: {gain}"
        )


def kernel_merit(
    model: PreTrainedModel, batches: Iterable[Batch], original: PreTrainedModel | None = None
) -> KernelMerit | None:
    """Measure how much the kernels add to their windows, compared with softmax.

    Args:
        model: a converted model; it is unchanged afterwards.
        batches: model inputs (such as `input_ids` [B, T]); they are moved to the model's device.
        original: the softmax model, to whose longest input texts are cut; None: the model's own softmax, if its other
            weights are still the original's.

    Returns:
        The result; None if no layer has both a kernel and a window, or the models return no hidden states of equal
        shape.
    """
    layers = linear_attentions(model).values()
    if not any(map(_has_kernel_and_window, layers)):
        return None
    sums: list[Tensor] = []
    for batch in batches:
        batch = batch if original is None else within_limit(original, batch)
        with observed(model, lambda *_: None) if original is None else contextlib.nullcontext():
            softmax = exact_states(original or model, batch)
        ours = exact_states(model, batch)
        with ablated(model, "kernel"):
            alone = exact_states(model, batch)
        if softmax is None or ours is None or alone is None or softmax.shape != ours.shape:
            return None
        squares = [x.square().flatten(1).sum(dim=1) for x in (ours - softmax, alone - softmax, softmax)]
        sums.append(torch.stack(squares, dim=1))
    return merit_of(torch.cat(sums))


def merit_of(rows: Tensor) -> KernelMerit:
    """Return both errors, and the bootstrap interval over rows of their difference.

    Args:
        rows: [N, 3], for each row the squared norms of the difference from softmax, of the difference without the
            kernel, and of softmax.
    """
    error, window_only, difference = map(float, _errors(rows[None].sum(dim=1)))
    if len(rows) == 1:
        return KernelMerit(error, window_only, difference, None)
    generator, part = torch.Generator().manual_seed(0), (RESAMPLES // 100, len(rows))
    drawn = torch.cat([rows[torch.randint(len(rows), part, generator=generator)].sum(dim=1) for _ in range(100)])
    ends = _errors(drawn)[2].quantile(torch.tensor([0.025, 0.975], dtype=rows.dtype))
    return KernelMerit(error, window_only, difference, (float(ends[0]), float(ends[1])))


def _errors(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both errors and their difference [N] from squared norms [N, 3]."""
    power = sums[:, 2].clamp(min=1e-30)
    ours, alone = (sums[:, 0] / power).sqrt(), (sums[:, 1] / power).sqrt()
    return ours, alone, alone - ours
