"""Models to measure: a checkpoint, a converted one, or only the sizes of a known architecture with random weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention, Observer
from linearize.bench.machine import DTYPES
from linearize.bench.timing import Call
from linearize.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BERT_BASE = "bert-base"
"""The name that stands for BERT's sizes (12 layers, 12 heads of size 64), random weights and no network."""


@dataclass(frozen=True)
class BenchModel:
    """A text model and its linear form.

    Attributes:
        model: Hub name or folder of a checkpoint, converted or not, or `BERT_BASE`.
        kernel: kernel for a model that is not converted yet.
        kernel_args: its arguments.
        window: tokens of a softmax window joined to it, or None.
        layers: layers of `BERT_BASE`; None: its own 12.
        longest: longest input that it will get; learned positions are extended to it.
        batch: sequences per input.
        dtype: type of the weights.
        device: where it runs.
    """

    model: str = BERT_BASE
    kernel: str = "hedgehog"
    kernel_args: Mapping[str, object] = field(default_factory=dict)
    window: int | None = None
    layers: int | None = None
    longest: int = 512
    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"

    @classmethod
    def of(cls, model: PreTrainedModel, folder: str | None, *, longest: int) -> BenchModel:
        """Take a converted model that is loaded already.

        Args:
            model: the model.
            folder: where it is saved, for processes that load it again; None: there are none.
            longest: longest input that it will get.
        """
        dtype = str(model.dtype).removeprefix("torch.")
        made = cls(folder or type(model).__name__, longest=longest, dtype=dtype, device=str(model.device))
        # What these cached properties would load.
        made.__dict__.update(converted=True, linear=model)
        return made

    @cached_property
    def converted(self) -> bool:
        """Whether it is a converted checkpoint."""
        if self.model == BERT_BASE:
            return False
        from linearize.loading import model_type

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
        """The softmax model, long enough; not for converted checkpoints.

        Raises:
            UnsupportedModelError: if it is no text model, or its positions cannot be extended.
            CheckpointError: if it cannot be loaded.
        """
        from linearize.loading import move
        from linearize.surgery.positions import current_length, extend_positions

        model = self._bert() if self.model == BERT_BASE else self._loaded()
        length = current_length(model)
        if length is not None and length < self.longest:
            extend_positions(model, self.longest)
        return move(model.eval(), self.device, DTYPES[self.dtype])

    def _bert(self) -> PreTrainedModel:
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        return BertModel(BertConfig(num_hidden_layers=self.layers or 12), add_pooling_layer=False)

    def _loaded(self) -> PreTrainedModel:
        from linearize.loading import load_model

        loaded = load_model(self.model)
        self._check_text(loaded.modality)
        return loaded.model

    def _check_text(self, modality: str) -> None:
        if modality != "text":
            raise UnsupportedModelError(
                f"bench: {self.model!r} reads {modality}, whose length is fixed; choose a text model"
            )

    @cached_property
    def linear(self) -> PreTrainedModel:
        """The model with kernels in its attentions.

        Raises:
            ConfigError: if a converted checkpoint takes shorter inputs only, or the kernel does not fit.
        """
        from linearize.surgery.apply import convert

        if not self.converted:
            return convert(copy.deepcopy(self.original), self.kernel, self.kernel_args, window=self.window).eval()
        from linearize.loading import load_converted, move
        from linearize.surgery.positions import current_length

        loaded = load_converted(self.model, device=self.device)
        self._check_text(loaded.modality)
        length = current_length(loaded.model)
        if length is not None and length < self.longest:
            raise ConfigError(
                f"lengths: got {self.longest:,}, but {self.model!r} takes at most {length:,} tokens; leave it out, or "
                "convert with --max-length"
            )
        return move(loaded.model, dtype=DTYPES[self.dtype])

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        """Make an input of so many tokens."""
        return {"input_ids": torch.full((self.batch, tokens), 5, device=self.device)}

    def softmax_forward(self, tokens: int) -> Call:
        """Return a forward of the softmax model; of a converted checkpoint, whose own weights compute softmax."""
        if self.converted:
            return self.observed_forward(tokens, lambda *_: None)
        return _forward(self.original, self.inputs(tokens))

    def linear_forward(self, tokens: int) -> Call:
        """Return a forward of the linear model."""
        return _forward(self.linear, self.inputs(tokens))

    def observed_forward(self, tokens: int, observer: Observer) -> Call:
        """Return a forward of the linear model whose layers compute what `observer` says."""
        layers = list(linear_attentions(self.linear).values())
        forward = _forward(self.linear, self.inputs(tokens))

        def call() -> None:
            try:
                for layer in layers:
                    layer.observer = observer
                forward()
            finally:
                for layer in layers:
                    layer.observer = None

        return call


def _forward(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Call:
    from linearize.teacher.observe import run_body

    @torch.no_grad()
    def forward() -> None:
        run_body(model, inputs)

    return forward


def values_only(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Observe by doing no attention at all: each token gets its own value, [B, K, T, V] -> [B, H, T, V]."""
    return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1) if q.shape[1] != k.shape[1] else v
