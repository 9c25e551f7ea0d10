"""Tune a tiny checkpoint by its job, in one process or in several."""

from __future__ import annotations

import os

import torch

from linearize.jobs.events import Event, Logged, StepDone
from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.task_config import TuneJob


def main(model: str, dataset: str, output: str, options: dict[str, object], stop: int | str = "") -> None:
    """Tune, or break off behind a step or at the last entry of the log ("end"); all processes end with one result."""
    torch.set_num_threads(1)
    job = TuneJob.of(model=model, dataset=dataset, output=output, **options)

    def on_event(event: Event) -> None:
        at_step = isinstance(event, StepDone) and event.report.step == stop
        if at_step or (isinstance(event, Logged) and "train_loss" in event.entry and stop == "end"):
            raise KeyboardInterrupt

    try:
        _, result = finetune_checkpoint(job, on_event)
    except KeyboardInterrupt:
        return
    seen = f"{result.score} {result.best_step} {result.selection['value']}"
    print(f"process {os.environ.get('RANK', '0')}: {seen}")
    if "RANK" in os.environ:
        found: list[object] = [None, None]
        torch.distributed.all_gather_object(found, seen)
        assert found[0] == found[1], found
