"""Tune a tiny checkpoint by its job, in one process or in several."""

from __future__ import annotations

import os

import torch
from torch.distributed.tensor import DTensor

from linearize.jobs.events import Event, Logged, StepDone
from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.task_config import TuneJob
from linearize.training.stage_two.tuner import Tuner


def main(model: str, dataset: str, output: str, options: dict[str, object], stop: int | str = "") -> None:
    """Tune, or break off behind a step or at the last entry of the log ("end"); all processes end with one result."""
    torch.set_num_threads(1)
    if os.environ.get("ACCELERATE_USE_FSDP"):
        watch_shards()
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


def watch_shards() -> None:
    """Check at every step that this process has half of the weights, of the optimizer's state and of the teacher."""
    from linearize.training.stage_two.sharded import ShardedTuner

    plain = Tuner.training_step

    def step(self: Tuner, *arguments: object) -> torch.Tensor:
        assert type(self) is ShardedTuner
        parts = [self.model.parameters(), () if self.teacher is None else self.teacher.parameters()]
        states = self.optimizer.optimizer.state.values()
        parts.append(value for state in states for name, value in state.items() if name != "step")
        for part in map(list, parts):
            assert all(isinstance(tensor, DTensor) for tensor in part)
            assert sum(t.to_local().numel() for t in part) <= 0.6 * sum(t.numel() for t in part)
        loss: torch.Tensor = plain(self, *arguments)
        return loss

    Tuner.training_step = step  # type: ignore[method-assign]
