"""Time of an exported graph in onnxruntime and of the model in PyTorch, in turns, on one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.attention import native
from linearize.attention.cache import cache_argument
from linearize.attention.native import switched
from linearize.evaluation.bench.meter import Timing, in_turns
from linearize.export.graphs import BATCH, TOKENS, Graph
from linearize.export.onnx import resized, run, session, state_of


@dataclass(frozen=True)
class Timed:
    """Seconds at one length, on the same number of threads.

    Attributes:
        what: "forward", or "step" for one token after a text.
        tokens: the length; None for a model whose inputs have one size.
        pytorch: of the model, with the native op if it was built (and `LINEARIZE_NATIVE` is not 0).
        pytorch_alone: of the model without the native op; None if `pytorch` runs without it too.
        onnxruntime: of the graph.
    """

    what: str
    tokens: int | None
    pytorch: Timing
    pytorch_alone: Timing | None
    onnxruntime: Timing


def time_graphs(graphs: list[Graph], model: PreTrainedModel, folder: Path, lengths: tuple[int, ...]) -> list[Timed]:
    """Time written graphs, and the model that was exported.

    Args:
        graphs: the graphs before they were written.
        model: the model.
        folder: the folder that they were written to.
        lengths: tokens of a row; a model that takes no tokens is timed once.
    """
    opened = {graph.name: session(folder / f"{graph.name}.onnx", torch.get_num_threads()) for graph in graphs}
    first = graphs[0]
    open_length = any(TOKENS in sizes.values() for sizes in first.sizes.values())
    rows = []
    for tokens in lengths if open_length else (None,):
        inputs = resized(first, {BATCH: 1, TOKENS: tokens or 1}, padded=False)
        rows.append(_pair("forward", tokens, partial(first.run, inputs), partial(run, opened["model"], inputs)))
        if len(graphs) > 1:
            rows.append(_step(graphs[1], model, opened, inputs, tokens))
    return rows


def _step(step: Graph, model: Any, opened: Any, inputs: Any, tokens: int | None) -> Timed:
    """Time one token after `tokens`; in PyTorch as `generate` decodes, with the state updated in place."""
    cache = model.new_cache()
    kept, token = cache_argument(model, cache), inputs["input_ids"][:, -1:]
    with torch.no_grad():
        model(**inputs, **kept)
    # The same place every time, so that no turn exceeds the model's length.
    place = torch.full((1, 1), inputs["input_ids"].shape[1] - 1)
    feed = {"input_ids": token, **state_of(run(opened["model"], inputs))}

    @torch.no_grad()
    def decode() -> object:
        return model(token, position_ids=place, **kept)

    return _pair("step", tokens, decode, lambda: run(opened["step"], feed))


def _pair(what: str, tokens: int | None, torch_call: Callable[[], object], onnx_call: Callable[[], object]) -> Timed:
    calls: dict[str, Callable[[], object]] = {"pytorch": torch_call, "onnxruntime": onnx_call}
    if native.engine() is not None:

        def alone() -> object:
            with switched(False):
                return torch_call()

        calls["alone"] = alone
    timings = in_turns(calls)
    return Timed(what, tokens, timings["pytorch"], timings.get("alone"), timings["onnxruntime"])
