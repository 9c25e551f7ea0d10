"""Peak memory of reading one text with a saved checkpoint, in a fresh process."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, TypedDict

import torch

from linearize.bench.memory import in_fresh_process, limit_memory, peak, start_peak
from linearize.errors import LinearizeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARM_UP = 8
"""Tokens of the pass before the one that is measured."""


class Reading(TypedDict):
    """What the fresh process is asked for."""

    model: str
    auto_class: str
    rows: int
    tokens: int
    device: str
    threads: int


def peak_of_reading(model: str, auto_class: str, rows: int, tokens: int, device: str = "cpu") -> int | None:
    """Return the bytes that one forward pass adds to a loaded checkpoint's peak; None where it could not be measured.

    Args:
        model: folder or Hub name, converted or not.
        auto_class: class of transformers that loads it.
        rows: texts (or chunks) of the pass.
        tokens: tokens of each.
        device: where it runs.
    """
    request = Reading(
        model=model,
        auto_class=auto_class,
        rows=rows,
        tokens=tokens,
        device=device,
        threads=torch.get_num_threads(),
    )
    try:
        return int(in_fresh_process(measure_reading, request))
    except LinearizeError:
        # A comparison of scores is no place to fail over that.
        return None


def measure_reading(request: Reading) -> int:
    """Body of the fresh process: load, a short pass, then the one that is measured."""
    import transformers

    import linearize  # noqa: F401 - makes the Auto classes know converted checkpoints
    from linearize.gguf import load_weights

    torch.set_num_threads(request["threads"])
    model = load_weights(getattr(transformers, request["auto_class"]), request["model"])
    model.eval().to(request["device"])
    if getattr(model.config, "pad_token_id", 0) is None:
        model.config.pad_token_id = 0
    on_gpu = request["device"].startswith("cuda")
    with torch.no_grad():
        _read(model, 1, min(WARM_UP, request["tokens"]))
        gc.collect()
        if on_gpu:
            before = torch.cuda.memory_allocated(request["device"])
            torch.cuda.reset_peak_memory_stats(request["device"])
            _read(model, request["rows"], request["tokens"])
            return max(0, torch.cuda.max_memory_allocated(request["device"]) - before)
        limit_memory()
        before = start_peak()
        _read(model, request["rows"], request["tokens"])
        return max(0, peak() - before)


def _read(model: PreTrainedModel, rows: int, tokens: int) -> None:
    """Read made-up tokens [rows, tokens]."""
    ids = torch.ones(rows, tokens, dtype=torch.long, device=model.device)
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
