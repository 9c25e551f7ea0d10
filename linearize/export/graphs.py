"""The graphs that a model is exported as: modules whose inputs and outputs are tensors.

A model that generates text has two graphs: `model` reads a prompt, and returns the logits and the state after it;
`step` reads one token and a state, and returns the logits and the state after that token. Other models, such as
decoders that classify a text, have one graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from linearize.attention.cache import cache_argument, text_config
from linearize.attention.hybrid import CACHED
from linearize.attention.interface import linear_attentions
from linearize.conversion.inputs import candidates
from linearize.core.errors import UnsupportedModelError, first_line

BATCH, TOKENS, PAST = "batch", "tokens", "past"
"""Names of the sizes that a graph leaves open."""
BEFORE, AFTER = "past.", "present."
"""Prefixes for the names of states that a graph reads, and of those that it returns."""
COUNT, SEEN = "tokens", "mask"
"""States that belong to no layer: the tokens that each row has seen, [B], and which of them were real, [B, P]."""
_KEYS = ["keys", "values"]
GROWING = {"keys": 2, "values": 2, **dict(zip(CACHED, (2, 2, 1), strict=True))}
"""States that grow with the text, and their axis of tokens: those of layers, and of heads, that stay softmax."""
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")


@dataclass(frozen=True)
class Graph:
    """One graph of a model, before it is exported.

    Attributes:
        name: "model" or "step".
        module: module that takes the inputs in this order, and returns the outputs as a tuple.
        inputs: example tensors by name.
        outputs: names of the outputs.
        sizes: name of each open dimension, by input.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    sizes: dict[str, dict[int, str]]

    def program(self) -> torch.export.ExportedProgram:
        """Export it with torch.export; its open sizes are dynamic.

        Raises:
            UnsupportedModelError: if the model cannot be exported, or only for one length.
        """
        shapes = {name: dict.fromkeys(open_, torch.export.Dim.DYNAMIC) for name, open_ in self.sizes.items()}
        try:
            with torch.no_grad():
                return torch.export.export(
                    self.module, tuple(self.inputs.values()), dynamic_shapes=(tuple(shapes.values()),), strict=False
                )
        except Exception as error:
            text = " ".join(str(error).split())
            raise UnsupportedModelError(
                f"{self.name}: torch.export cannot export this model with open sizes ({type(error).__name__}: "
                f"{text[:300]}); expected a model whose computation does not depend on them"
            ) from error

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the module on inputs by name, without gradients."""
        with torch.no_grad():
            return dict(zip(self.outputs, self.module(*(inputs[name] for name in self.inputs)), strict=True))


class _Whole(nn.Module):
    """A model without a state."""

    def __init__(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def named(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Run the model and return its outputs by name."""
        more = {"use_cache": False} if _takes(self.model, "use_cache") else {}
        found = self.model(**dict(zip(self.names, tensors, strict=True)), **more, return_dict=True)
        return {key: value for key, value in found.items() if torch.is_tensor(value)}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run it."""
        return tuple(self.named(*tensors).values())


class _Writer(nn.Module):
    """A model that generates text, with its state as separate tensors.

    Attributes:
        keys: names of each layer's state, in the order of the tensors.
        masked: whether a layer that stays softmax needs to know where padding was.
        output: name of the model's main output.
    """

    def __init__(self, model: Any, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output
        cache = self.model.new_cache()
        mask = torch.ones(1, 2, dtype=torch.long)
        with torch.no_grad():
            self.model(input_ids=_ids(model, 1, 2), attention_mask=mask, **cache_argument(self.model, cache))
        self.keys = []
        for layer in cache.layers:
            if not hasattr(layer, "store") and type(layer) is not DynamicLayer:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: got a layer that remembers a {type(layer).__name__}, expected a state, "
                    "or all keys and values; convert every layer (--local-as-full for those with a window)"
                )
            self.keys.append(list(layer.state) if hasattr(layer, "store") else list(_KEYS))
        self.masked = any(keys == _KEYS for keys in self.keys)

    @property
    def states(self) -> list[str]:
        """Names of all tensors of the state, without `BEFORE` or `AFTER`."""
        layers = [f"{number}.{key}" for number, keys in enumerate(self.keys) for key in keys]
        return [COUNT, *([SEEN] if self.masked else []), *layers]

    def _run(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> tuple[Tensor, list[Tensor]]:
        texts = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        outputs = self.model(**texts, **cache_argument(self.model, cache), return_dict=True)
        kept = []
        for layer, keys in zip(cache.layers, self.keys, strict=True):
            source = vars(layer) if keys == _KEYS else layer.state
            kept += [source[key] for key in keys]
        return outputs[self.output], kept


class _Prompt(_Writer):
    """Reads a prompt: input_ids and attention_mask [B, T] -> logits [B, T, V] and the state after it."""

    def __init__(self, model: PreTrainedModel, output: str, last: bool) -> None:
        super().__init__(model, output)
        self.last = last

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run it."""
        input_ids, attention_mask = tensors
        counted = attention_mask.cumsum(dim=-1)
        cache = self.model.new_cache()
        out, kept = self._run(input_ids, attention_mask, (counted - 1).clamp(min=0), cache)
        out = out[:, -1:] if self.last else out
        return (out, counted[:, -1], *([attention_mask.clone()] if self.masked else []), *kept)


class _Step(_Writer):
    """Reads one token: input_ids [B, 1] and a state -> logits [B, 1, V] and the state after it."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run it."""
        input_ids, count, *states = tensors
        mask = None
        if self.masked:
            mask = torch.cat([states.pop(0), torch.ones_like(input_ids)], dim=1)
        cache, rest = self.model.new_cache(), iter(states)
        for layer, keys in zip(cache.layers, self.keys, strict=True):
            state = {key: next(rest) for key in keys}
            if keys == _KEYS:
                layer.lazy_initialization(state["keys"], state["values"])
                layer.keys, layer.values = state["keys"], state["values"]
            else:
                layer.state = state
        out, kept = self._run(input_ids, mask, count[:, None], cache)
        return (out, count + 1, *([mask] if mask is not None else []), *kept)


def graphs_of(model: PreTrainedModel, *, last_logits: bool = False) -> list[Graph]:
    """Return the graphs of a converted model, which must be on the CPU, in fp32 and in evaluation mode.

    Args:
        model: a converted model.
        last_logits: whether a model that generates text returns only the logits of a prompt's last token.

    Raises:
        UnsupportedModelError: for encoder-decoders, and decoders whose state is more than sums, keys and values.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__}: got an encoder-decoder, expected an encoder, a decoder or an image model"
        )
    causal = any(layer.shape.causal for layer in linear_attentions(model).values())
    output = None
    if causal and _takes(model, "use_cache"):
        with torch.no_grad():
            found = model(input_ids=_ids(model, 1, 2), use_cache=False, return_dict=True)
        # The output for every token; a head that classifies texts has none.
        output = next(
            (name for name in ("logits", "last_hidden_state") if name in found and found[name].ndim > 2), None
        )
    if output is None:
        return [_whole_graph(model)]
    if not _takes(model, "position_ids"):
        raise UnsupportedModelError(
            f"{type(model).__name__} takes no position_ids, expected a decoder that does: a step would not know "
            "its position in the text"
        )
    prompt, step = _Prompt(model, output, last_logits), _Step(model, output)
    ids = _ids(model, 2, 7)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    outputs = (output, *(AFTER + name for name in prompt.states))
    sizes = {name: {0: BATCH, 1: TOKENS} for name in inputs}
    first = Graph("model", prompt, inputs, outputs, sizes)
    results = first.run(inputs)
    state = {"input_ids": ids[:, -1:], **{BEFORE + name: results[AFTER + name] for name in prompt.states}}
    sizes = {name: {0: BATCH} for name in state}
    for name in state:
        if name == BEFORE + SEEN:
            sizes[name][1] = PAST
        elif (axis := GROWING.get(name.rpartition(".")[2])) is not None:
            sizes[name][axis] = PAST
    return [first, Graph("step", step, state, outputs, sizes)]


def _whole_graph(model: PreTrainedModel) -> Graph:
    inputs: dict[str, Tensor] = {}
    error: Exception | None = None
    for example in candidates(model):
        inputs = {key: x for key, x in example.items() if torch.is_tensor(x)}
        if "input_ids" in inputs:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            if _takes(model, "token_type_ids") and getattr(model.config, "type_vocab_size", 0) > 1:
                inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        module = _Whole(model, list(inputs))
        # torch.export treats a size of one as a constant.
        inputs = {key: torch.cat([x, x]) for key, x in inputs.items()}
        try:
            with torch.no_grad():
                outputs = tuple(module.named(*inputs.values()))
            break
        except Exception as failed:
            error = failed
    else:
        assert error is not None
        raise UnsupportedModelError(
            f"{type(model).__name__}: no made-up input fits it ({first_line(error)}), expected a model that takes "
            "tokens or an image"
        ) from error
    sizes = {key: {0: BATCH, **({1: TOKENS} if key in _TEXT else {})} for key in inputs}
    return Graph("model", module, inputs, outputs, sizes)


def _ids(model: PreTrainedModel, batch: int, tokens: int) -> Tensor:
    vocabulary = int(text_config(model.config).vocab_size)
    return (torch.arange(batch * tokens).view(batch, tokens) * 7 + 3) % vocabulary


def _takes(model: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters
