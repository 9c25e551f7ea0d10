"""What the tests of stage one and of alignment train on: sharp tiny models and batches of made-up tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from support.tiny import inputs_of, original

ALIGN = {"steps": 16, "eval_every": 4, "learning_rate": 2e-3, "kernel_learning_rate": 1e-2}
"""Options of a short alignment."""

SCORES = ("query.weight", "key.weight", "q_proj.weight", "k_proj.weight", "c_attn.weight")


class Fixed:
    """Batches from a list, over and over."""

    def __init__(self, batches: Sequence[Any], held_out: Sequence[Any] | None = None):
        self.batches, self.held_out = batches, held_out or batches[:1]

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self.batches), start, None)

    def holdout_batches(self) -> Sequence[Any]:
        return self.held_out


class Split:
    """The same batches, each process with its part of every one of them."""

    def __init__(self, batches: Sequence[Mapping[str, Tensor]]):
        self.batches = batches

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        for batch in itertools.islice(itertools.cycle(self.batches), start, None):
            size = len(next(iter(batch.values()))) // world_size
            yield {name: value[rank * size : (rank + 1) * size] for name, value in batch.items()}

    def holdout_batches(self) -> Sequence[Mapping[str, Tensor]]:
        return self.batches[:1]


def sharp(name: str, head: str = "AutoModel", **options: Any) -> PreTrainedModel:
    """Convert a tiny model whose softmax is far from flat, as a trained one's is."""
    model = original(name, head)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(part in key for part in SCORES):
                parameter.mul_(8)
    return linearize.convert(model, **options)


def loud(name: str, head: str = "AutoModel", **overrides: Any) -> PreTrainedModel:
    """Build a tiny softmax model whose attention is sharp and counts for much, as a trained one's does."""
    model = original(name, head, **overrides)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in key and "wte" not in key and "wpe" not in key:
                parameter.mul_(8)
    return model


def loud_converted(name: str, head: str = "AutoModel", **options: Any) -> PreTrainedModel:
    """Convert a model made by `loud`."""
    return linearize.convert(loud(name, head), **options)


def batches(model: PreTrainedModel, count: int = 4) -> list[dict[str, Tensor]]:
    """Make batches of four rows: random tokens, some padded, or images."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        batch = inputs_of(model, batch=4, tokens=12)
        if "input_ids" in batch:
            batch["input_ids"] = torch.randint(3, 90, batch["input_ids"].shape, generator=generator)
        made.append(batch)
    return made
