"""Tune tiny checkpoints by their jobs, in one process or in several."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from linearize.jobs.events import Callback, StepDone, ignore
from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.task_config import TuneJob
from linearize.modeling import offload
from linearize.training import sharding

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
"""The environment in which accelerate's launcher starts FSDP 2."""
STAYS = re.compile(r"(?!.*(linear_attention\.|lora_)).*\.\d+\.")
"""Names of weights that stay in their files: those of blocks, without kernels and low-rank updates."""


def main(model: str, dataset: str, output: str, options: Mapping[str, object], on_event: Callback = ignore) -> None:
    """Tune; all processes end with one result."""
    torch.set_num_threads(1)
    _, result = finetune_checkpoint(TuneJob.of(model=model, dataset=dataset, output=output, **options), on_event)
    seen = f"{result.score} {result.best_step} {result.selection['value']}"
    print(f"process {os.environ.get('RANK', '0')}: {seen}")
    if "RANK" in os.environ:
        found: list[object] = [None] * int(os.environ["WORLD_SIZE"])
        torch.distributed.all_gather_object(found, seen)
        assert len(set(found)) == 1, found


def most_of_a_process() -> float:
    """The largest share of all weights that a process may have: a little more than one over their number.

    Sizes that are no multiple of it are not shared evenly.
    """
    return 1.2 / int(os.environ["WORLD_SIZE"])


def interrupt(step: int) -> Callback:
    """Return what ends a run after a step."""

    def on_event(event: object) -> None:
        if isinstance(event, StepDone) and event.report.step == step:
            raise KeyboardInterrupt

    return on_event


def whole(jobs: Sequence[Mapping[str, Any]]) -> None:
    """Tune one model after the other as `sharded` does, but each process first reads all weights."""
    offload.load_in_files = lambda empty, load, device: load()
    for job in jobs:
        main(**job)


def sharded(jobs: Sequence[Mapping[str, Any]], step: int = 0, parts: Mapping[str, Any] | None = None) -> None:
    """Tune one model after the other; each process has about a half of every model that it computes with.

    Blocks, embedding and head stay in their files. With `parts` also in two parts: until after a step, then resumed.
    """
    fill = sharding.fill

    def filled(copied: Any, model: Any, *given: Any, **more: Any) -> None:
        stays = [x.is_meta for name, x in model.named_parameters() if x.ndim > 1 and STAYS.match(name)]
        # What was trained comes into the first process for the result.
        assert more.get("sent") or (stays and all(stays))
        fill(copied, model, *given, **more)

    sharding.fill = filled
    shard = sharding.sharded

    def check(*given: Any) -> Any:
        model = shard(*given)
        weights = list(model.parameters())
        assert all(isinstance(weight, DTensor) for weight in weights)
        own = sum(weight.to_local().numel() for weight in weights)
        assert own < most_of_a_process() * sum(weight.numel() for weight in weights)
        return model

    sharding.sharded = check
    # Several files for each checkpoint.
    sharding.LEAST_SHARD = 20_000
    for job in jobs:
        main(**job)
    if parts is not None:
        with contextlib.suppress(KeyboardInterrupt):
            main(**parts, on_event=interrupt(step))
        torch.distributed.barrier()
        assert not Path(parts["output"]).exists()
        main(**{**parts, "options": parts["options"] | {"resume": True}})
