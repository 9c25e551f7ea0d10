"""Decoding with a whole causal model: softmax with its cache of keys and values beside kernels with their states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from linearize.attention.cache import cache_nbytes
from linearize.attention.interface import linear_attentions
from linearize.bench.decode import PREFILL
from linearize.bench.rows import Row, ratio
from linearize.bench.timing import Call
from linearize.bench.whole_model import OfModel
from linearize.errors import UnsupportedModelError


@dataclass(frozen=True)
class DecodeModelSuite(OfModel):
    """One new token behind a context, through a whole model.

    What a step costs does not depend on what the context was, so that only its first tokens are read; the keys and
    values of the others are copies of theirs, and a state is of the same size behind any context. As in generation by
    transformers, softmax's step makes a longer cache of the old one.

    Memory is not that of a process but the exact size of what is kept between two tokens.

    Attributes:
        kept: bytes that each variant keeps, by variant and context.
    """

    name: ClassVar[str] = "decode-model"
    calls: ClassVar[int] = 8
    memory_variants: ClassVar[tuple[str, ...]] = ()

    kept: dict[tuple[str, int], int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def what(self) -> str:
        """See `Suite`."""
        return f"{self.model.label}, one token behind a context, {self.model.dtype}"

    def check(self) -> None:
        """See `Suite`.

        Raises:
            UnsupportedModelError: if the model is not causal, reads its inputs with an encoder, or has a kernel without
                a state of constant size.
        """
        model = self.model.linear
        layers = list(linear_attentions(model).values())
        if model.config.is_encoder_decoder or not all(layer.shape.causal for layer in layers):
            raise UnsupportedModelError(
                f"bench --decode: {self.model.model!r} is a {type(model).__name__}, which is no causal decoder; name "
                "one such as gpt2, or leave --decode out"
            )
        fixed = next((layer.kernel for layer in layers if not layer.mixer.info.streamable), None)
        if fixed is not None:
            raise UnsupportedModelError(
                f"bench --decode: kernel {fixed!r} cannot decode in constant memory; choose another kernel"
            )

    def prepare(self, variant: str, tokens: int) -> Call:
        """See `Suite`; `tokens` is the context."""
        model: Any = self.model.softmax if variant == "softmax" else self.model.linear
        cache = DynamicCache(config=model.config) if variant == "softmax" else model.new_cache()
        token = self.model.inputs(1)["input_ids"]
        with torch.no_grad():
            model(**self.model.inputs(min(PREFILL, tokens)), past_key_values=cache, use_cache=True)
        set_context(cache, tokens)
        self.kept[variant, tokens] = cache_nbytes(cache)

        @torch.no_grad()
        def step() -> Tensor:
            out: Any = model(input_ids=token, past_key_values=cache, use_cache=True)
            set_context(cache, tokens)
            return out[0]

        return step

    def figures(self, row: Row, rate: float) -> Mapping[str, float | None]:
        """See `Suite`: what each variant keeps, in MiB, and how much faster the first token of a turn is."""
        found = {
            f"{name}_kept_mib": self.kept[name, row.tokens] / 2**20 if (name, row.tokens) in self.kept else None
            for name in self.variants
        }
        return {**found, "first_speedup": ratio(row.variants["softmax"].first, row.variants["linear"].first)}


def set_context(cache: Any, context: int) -> None:
    """Make a cache that has seen some tokens one that has seen `context`, in place.

    Keys and values are repeated, or cut, to as many as their layer keeps of so many tokens.
    """
    for layer in cache.layers:
        if hasattr(layer, "store"):
            layer.tokens = context
            if layer.state is not None and "seen" in layer.state:
                layer.state["seen"].fill_(context)
            continue
        if not layer.is_initialized or layer.keys.ndim < 3:
            continue
        wanted = min(context, layer.sliding_window - 1) if layer.is_sliding else context
        layer.keys, layer.values = _as_many(layer.keys, wanted), _as_many(layer.values, wanted)
        if layer.is_sliding:
            layer.cumulative_length = context


def _as_many(x: Tensor, count: int) -> Tensor:
    """Cut or repeat [B, K, T, D] to `count` tokens."""
    tokens = x.shape[-2]
    if tokens >= count:
        return x[..., :count, :]
    return x.repeat(1, 1, -(-count // tokens), 1)[..., :count, :].contiguous()
