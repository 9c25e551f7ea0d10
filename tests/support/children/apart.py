"""Processes on machines that share no disk: each works in a folder of its own, with relative names."""

from __future__ import annotations

import os
from pathlib import Path

from linearize.core.errors import ConfigError
from linearize.training.stage_one import DistillConfig
from linearize.training.stage_one.loop import distill
from support.children import tuning
from support.training import Fixed, batches, sharp


def _enter(folder: str) -> None:
    own = Path(folder) / os.environ["RANK"]
    own.mkdir(exist_ok=True)
    os.chdir(own)


def tune(folder: str, model: str, dataset: str, options: dict[str, object]) -> None:
    """Tune; all processes must end with the same scores."""
    _enter(folder)
    tuning.main(model, dataset, "out", options)


def resume(folder: str) -> None:
    """Distil, then resume from states that only the first process has; print why that is refused."""
    _enter(folder)
    for steps, again in ((4, False), (4, True)):
        model = sharp("bert")
        config = DistillConfig(steps=steps, save_every=2, folder="states", resume=again)
        try:
            distill(model, Fixed(batches(model)), config)
        except ConfigError as error:
            print(error)
