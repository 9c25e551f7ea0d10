"""Distil tiny models in one process or in several: kind `one`, `ddp` or `fsdp`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import linearize.training.stage_one.loop as loop
from linearize.jobs.config import AlignJob, ConvertJob, DistillJob
from linearize.jobs.convert import align_checkpoint, convert_checkpoint, distill_checkpoint
from linearize.jobs.events import Callback, ignore
from linearize.modeling import offload
from linearize.training import sharding
from linearize.training.stage_one import DistillConfig
from support.children.tuning import STAYS, interrupt, most_of_a_process
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
        assert sum(p.to_local().numel() for p in local) < most_of_a_process() * sum(p.numel() for p in local)
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


def job(
    root: Path, verb: str, model: str, output: str, options: Mapping[str, object], on_event: Callback = ignore
) -> None:
    """Convert a model in a folder, or distil or align it further."""
    options = {name: str(root / str(value)) if name == "teacher" else value for name, value in options.items()}
    names: dict[str, Any] = {"dataset": str(root / "texts.jsonl"), "output": str(root / output), **options}
    names["model"] = str(root / model)
    if verb == "convert":
        convert_checkpoint(ConvertJob.of(**{"align_steps": 0, **names}), on_event)
    elif verb == "align":
        align_checkpoint(AlignJob.of(**names), on_event)
    else:
        distill_checkpoint(DistillJob.of(**names), on_event)


def aligned(
    root: Path, jobs: Sequence[tuple[str, str, str, Mapping[str, Any]]], whole: bool = False, stop: int = 0
) -> None:
    """Do jobs (verb, model, output, options) under FSDP, and check that large weights stay in their files.

    With `whole` each process first reads all weights. With `stop` each job is interrupted after a step, and resumed.
    """
    torch.set_num_threads(1)
    fill = sharding.fill
    if whole:
        offload.load_in_files = lambda empty, load, device: load()

    def filled(copied: Any, model: Any, *given: Any, **more: Any) -> None:
        large = [x for name, x in model.named_parameters() if x.ndim > 1 and STAYS.match(name)]
        assert large and all(isinstance(x, DTensor) or x.is_meta is not whole for x in large)
        fill(copied, model, *given, **more)

    sharding.fill = filled
    for *names, options in jobs:
        if stop:
            with contextlib.suppress(KeyboardInterrupt):
                job(root, *names, options, interrupt(stop))
            torch.distributed.barrier()
            assert not (root / names[-1]).exists()
        job(root, *names, options | {"resume": True} if stop else options)


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
        assert sum(x.to_local().numel() for x in parts) < most_of_a_process() * sum(x.numel() for x in parts)
        return copied

    loop.frozen_model = check
    for verb, name, output in jobs:
        job(root, verb, name, output, options)
