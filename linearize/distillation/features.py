"""A layer's features of a whole sequence without an autograd graph over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linearize.attention.layer import LinearAttention
from linearize.distillation.targets import Targets
from linearize.kernels.base import Features

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
    def whole(self) -> tuple[Features, Features]:
        """Return the features of the queries [B, H, R, F] and of the keys [B, K, T, F]."""
        targets = self.targets
        rows, tokens = targets.q.shape[2] if self.sample is None else len(self.sample), targets.k.shape[2]
        kept: list[Tensor | None] = []
        for made in self._parts():
            if not kept:
                sizes = (rows, rows, tokens, tokens)
                kept = [
                    None if x is None else x.new_empty(*x.shape[:2], n, *x.shape[3:])
                    for n, (_, x) in zip(sizes, made, strict=True)
                ]
            for whole, (part, x) in zip(kept, made, strict=True):
                if whole is not None and x is not None:
                    whole[:, :, part] = x
        phi_q, query_scale, phi_k, key_scale = kept
        assert phi_q is not None and phi_k is not None
        return Features(phi_q, query_scale), Features(phi_k, key_scale)

    def backward(self, weight: float, queries: Features, keys: Features) -> None:
        """Send gradients with respect to what `whole` gave, times `weight`, on to the parameters."""
        with torch.enable_grad():
            for made in self._parts():
                reached = [
                    (x, g[:, :, part])
                    for (part, x), g in zip(made, (*queries, *keys), strict=True)
                    if x is not None and g is not None and x.requires_grad
                ]
                if reached:
                    torch.autograd.backward([x for x, _ in reached], [weight * g for _, g in reached])

    def _parts(self) -> Iterator[list[tuple[slice, Tensor | None]]]:
        """Yield phi(q), its log-scale, phi(k) and its log-scale of some tokens, each with its place in the whole."""
        q, k, scaling, _, mask, _ = self.targets
        sample, tokens = self.sample, k.shape[2]
        if self.indivisible:
            queries, keys = self.mixer.mapped(q, k, scaling=scaling, key_padding_mask=mask)
            rows = [x if x is None or sample is None else x[:, :, sample] for x in queries]
            yield [(slice(None), x) for x in (*rows, *keys)]
            return
        q = q if sample is None else q[:, :, sample]
        limit = CPU_NUMBERS if k.device.type == "cpu" else GPU_NUMBERS
        # A map's features are about as many as two heads' sizes.
        size = max(1, limit // (2 * q.shape[0] * q.shape[1] * k.shape[3]))
        for start in range(0, tokens, size):
            part = slice(start, min(start + size, tokens))
            # The same share of the queries, which may be fewer.
            row = slice(part.start * q.shape[2] // tokens, part.stop * q.shape[2] // tokens)
            queries, keys = self.mixer.mapped(q[:, :, row], k[:, :, part], scaling=scaling)
            yield [*((row, x) for x in queries), *((part, x) for x in keys)]
