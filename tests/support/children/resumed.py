"""Distil a tiny model, going on where the last process stopped."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from linearize.training.stage_one import DistillConfig
from linearize.training.stage_one.loop import distill
from support.training import Fixed, batches, sharp


def main(states: str, target: str) -> None:
    """Train to the end, and put the kernels' weights at `target` at once."""
    torch.set_num_threads(1)
    model = sharp("bert")
    config = DistillConfig(steps=60, eval_every=7, save_every=1, query_sample=5, folder=states, resume=True)
    Path(target).with_suffix(".ready").touch()
    distill(model, Fixed(batches(model)), config)
    kernels = {k: v.clone() for k, v in model.state_dict().items() if ".linear_attention." in k}
    save_file(kernels, target + ".new")
    os.replace(target + ".new", target)
