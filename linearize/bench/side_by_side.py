"""A converted model and its softmax original on one long input: time in turns, memory in a process of its own each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linearize.bench.memory import in_fresh_process, peak, start_peak
from linearize.bench.timing import Timing, in_turns


@dataclass(frozen=True)
class Comparison:
    """One length.

    Attributes:
        tokens: length of the input.
        softmax_seconds: median forward of the softmax model (SDPA).
        linear_seconds: median forward of the converted model.
        softmax_bytes: peak memory of that forward above the loaded model, or None.
        linear_bytes: the same of the converted model.
        repeats: forwards per side.
    """

    tokens: int
    softmax_seconds: float
    linear_seconds: float
    softmax_bytes: int | None
    linear_bytes: int | None
    repeats: int

    @property
    def speedup(self) -> float:
        """Softmax's time over the linear model's."""
        return self.softmax_seconds / self.linear_seconds


@torch.no_grad()
def compare(
    softmax: Any, linear: Any, inputs: Mapping[str, Tensor], *, folders: tuple[Path, Path] | None, repeats: int = 3
) -> Comparison:
    """Compare two models on the same inputs.

    Args:
        softmax: the original, with SDPA.
        linear: the converted model.
        inputs: keyword arguments of both forwards.
        folders: where the two are saved, for the memory of each in a fresh process; None: no memory.
        repeats: forwards per side; medians are returned.
    """
    times = in_turns({"softmax": lambda: softmax(**inputs), "linear": lambda: linear(**inputs)}, repeats)
    tokens = next(iter(inputs.values())).shape[1]
    memory = (None, None) if folders is None else tuple(peak_memory(folder, tokens) for folder in folders)
    medians = {name: Timing.of(values).seconds for name, values in times.items()}
    return Comparison(tokens, medians["softmax"], medians["linear"], memory[0], memory[1], repeats)


def peak_memory(folder: Path, tokens: int) -> int:
    """Return by how many bytes one forward of a text model raises a fresh process's peak memory.

    Raises:
        LinearizeError: if the process fails.
    """
    return int(in_fresh_process(measure_folder, {"folder": str(folder), "tokens": tokens}))


@torch.no_grad()
def measure_folder(request: dict[str, Any]) -> int:
    """Body of the fresh process: one short and one long forward; the difference in bytes."""
    from transformers import AutoModel

    import linearize  # noqa: F401 - makes the Auto classes know converted checkpoints

    model = AutoModel.from_pretrained(request["folder"]).eval()
    model(input_ids=torch.full((1, 8), 5))
    before = start_peak()
    model(input_ids=torch.full((1, request["tokens"]), 5))
    return max(0, peak() - before)
