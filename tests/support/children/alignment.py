"""Align a tiny model in one process or in several."""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file

from linearize.training.alignment.config import AlignConfig
from linearize.training.alignment.loop import align
from support.training import ALIGN, Split, batches, loud_converted


def run() -> dict[str, torch.Tensor]:
    """Align, and return weights, losses and the last figure."""
    model = loud_converted("bert", "AutoModelForSequenceClassification")
    result = align(model, Split(batches(model)), AlignConfig(**ALIGN | {"steps": 6, "eval_every": 2}))
    losses = torch.tensor([report.loss for report in result.history])
    state = {k: v.clone().contiguous() for k, v in model.state_dict().items()}
    return state | {"losses": losses, "after": torch.tensor(result.after.loss)}


def main(target: str) -> None:
    """Align, and save what was trained, once."""
    torch.set_num_threads(1)
    found = run()
    if int(os.environ.get("RANK", "0")) == 0:
        save_file(found, target)
