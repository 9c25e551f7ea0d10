"""Tune a tiny checkpoint by its job, in one process or in several."""

from __future__ import annotations

import os

import torch

from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.task_config import TuneJob


def main(model: str, dataset: str, output: str, options: dict[str, object]) -> None:
    """Tune; all processes end with one result."""
    torch.set_num_threads(1)
    _, result = finetune_checkpoint(TuneJob.of(model=model, dataset=dataset, output=output, **options))
    seen = f"{result.score} {result.best_step} {result.selection['value']}"
    print(f"process {os.environ.get('RANK', '0')}: {seen}")
    if "RANK" in os.environ:
        found: list[object] = [None, None]
        torch.distributed.all_gather_object(found, seen)
        assert found[0] == found[1], found
