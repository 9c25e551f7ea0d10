"""Distil tiny models in one process or in several: kind `one`, `ddp` or `fsdp`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import linearize.training.stage_one.loop as loop
from linearize.training.stage_one import DistillConfig
from support.training import Split, batches, sharp

HEADS = {"gpt2": "AutoModelForCausalLM"}


def run(name: str, kind: str) -> dict[str, torch.Tensor]:
    """Distil one model, given as `host` or `host/kernel`, and return its weights, losses and last figure."""
    name, _, kernel = name.partition("/")
    model = sharp(name, HEADS.get(name, "AutoModel"), kernel=kernel or "hedgehog")
    accelerator, spread, make = loop.make_accelerator(model), [], loop.frozen_model
    plain = accelerator.state.distributed_type
    if kind == "fsdp":
        # accelerate's own configuration turns FSDP on for accelerators only; torch shards on a CPU as well.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        loop.frozen_model = lambda *args: spread.append(make(*args)) or spread[0]
    try:
        config = DistillConfig(steps=6, eval_every=2)
        result = loop.distill(model, Split(batches(model)), config, accelerator=accelerator)
    finally:
        loop.frozen_model, accelerator.state.distributed_type = make, plain
    if kind == "fsdp":
        base = model.base_model
        local = [p for p in spread[0].base_model.parameters() if isinstance(p, DTensor)]
        kernels = [p for n, p in base.named_parameters() if ".linear_attention." in n]
        assert len(local) == len(list(base.parameters())) - len(kernels)
        assert sum(p.to_local().numel() for p in local) < 0.6 * sum(p.numel() for p in local)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    losses = torch.tensor([[*report.losses.values()] for report in result.history])
    state = {k: v.clone().contiguous() for k, v in model.state_dict().items()}
    return state | {"losses": losses, "after": torch.tensor(result.after.mean("kl"))}


def main(folder: str, jobs: Sequence[str]) -> None:
    """Run the jobs one after the other; each is `model:kind`, and goes to FOLDER/<job>.safetensors, without slashes."""
    torch.set_num_threads(1)
    for job in jobs:
        found = run(*job.split(":"))
        if int(os.environ.get("RANK", "0")) == 0:
            save_file(found, Path(folder) / f"{job.replace('/', ' ')}.safetensors")
