"""Decoding one token through the attentions of all layers: a growing cache of keys beside a state of fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from linearize.attention.call import AttentionCall
from linearize.bench.attention import SizedSuite
from linearize.bench.rows import Row, ratio
from linearize.bench.timing import Call
from linearize.errors import ConfigError

SPARE = 16
"""Places that the cache of keys has after the context."""

PREFILL = 16
"""Tokens that make the state: its size does not depend on how many there were."""


@dataclass(frozen=True)
class DecodeSuite(SizedSuite):
    """One new token behind a context.

    Softmax writes its key and value into a cache that has room for them already and attends to all of it through SDPA;
    the kernel takes its own step with its state.

    Tokens are decoded one behind the other, so a turn is some of them in a row. The first of a turn finds none of its
    state in the processor's caches, because softmax's keys and values went through them: that is a figure of its own.

    Attributes:
        layers: attentions, one after the other.
    """

    name: ClassVar[str] = "decode"
    calls: ClassVar[int] = 8
    counts_prepared: ClassVar[bool] = True

    layers: int = 12

    @property
    def what(self) -> str:
        """See `Suite`."""
        return f"{self.sizes.kernel}, one token through {self.layers} layers, {self.sizes.dtype}"

    def check(self) -> None:
        """See `Suite`."""
        self.sizes.check_sizes()
        if not 1 <= self.layers <= 1024:
            raise ConfigError(f"layers: got {self.layers}, expected a whole number from 1 to 1024")
        if not self.sizes.mixer(causal=True).info.streamable:
            raise ConfigError(f"kernel {self.sizes.kernel!r} cannot decode in constant memory; choose another kernel")

    def figures(self, row: Row, rate: float) -> Mapping[str, float | None]:
        """See `Suite`: how many times as fast the first token of a turn is, right behind softmax's turn."""
        return {"first_speedup": ratio(row.variants["softmax"].first, row.variants["linear"].first)}

    def prepare(self, variant: str, tokens: int) -> Call:
        """See `Suite`; `tokens` is the context."""
        return self._softmax(tokens) if variant == "softmax" else self._linear(tokens)

    def _softmax(self, context: int) -> Call:
        sizes = self.sizes
        q, k, v = (sizes.draw(1, seed=seed) for seed in range(3))
        caches = [
            tuple(sizes.draw(context + SPARE, seed=2 * layer + half) for half in (3, 4)) for layer in range(self.layers)
        ]

        @torch.no_grad()
        def step() -> None:
            for keys, values in caches:
                keys[:, :, context : context + 1] = k
                values[:, :, context : context + 1] = v
                F.scaled_dot_product_attention(q, keys[:, :, : context + 1], values[:, :, : context + 1])

        return step

    @torch.no_grad()
    def _linear(self, context: int) -> Call:
        sizes = self.sizes
        scaling = sizes.head_dim**-0.5
        q, k, v = (sizes.draw(1, seed=seed) for seed in range(3))
        mixers = [sizes.mixer(causal=True) for _ in range(self.layers)]
        first_q, first_k, first_v = (sizes.draw(PREFILL, seed=seed) for seed in range(3, 6))
        prefill = AttentionCall(first_q, first_k, first_v, scaling, needs_state=True)
        states = [mixer(prefill)[1] for mixer in mixers]
        for state in states:
            if "seen" in state:
                state["seen"].fill_(context)

        @torch.no_grad()
        def step() -> None:
            for layer, mixer in enumerate(mixers):
                call = AttentionCall(q, k, v, scaling, state=states[layer], needs_state=True)
                _, states[layer] = mixer(call)

        return step
