"""A layer's features of a whole sequence without an autograd graph over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linearize.attention.layer import LinearAttention
from linearize.distillation.targets import Targets

CPU_NUMBERS = 1 << 18
"""Numbers of the keys' features that are made at once on a CPU (1 MiB of fp32); a map keeps several such tensors."""

GPU_NUMBERS = 1 << 24
"""The same on other devices."""


class LayerFeatures:
    """A layer's features, made some tokens at a time, and once more for the gradient: no graph spans all tokens."""

    def __init__(self, layer: LinearAttention, targets: Targets, sample: Tensor | None) -> None:
        self.mixer: Any = layer.mixer
        self.targets, self.sample = targets, sample
        # A map that knows a token's place, or what precedes it, is shown the whole sequence.
        self.indivisible = self.mixer.info.positional or self.mixer.inputs is not None

    @torch.no_grad()
    def whole(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return phi(q) [B, H, R, F], phi(k) [B, K, T, F] and the keys' log-scale [B, K, T] or None."""
        targets = self.targets
        rows = targets.q.shape[2] if self.sample is None else len(self.sample)
        sizes = (rows, targets.k.shape[2], targets.k.shape[2])
        kept: list[Tensor] = []
        for made in self._parts():
            if not kept:
                kept = [x.new_empty(*x.shape[:2], n, *x.shape[3:]) for n, (_, x) in zip(sizes, made, strict=False)]
            for whole, (part, x) in zip(kept, made, strict=True):
                whole[:, :, part] = x
        return kept[0], kept[1], kept[2] if len(kept) == 3 else None

    def backward(self, weight: float, *gradients: Tensor | None) -> None:
        """Send gradients with respect to what `whole` gave, times `weight`, on to the parameters."""
        known = [gradient for gradient in gradients if gradient is not None]
        with torch.enable_grad():
            for made in self._parts():
                reached = [(x, g[:, :, part]) for (part, x), g in zip(made, known, strict=True) if x.requires_grad]
                if reached:
                    torch.autograd.backward([x for x, _ in reached], [weight * g for _, g in reached])

    def _parts(self) -> Iterator[list[tuple[slice, Tensor]]]:
        """Yield phi(q), phi(k) and perhaps the log-scale of some tokens, each with where it stands in the whole."""
        q, k, scaling, _, mask, _ = self.targets
        sample, tokens = self.sample, k.shape[2]
        if self.indivisible:
            phi_q, *rest = self.mixer.mapped(q, k, scaling=scaling, key_padding_mask=mask)
            made = [phi_q if sample is None else phi_q[:, :, sample], *rest]
            yield [(slice(None), x) for x in made if x is not None]
            return
        q = q if sample is None else q[:, :, sample]
        limit = CPU_NUMBERS if k.device.type == "cpu" else GPU_NUMBERS
        # A map's features are about as many as two heads' sizes.
        size = max(1, limit // (2 * q.shape[0] * q.shape[1] * k.shape[3]))
        for start in range(0, tokens, size):
            keys = slice(start, min(start + size, tokens))
            # The same share of the queries, which may be fewer.
            queries = slice(keys.start * q.shape[2] // tokens, keys.stop * q.shape[2] // tokens)
            made = self.mixer.mapped(q[:, :, queries], k[:, :, keys], scaling=scaling)
            yield [(part, x) for part, x in zip((queries, keys, keys), made, strict=True) if x is not None]
