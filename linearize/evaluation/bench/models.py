"""Whole models to measure: a checkpoint, converted or not, or BERT's sizes with random weights.

The suites measure a forward pass or decoding. A forward pass without attention gives an upper bound on the speed-up."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from linearize.attention.cache import cache_argument, cache_nbytes
from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention, Observer
from linearize.attention.parts import check_parts
from linearize.checkpoint.loading import load_converted, load_model, model_type, move
from linearize.conversion import positions
from linearize.conversion.plan import convert
from linearize.core.errors import ConfigError, UnsupportedModelError
from linearize.core.kernel_options import ADDITIONS
from linearize.core.registry import PLAIN, Hybrid
from linearize.evaluation.bench.meter import DTYPES, Call
from linearize.evaluation.bench.rows import Row
from linearize.evaluation.bench.suites import PREFILL, Suite
from linearize.fidelity.teacher import run_body
from linearize.modeling.caches import make_cache
from linearize.modeling.config import base_config_class
from linearize.ops.routed import Memory

BERT_BASE = "bert-base"
"""The name of a model of BERT's sizes (12 layers, 12 heads of size 64) with random weights; needs no network."""


@dataclass(frozen=True)
class BenchModel:
    """A model and its converted form; both are loaded on first use, and not pickled.

    Attributes:
        model: Hub name or folder of a checkpoint, converted or not, or `BERT_BASE`.
        kernel: kernel for a model that is not converted yet.
        kernel_args: its arguments.
        hybrid: window, sinks, exact keys and scale in addition to the kernel.
        layers: number of layers of `BERT_BASE`; None: its usual 12.
        longest: tokens of the longest input; learned positions are extended to it.
        image_size: height and width of the images in pixels; None: a text model.
        batch: sequences per batch.
        batch_tokens: tokens per batch, which then has as many sequences as fit, at least one; None: use `batch`.
        dtype: dtype of the weights.
        device: where it runs.
    """

    model: str = BERT_BASE
    kernel: str = "hedgehog"
    kernel_args: Mapping[str, object] = field(default_factory=dict)
    hybrid: Hybrid = PLAIN
    layers: int | None = None
    longest: int = 512
    image_size: int | None = None
    batch: int = 1
    batch_tokens: int | None = None
    dtype: str = "float32"
    device: str = "cpu"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def of(cls, model: PreTrainedModel, folder: str | None, longest: int, image_size: int | None = None) -> BenchModel:
        """Wrap a converted model that is already loaded.

        Args:
            model: the model.
            folder: where it is saved, for processes that load it again; None: no other process measures it.
            longest: tokens of the longest input.
            image_size: pixels of the images that it reads; None: it reads text.
        """
        dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
        name = type(model).__name__ if folder is None else str(Path(folder).absolute())
        made = cls(name, longest=longest, image_size=image_size, dtype=dtype, device=device)
        # Fill the cached properties, which would load the model otherwise.
        made.__dict__.update(converted=True, linear=model)
        return made

    @cached_property
    def converted(self) -> bool:
        """Whether it is a converted checkpoint."""
        return self.model != BERT_BASE and model_type(self.model) == "linearize"

    @property
    def label(self) -> str:
        """The model and its kernel, in readable form."""
        if self.converted:
            return self.model
        sizes = f"{self.model} sizes, {self.layers or 12} layers" if self.model == BERT_BASE else self.model
        return f"{sizes}, {self.kernel}"

    @cached_property
    def original(self) -> PreTrainedModel:
        """The softmax model, extended to the longest input; only for models that are not converted yet.

        Raises:
            UnsupportedModelError: if the model reads another modality, or its positions cannot be extended.
            CheckpointError: if it cannot be loaded.
        """
        if self.model == BERT_BASE:
            torch.manual_seed(0)
            model: PreTrainedModel = BertModel(BertConfig(num_hidden_layers=self.layers or 12), add_pooling_layer=False)
        else:
            loaded = load_model(self.model)
            self._check_reads(loaded.modality)
            model = loaded.model
        length = positions.current_length(model)
        if self.image_size is not None:
            positions.extend_image_size(model, self.image_size)
        elif length is not None and length < self.longest and not positions.runs_beyond_limit(model):
            positions.extend_positions(model, self.longest)
        return move(model.eval(), self.device, DTYPES[self.dtype])

    def _check_reads(self, modality: str) -> None:
        if modality == ("text" if self.image_size is None else "image"):
            return
        if modality == "image":
            raise UnsupportedModelError(
                f"bench: {self.model!r} reads images, whose size is in pixels; give --image-size N,N, or a text model"
            )
        if modality != "text":
            raise UnsupportedModelError(f"bench: {self.model!r} reads {modality}; choose a model of texts or images")
        raise ConfigError(f"image-size: {self.model!r} reads text, whose length is in tokens; give --lengths N,N")

    @cached_property
    def softmax(self) -> PreTrainedModel:
        """The softmax model; for a converted checkpoint, the original's class with the checkpoint's weights."""
        return softmax_model(self.linear) if self.converted else self.original

    @property
    def note(self) -> str | None:
        """A caveat about inputs longer than the model was trained for; None if there are no such inputs."""
        length = None if self.image_size is not None else positions.current_length(self.linear)
        if length is None or length >= self.longest:
            return None
        return (
            f"{self.model} was made for {length:,} tokens: its rotary positions continue beyond that, but were never "
            "trained there. The cost is the same."
        )

    @property
    def tokens(self) -> int:
        """Number of tokens per image.

        Raises:
            UnsupportedModelError: if it is not known.
        """
        length = positions.current_length(self.linear)
        if length is None:
            raise UnsupportedModelError(
                f"bench: the number of tokens per image of {self.model!r} is not known; choose another model"
            )
        return length

    @cached_property
    def linear(self) -> PreTrainedModel:
        """The model with kernels in its attention layers.

        Raises:
            ConfigError: if a converted checkpoint takes only shorter inputs, or the kernel does not fit.
        """
        if not self.converted:
            check_parts(self.hybrid, frozenset(ADDITIONS), "bench")
            additions = {name: getattr(self.hybrid, name) for name in ADDITIONS}
            return convert(copy.deepcopy(self.original), self.kernel, self.kernel_args, **additions).eval()
        loaded = load_converted(self.model, device=self.device)
        self._check_reads(loaded.modality)
        length, size = positions.current_length(loaded.model), positions.current_image_size(loaded.model)
        if self.image_size is not None:
            if size is not None and size != (self.image_size, self.image_size):
                raise ConfigError(
                    f"image-size: got {self.image_size}, but {self.model!r} takes images of {size[0]} x {size[1]} "
                    "pixels; leave it out, or convert with --image-size"
                )
        elif length is not None and length < self.longest and not positions.runs_beyond_limit(loaded.model):
            raise ConfigError(
                f"lengths: got {self.longest:,}, but {self.model!r} takes at most {length:,} tokens; leave it out, or "
                "convert with --max-length"
            )
        return move(loaded.model, dtype=DTYPES[self.dtype])

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        """Return a batch of texts with this many tokens each, or of images."""
        if self.image_size is not None:
            channels = getattr(self.linear.config, "num_channels", None) or 3
            shape = (self.batch, channels, self.image_size, self.image_size)
            return {"pixel_values": torch.zeros(shape, device=self.device, dtype=DTYPES[self.dtype])}
        rows = self.batch if self.batch_tokens is None else max(1, self.batch_tokens // tokens)
        return {"input_ids": torch.full((rows, tokens), 5, device=self.device)}

    def forward(self, tokens: int, *, model: PreTrainedModel | None = None, observer: Observer | None = None) -> Call:
        """Return a call that runs a forward pass without the head.

        Args:
            tokens: length of the input.
            model: the model that runs; None: the linear one.
            observer: replaces the kernels of the converted layers; None: the kernels run.
        """
        model, inputs = model or self.linear, self.inputs(tokens)
        observed = [] if observer is None else list(linear_attentions(model).values())

        @torch.no_grad()
        def forward() -> None:
            try:
                for layer in observed:
                    layer.observer = observer
                run_body(model, inputs)
            finally:
                for layer in observed:
                    layer.observer = None

        return forward


def values_only(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Observer that computes no attention: each token gets its own value, [B, K, T, V] -> [B, H, T, V]."""
    return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1) if q.shape[1] != k.shape[1] else v


def softmax_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the softmax model of a converted one: transformers' own class, with the converted model's weights.

    Raises:
        UnsupportedModelError: if transformers has no class for it.
    """
    name = type(model).__name__
    base: type[PreTrainedModel] | None = getattr(transformers, name, None)
    if base is None:
        raise UnsupportedModelError(f"bench: transformers has no class {name}; measure the original instead")
    values = {key: value for key, value in model.config.to_dict().items() if key not in ("linearize", "auto_map")}
    values["model_type"] = model.config.linearize["base_model_type"]
    with torch.device(model.device):
        made: PreTrainedModel = base(base_config_class(values["model_type"]).from_dict(values))
    made.load_state_dict(model.state_dict(), strict=False, assign=True)
    return made.eval()


@dataclass(frozen=True)
class OfModel(Suite):
    """A suite that measures a whole model.

    Attributes:
        model: the model and its kernel.
    """

    model: BenchModel = field(default_factory=BenchModel)

    @property
    def device(self) -> str:
        return self.model.device

    @property
    def note(self) -> str | None:
        return self.model.note

    def lengths(self, asked: Sequence[int]) -> Sequence[int]:
        """Return the lengths to measure at; an image has exactly one, which follows from its size."""
        return asked if self.model.image_size is None else (self.model.tokens,)

    def check(self) -> None:
        """Load the model, extend it to the longest input, and convert it."""
        _ = self.model.linear


class ModelSuite(OfModel):
    """One forward pass of a model."""

    name: ClassVar[str] = "model"
    variants: ClassVar[tuple[str, ...]] = ("softmax", "linear", "no attention")

    @property
    def what(self) -> str:
        return f"{self.model.label}, forward, {self.model.dtype}"

    def prepare(self, variant: str, tokens: int) -> Call:
        model, observer = side(self.model, variant)
        return self.model.forward(tokens, model=model, observer=observer)

    def figures(self, row: Row) -> dict[str, float | None]:
        """Return the upper bound on the model's speed-up."""
        figures = {"bound_speedup": row.times("softmax", over="no attention")}
        return figures if self.model.image_size is None else figures | {"image_size": float(self.model.image_size)}


def side(model: BenchModel, variant: str) -> tuple[PreTrainedModel, Observer | None]:
    """Return the model and the observer that compute a variant."""
    if variant == "no attention":
        return model.linear, values_only
    if variant == "linear":
        return model.linear, None
    # The layers of a converted checkpoint compute softmax themselves: an observer that returns None leaves it to SDPA.
    return (model.linear, lambda *_: None) if model.converted else (model.original, None)


class PairSuite(ModelSuite):
    """One forward pass of a converted model, compared with its own softmax; without the bound."""

    variants: ClassVar[tuple[str, ...]] = ("softmax", "linear")


class DecodeModelSuite(OfModel):
    """One new token after a context, through a whole causal model.

    The cost of a step does not depend on which tokens the context has, so only the first ones are read: their keys and
    values are repeated to fill the cache, and a state has the same size after any context. As in generation by
    transformers, softmax's step copies the cache into a longer one. Memory here is not that of a process, but the exact
    size of the cache or state kept between two tokens.
    """

    name: ClassVar[str] = "decode-model"
    calls: ClassVar[int] = 8
    memory_variants: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def kept(self) -> dict[tuple[str, int], int]:
        """Bytes kept between two tokens, by variant and context; `prepare` adds them."""
        return {}

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
                f"bench --decode: {self.model.model!r} is a {type(model).__name__}, not a causal decoder; name one "
                "such as gpt2, or leave --decode out"
            )
        fixed = next((layer.kernel for layer in layers if not layer.mixer.info.streamable), None)
        if fixed is not None:
            raise UnsupportedModelError(
                f"bench --decode: kernel {fixed!r} cannot decode in constant memory; choose another kernel"
            )

    def prepare(self, variant: str, tokens: int) -> Call:
        model = self.model.softmax if variant == "softmax" else self.model.linear
        cache: Cache = DynamicCache(config=model.config) if variant == "softmax" else make_cache(model)
        kept = cache_argument(model, cache)
        token = self.model.inputs(1)["input_ids"]
        with torch.no_grad():
            model(**self.model.inputs(min(PREFILL, tokens)), **kept, use_cache=True)
        set_context(cache, tokens)
        self.kept[variant, tokens] = cache_nbytes(cache)

        @torch.no_grad()
        def step() -> Tensor:
            out = model(input_ids=token, **kept, use_cache=True)
            set_context(cache, tokens)
            return out[0]

        return step

    def figures(self, row: Row) -> Mapping[str, float | None]:
        """Return the cache or state of each variant in MiB, and the speed-up of the first token in a turn."""
        kept = {name: self.kept.get((name, row.tokens)) for name in self.variants}
        figures = {f"{name}_kept_mib": None if count is None else count / 2**20 for name, count in kept.items()}
        return {**figures, "first_speedup": row.first_speedup()}


def set_context(cache: Any, context: int) -> None:
    """Turn a cache that has read some tokens into one that has read `context` tokens, in place.

    Keys and values are repeated or cut to the number that their layer keeps after `context` tokens.
    """
    for layer in cache.layers:
        if hasattr(layer, "store"):
            layer.tokens = context
            state = layer.state or {}
            if "seen" in state:
                state["seen"].fill_(context)
            growing = ("softmax_k", "softmax_v")
            state |= {name: _as_many(state[name], context) for name in growing if name in state}
            if "softmax_k" in state:
                state["softmax_mask"] = _as_many(state["softmax_mask"][..., None], context)[..., 0]
            if "all_k" in state:
                set_memory(state, context)
            continue
        if not layer.is_initialized or layer.keys.ndim < 3:
            continue
        wanted = min(context, layer.sliding_window - 1) if layer.is_sliding else context
        layer.keys, layer.values = _as_many(layer.keys, wanted), _as_many(layer.values, wanted)
        if layer.is_sliding:
            layer.cumulative_length = context


def set_memory(state: dict[str, Tensor], context: int) -> None:
    """Make a state with routed blocks remember `context` keys, without a copy if it has room for them."""
    k, v = state["all_k"], state["all_v"]
    # A multiple of the block size.
    size = k.shape[2]
    if size <= context:
        seen = int(state["tokens"].min())
        k, v = (_as_many(x[:, :, :seen], context + 1) for x in (k, v))
    for x in (k, v):
        x[:, :, context:] = 0.0
    count = torch.full_like(state["tokens"], context)
    state |= Memory.of(k, v, count, size).present() if k is not state["all_k"] else {"tokens": count}


def _as_many(x: Tensor, count: int) -> Tensor:
    """Cut or repeat [..., T, D] to `count` tokens; a cut makes no copy, which would cost time in a timed step."""
    return x[..., torch.arange(count, device=x.device) % x.shape[-2], :] if count > x.shape[-2] else x[..., :count, :]
