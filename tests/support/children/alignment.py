"""Align tiny models in one process or in several."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from linearize.training.alignment import loop
from linearize.training.alignment.config import AlignConfig
from support.children.tuning import most_of_a_process
from support.training import ALIGN, Split, batches, loud_converted

CAUSAL = "AutoModelForCausalLM"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "blocks": ("bert", "AutoModelForSequenceClassification", {}),
    "kernels": ("bert", "AutoModel", {"train": "kernels"}),
    "attention": ("llama", CAUSAL, {"train": "attention", "gradient_accumulation": 2}),
    "low rank": ("llama", CAUSAL, {"train": "lora"}),
    "bf16": ("bert", "AutoModel", {}),
}
"""Host, head and options by name; the model of "bf16" is stored so."""


class InTurn(Split):
    """In one process: the parts of several processes, one after the other."""

    def __init__(self, batches: Sequence[Mapping[str, Tensor]], count: int) -> None:
        super().__init__(batches)
        self.count = count

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        count = self.count
        parts = [super(InTurn, self).train_batches(start // count, part, count) for part in range(count)]
        while True:
            yield from map(next, parts)


class Same(torch.autograd.Function):
    """The identity, as a step of its own for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def add_like_fsdp(model: nn.Module) -> None:
    """Add up the gradient of each block's input before that of its state in the loss is added, as FSDP's hooks do.

    Under autocast these sums are rounded to bf16, so their order shows.
    """
    for name in loop.find_blocks(model):  # type: ignore[arg-type]
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, given: tuple(Same.apply(x) if getattr(x, "requires_grad", False) else x for x in given)
        )


def run(case: str, kind: str = "", count: int = 1, **options: Any) -> dict[str, Tensor]:
    """Align one model, and return weights, losses, and the figures before and after.

    Args:
        case: one of `CASES`.
        kind: in one process, "ddp" and "fsdp" for the order of sums of several; empty for whole batches.
        count: their number.
        options: more options.
    """
    name, head, own = CASES[case]
    model = loud_converted(name, head)
    if case == "bf16":
        model = model.to(torch.bfloat16)
    config = AlignConfig(**ALIGN | {"steps": 8, "eval_every": 2} | own | options)
    data = Split(batches(model))
    if kind:
        accumulated = count * config.gradient_accumulation
        data, config = InTurn(batches(model), count), replace(config, gradient_accumulation=accumulated)
    if kind == "fsdp":
        add_like_fsdp(model)
    stop = int(os.environ.get("STOP_AFTER", "0"))

    def on_step(report: loop.AlignStep) -> None:
        if report.step == stop:
            os.kill(os.getpid(), signal.SIGKILL)

    result = loop.align(model, data, config, on_step=on_step)
    losses = torch.tensor([report.loss for report in result.history])
    figures = {"losses": losses, "figures": torch.tensor([result.before.loss, result.after.loss])}
    return {name: x.clone().contiguous() for name, x in model.state_dict().items()} | figures


def main(folder: str, cases: Sequence[str], options: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Align one model after the other, and save what was trained, once; under FSDP each process has its part."""
    torch.set_num_threads(1)
    shard, sharded = loop.Shards, []

    def check(*given: Any, **options: Any) -> Any:
        shards = shard(*given, **options)
        weights = list(shards.model.parameters())
        assert all(isinstance(weight, DTensor) for weight in weights)
        own = sum(weight.to_local().numel() for weight in weights)
        assert own < most_of_a_process() * sum(weight.numel() for weight in weights)
        sharded.append(shards)
        return shards

    loop.Shards = check
    for case in cases:
        found = run(case, **options)
        if int(os.environ["RANK"]) == 0:
            save_file(found, Path(folder) / f"{case}.safetensors")
    assert len(sharded) == (len(cases) if "ACCELERATE_USE_FSDP" in os.environ else 0)
