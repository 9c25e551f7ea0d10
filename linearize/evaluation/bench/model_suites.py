"""Suites of whole models: a forward, a training step, and decoding. Without any attention: the bound of the gain."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from linearize.attention.cache import cache_argument, cache_nbytes
from linearize.attention.interface import linear_attentions, observed
from linearize.attention.layer import Observer
from linearize.core.errors import UnsupportedModelError
from linearize.evaluation.bench.meter import Call
from linearize.evaluation.bench.models import BenchModel, values_only
from linearize.evaluation.bench.rows import Row, ratio
from linearize.evaluation.bench.suites import PREFILL, Suite
from linearize.fidelity.teacher import run_body

LEARNING_RATE = 1e-6
"""Small enough that minutes of training steps do not change a model."""
FIRST = 8
"""Tokens of the training step before the first one that counts."""


@dataclass(frozen=True)
class OfModel(Suite):
    """A suite of a whole model.

    Attributes:
        model: the model and its kernel.
    """

    model: BenchModel = field(default_factory=BenchModel)

    @property
    def device(self) -> str:
        return self.model.device

    @property
    def dtype(self) -> str:
        return self.model.dtype

    @property
    def note(self) -> str | None:
        return self.model.note

    def check(self) -> None:
        """Load the model, convert it, and extend it to the longest input."""
        _ = self.model.linear


@dataclass(frozen=True)
class ModelSuite(OfModel):
    """One forward of a model."""

    name: ClassVar[str] = "model"
    variants: ClassVar[tuple[str, ...]] = ("softmax", "linear", "no attention")

    @property
    def what(self) -> str:
        return f"{self.model.label}, forward, {self.model.dtype}"

    def prepare(self, variant: str, tokens: int) -> Call:
        model, observer = _side(self.model, variant)
        return self.model.forward(tokens, model=model, observer=observer)

    def figures(self, row: Row, rate: float) -> dict[str, float | None]:
        """Return how much faster the model could become at most."""
        figures = {"bound_speedup": row.times("softmax", over="no attention")}
        return figures if self.model.image_size is None else figures | {"image_size": float(self.model.image_size)}


def _side(model: BenchModel, variant: str) -> tuple[Any, Observer | None]:
    """Return the model that computes a variant, and the observer under which it does."""
    if variant == "no attention":
        return model.linear, values_only
    if variant == "linear":
        return model.linear, None
    # The layers of a converted checkpoint compute softmax themselves: an observer that returns None leaves it to SDPA.
    return (model.linear, lambda *_: None) if model.converted else (model.original, None)


@dataclass(frozen=True)
class TrainSuite(ModelSuite):
    """One training step of a whole model: forward, backward and AdamW over all weights.

    The loss is the mean square of every other feature of the last hidden states (that of all is constant after a
    LayerNorm): a task's own loss would cost both sides the same. Dropout is off, because SDPA with dropout takes a
    slower path on the CPU, which would flatter the kernels.
    """

    name: ClassVar[str] = "train"
    may_run_out_of_memory: ClassVar[tuple[str, ...]] = ("softmax",)

    @property
    def what(self) -> str:
        return f"{self.model.label}, training step, {self.model.dtype}"

    def prepare(self, variant: str, tokens: int) -> Call:
        model, observer = _side(self.model, variant)
        weights = [parameter.requires_grad_(True) for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)

        def step(batch: Mapping[str, Tensor]) -> None:
            with observed(model, observer):
                optimizer.zero_grad(set_to_none=False)
                run_body(model, batch).last_hidden_state[..., ::2].float().square().mean().backward()
                optimizer.step()

        # Makes gradients and moments, as large as the weights on either side, before the first step that counts.
        step(self.model.inputs(FIRST))
        return functools.partial(step, self.model.inputs(tokens))


@dataclass(frozen=True)
class DecodeModelSuite(OfModel):
    """One new token after a context, through a whole causal model.

    The cost of a step does not depend on the context's tokens, so only its first ones are read; the keys and values of
    the others are copies of theirs, and a state has the same size after any context. As in generation by transformers,
    softmax's step copies the cache into a longer one. Memory is not that of a process but the exact size of what is
    kept between two tokens.

    Attributes:
        kept: bytes that each variant keeps, by variant and context.
    """

    name: ClassVar[str] = "decode-model"
    calls: ClassVar[int] = 8
    memory_variants: ClassVar[tuple[str, ...]] = ()

    kept: dict[tuple[str, int], int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def what(self) -> str:
        return f"{self.model.label}, one token after a context, {self.model.dtype}"

    def check(self) -> None:
        """Load and convert the model.

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
        model: Any = self.model.softmax if variant == "softmax" else self.model.linear
        cache = DynamicCache(config=model.config) if variant == "softmax" else model.new_cache()
        kept = cache_argument(model, cache)
        token = self.model.inputs(1)["input_ids"]
        with torch.no_grad():
            model(**self.model.inputs(min(PREFILL, tokens)), **kept, use_cache=True)
        set_context(cache, tokens)
        self.kept[variant, tokens] = cache_nbytes(cache)

        @torch.no_grad()
        def step() -> Tensor:
            out: Any = model(input_ids=token, **kept, use_cache=True)
            set_context(cache, tokens)
            return out[0]

        return step

    def figures(self, row: Row, rate: float) -> Mapping[str, float | None]:
        """Return what each variant keeps, in MiB, and how much faster the first token of a turn is."""
        kept = {name: self.kept.get((name, row.tokens)) for name in self.variants}
        figures = {f"{name}_kept_mib": None if count is None else count / 2**20 for name, count in kept.items()}
        return {**figures, "first_speedup": ratio(row.first("softmax"), row.first("linear"))}


def set_context(cache: Any, context: int) -> None:
    """Turn a cache that has read some tokens into one that has read `context`, in place.

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
    return x.repeat(1, 1, max(1, -(-count // tokens)), 1)[..., :count, :].contiguous()
