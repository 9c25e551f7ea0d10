"""Models to measure: a checkpoint, a converted one, or BERT's sizes with random weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
import transformers
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention, Observer
from linearize.checkpoint.loading import load_converted, load_model, model_type, move
from linearize.conversion.plan import convert
from linearize.conversion.positions import (
    current_image_size,
    current_length,
    extend_image_size,
    extend_positions,
    runs_beyond_limit,
)
from linearize.core.errors import ConfigError, UnsupportedModelError
from linearize.core.registry import PLAIN, Hybrid
from linearize.evaluation.bench.machine import DTYPES
from linearize.evaluation.bench.meter import Call
from linearize.fidelity.teacher import run_body
from linearize.modeling.config import base_config_class

BERT_BASE = "bert-base"
"""The name of a model of BERT's sizes (12 layers, 12 heads of size 64) with random weights; needs no network."""


@dataclass(frozen=True)
class BenchModel:
    """A model and its linear form; both are loaded when they are first asked for, and not pickled.

    Attributes:
        model: Hub name or folder of a checkpoint, converted or not, or `BERT_BASE`.
        kernel: kernel for a model that is not converted yet.
        kernel_args: its arguments.
        hybrid: what its attentions have in addition to the kernel.
        layers: layers of `BERT_BASE`; None: its own 12.
        longest: longest input that it will get; learned positions are extended to it.
        image_size: pixels of the pictures, height and width; None: a text model.
        batch: sequences per input.
        batch_tokens: if given, a batch has as many sequences as have so many tokens, at least one.
        dtype: type of the weights.
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
    def of(
        cls, model: PreTrainedModel, folder: str | None, *, longest: int = 512, image_size: int | None = None
    ) -> BenchModel:
        """Make one of a converted model that is loaded already.

        Args:
            model: the model.
            folder: where it is saved, for processes that load it again; None: no other process measures it.
            longest: longest input that it will get.
            image_size: pixels of the pictures that it reads; None: it reads text.
        """
        dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
        name = folder or type(model).__name__
        made = cls(name, longest=longest, image_size=image_size, dtype=dtype, device=device)
        # What these cached properties would load.
        made.__dict__.update(converted=True, linear=model)
        return made

    @cached_property
    def converted(self) -> bool:
        """Whether it is a converted checkpoint."""
        if self.model == BERT_BASE:
            return False

        return model_type(self.model) == "linearize"

    @property
    def label(self) -> str:
        """The model and its kernel, for people."""
        if self.converted:
            return self.model
        sizes = f"{self.model} sizes, {self.layers or 12} layers" if self.model == BERT_BASE else self.model
        return f"{sizes}, {self.kernel}"

    @cached_property
    def original(self) -> PreTrainedModel:
        """The softmax model, extended to the longest input; not for converted checkpoints.

        Raises:
            UnsupportedModelError: if it reads other inputs, or its positions cannot be extended.
            CheckpointError: if it cannot be loaded.
        """
        if self.model == BERT_BASE:
            model: PreTrainedModel = self._bert()
        else:
            loaded = load_model(self.model)
            self._check_reads(loaded.modality)
            model = loaded.model
        length = current_length(model)
        if self.image_size is not None:
            extend_image_size(model, self.image_size)
        elif length is not None and length < self.longest and not runs_beyond_limit(model):
            extend_positions(model, self.longest)
        return move(model.eval(), self.device, DTYPES[self.dtype])

    def _bert(self) -> PreTrainedModel:
        torch.manual_seed(0)
        return BertModel(BertConfig(num_hidden_layers=self.layers or 12), add_pooling_layer=False)

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
        """The softmax model; of a converted checkpoint the original's class with the checkpoint's weights."""
        return softmax_model(self.linear) if self.converted else self.original

    @property
    def note(self) -> str | None:
        """What a reader must know of inputs that the model was not made for; None if there are no such inputs."""
        length = None if self.image_size is not None else current_length(self.linear)
        if length is None or length >= self.longest:
            return None
        return (
            f"{self.model} was made for {length:,} tokens: its rotary positions continue beyond them, but were never "
            "trained there. Its cost is the same."
        )

    @property
    def tokens(self) -> int:
        """Tokens of a picture.

        Raises:
            UnsupportedModelError: if they are not known.
        """
        length = current_length(self.linear)
        if length is None:
            raise UnsupportedModelError(
                f"bench: the tokens of a picture of {self.model!r} are not known; choose another"
            )
        return length

    @cached_property
    def linear(self) -> PreTrainedModel:
        """The model with kernels in its attentions.

        Raises:
            ConfigError: if a converted checkpoint takes shorter inputs only, or the kernel does not fit.
        """
        if not self.converted:
            hybrid = {name: getattr(self.hybrid, name) for name in ("window", "sinks", "exact_keys", "scale")}
            return convert(copy.deepcopy(self.original), self.kernel, self.kernel_args, **hybrid).eval()
        loaded = load_converted(self.model, device=self.device)
        self._check_reads(loaded.modality)
        self._check_size(loaded.model)
        return move(loaded.model, dtype=DTYPES[self.dtype])

    def _check_size(self, model: PreTrainedModel) -> None:
        """Refuse inputs of a size that a converted checkpoint does not take."""
        length, size = current_length(model), current_image_size(model)
        if self.image_size is not None:
            if size is not None and size != (self.image_size, self.image_size):
                raise ConfigError(
                    f"image-size: got {self.image_size}, but {self.model!r} takes pictures of {size[0]} x {size[1]} "
                    "pixels; leave it out, or convert with --image-size"
                )
            return
        if length is not None and length < self.longest and not runs_beyond_limit(model):
            raise ConfigError(
                f"lengths: got {self.longest:,}, but {self.model!r} takes at most {length:,} tokens; leave it out, or "
                "convert with --max-length"
            )

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        """Make an input of so many tokens, or a picture."""
        if self.image_size is not None:
            channels = getattr(self.linear.config, "num_channels", None) or 3
            shape = (self.batch, channels, self.image_size, self.image_size)
            return {"pixel_values": torch.zeros(shape, device=self.device, dtype=DTYPES[self.dtype])}
        rows = self.batch if self.batch_tokens is None else max(1, self.batch_tokens // tokens)
        return {"input_ids": torch.full((rows, tokens), 5, device=self.device)}

    def forward(self, tokens: int, *, model: PreTrainedModel | None = None, observer: Observer | None = None) -> Call:
        """Return a forward without the head.

        Args:
            tokens: of the input.
            model: the model that runs; None: the linear one.
            observer: what its converted layers compute instead of their kernels, if given.
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
    """Observe by computing no attention at all: each token gets its own value, [B, K, T, V] -> [B, H, T, V]."""
    return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1) if q.shape[1] != k.shape[1] else v


def softmax_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the softmax model of a converted one: transformers' own class, with the converted model's weights.

    Raises:
        UnsupportedModelError: if transformers has no class for it.
    """
    name = type(model).__name__.removeprefix("Linearized")
    base: type[PreTrainedModel] | None = getattr(transformers, name, None)
    if base is None:
        raise UnsupportedModelError(f"bench: transformers has no class {name}; measure the original instead")
    values = {key: value for key, value in model.config.to_dict().items() if key not in ("linearize", "auto_map")}
    values["model_type"] = model.config.linearize["base_model_type"]
    with torch.device(model.device):
        made: PreTrainedModel = base(base_config_class(values["model_type"]).from_dict(values))
    made.load_state_dict(model.state_dict(), strict=False, assign=True)
    return made.eval()
