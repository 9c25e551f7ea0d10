"""Time and memory of a converted checkpoint against length, its own frozen softmax (SDPA) beside its kernels.

Both sides are the same weights and the same forward: the softmax side is what the layers compute while observed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from linearize.bench.memory import in_fresh_process, peak, start_peak
from linearize.bench.side_by_side import Comparison
from linearize.bench.timing import Timing, in_turns
from linearize.errors import ConfigError, LinearizeError

LENGTHS = (128, 512, 2048)


def check_lengths(lengths: Sequence[int], limit: int | None) -> tuple[list[int], list[str]]:
    """Leave out the lengths that a model cannot take.

    Returns:
        The others, ascending, and notes about what was left out.

    Raises:
        ConfigError: if a length is no length.
    """
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ConfigError(f"lengths: got {length!r}, expected numbers of tokens such as 128,512,2048")
    kept = sorted({length for length in lengths if limit is None or length <= limit})
    left = sorted({length for length in lengths if length not in kept})
    if not left:
        return kept, []
    names = ", ".join(f"{length:,}" for length in left)
    return kept, [f"Not timed at {names} tokens: this checkpoint takes at most {limit:,}; convert with --max-length."]


@torch.no_grad()
def measure_speed(model: Any, folder: str | None, lengths: Sequence[int], repeats: int = 3) -> list[Comparison]:
    """Time one forward of a text model per length, and measure its memory in a fresh process per side.

    Args:
        model: a converted text model.
        folder: where it is saved, for the memory; None: no memory.
        lengths: tokens.
        repeats: forwards per side; medians are returned.
    """
    from linearize.fidelity.observe import run_body

    sides: tuple[dict[int, int], dict[int, int]] = ({}, {})
    if folder is not None:
        sides = (_memory(folder, lengths, softmax=True), _memory(folder, lengths, softmax=False))
    device = next(model.parameters()).device
    found = []
    for length in lengths:
        batch = {"input_ids": torch.full((1, length), 5, device=device)}

        def softmax(batch: Any = batch) -> None:
            with _softmax(model):
                run_body(model, batch)

        def linear(batch: Any = batch) -> None:
            run_body(model, batch)

        times = in_turns({"softmax": softmax, "linear": linear}, repeats)
        medians = {side: Timing.of(values).seconds for side, values in times.items()}
        memory = [side.get(length) for side in sides]
        found.append(Comparison(length, medians["softmax"], medians["linear"], memory[0], memory[1], repeats))
    return found


@contextlib.contextmanager
def _softmax(model: Any) -> Any:
    from linearize.fidelity.observe import observed

    with observed(model, lambda *_: None):
        yield


def _memory(folder: str, lengths: Sequence[int], *, softmax: bool) -> dict[int, int]:
    """Return peak bytes per length; empty where the process failed, for a report is no place to fail over that."""
    request = {"folder": str(Path(folder).absolute()), "lengths": list(lengths), "softmax": softmax}
    try:
        peaks = in_fresh_process(measure_folder, request)
    except LinearizeError:
        return {}
    return {int(length): most for length, most in peaks.items()}


@torch.no_grad()
def measure_folder(request: dict[str, Any]) -> dict[int, int]:
    """Body of the fresh process: one short forward, then one per length, ascending; the peaks in bytes."""
    from linearize.fidelity.observe import run_body
    from linearize.loading import load_converted

    model = load_converted(request["folder"]).model
    peaks = {}
    with _softmax(model) if request["softmax"] else contextlib.nullcontext():
        run_body(model, {"input_ids": torch.full((1, 8), 5)})
        for length in request["lengths"]:
            before = start_peak()
            run_body(model, {"input_ids": torch.full((1, length), 5)})
            peaks[length] = max(0, peak() - before)
    return peaks
