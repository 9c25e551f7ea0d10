"""Distil tiny models in one process or in several: kind `one`, `ddp` or `fsdp`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import linearize.training.stage_one.loop as loop
from linearize.jobs.config import ConvertJob, DistillJob
from linearize.jobs.convert import convert_checkpoint, distill_checkpoint
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


def split(folder: Path, size: int) -> None:
    """Write a checkpoint's weights again, in files of a few bytes."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=size)


def job(root: Path, verb: str, model: str, output: str, options: Mapping[str, object]) -> None:
    """Convert a model in a folder, or distil it further."""
    names = {"model": str(root / model), "dataset": str(root / "texts.jsonl"), "output": str(root / output)}
    if verb == "convert":
        convert_checkpoint(ConvertJob.of(**names, **{"align_steps": 0, **options}))
    else:
        distill_checkpoint(DistillJob.of(**names, **options))


def aligned(root: Path, models: Sequence[str], count: str, options: Mapping[str, object]) -> None:
    """Convert models in a folder, with an alignment."""
    torch.set_num_threads(1)
    for name in models:
        job(root, "convert", name, f"{name} {count}", options)


def sharded_jobs(
    root: Path, jobs: Sequence[tuple[str, str, str]], options: Mapping[str, object], in_files: Collection[str]
) -> None:
    """Do jobs (verb, model, output) under FSDP, and check what of the models named `in_files` is in memory."""
    torch.set_num_threads(1)
    make = loop.frozen_model

    def check(model: torch.nn.Module, *rest: object) -> torch.nn.Module:
        copied = make(model, *rest)
        large = [name for name, x in model.named_parameters() if x.ndim > 1 and ".linear_attention." not in name]
        # Position embeddings are outside of the blocks.
        stays = [name for name in large if "embed_positions" not in name and "wpe" not in name]
        if name.split()[0] in in_files:
            assert all(model.get_parameter(key).is_meta for key in stays), [
                key for key in stays if not model.get_parameter(key).is_meta
            ]
        parts = [x for x in copied.base_model.parameters() if isinstance(x, DTensor)]
        assert sum(x.to_local().numel() for x in parts) < 0.6 * sum(x.numel() for x in parts)
        return copied

    loop.frozen_model = check
    for verb, name, output in jobs:
        job(root, verb, name, output, options)
