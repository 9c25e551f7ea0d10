"""Time an exported graph in onnxruntime and the model in PyTorch, in turns, on one row.

python -m benchmarks.onnx ./gpt2-hedgehog --lengths 128,1024
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.command import add_lengths, new_parser
from linearize.attention import native
from linearize.attention.cache import cache_argument
from linearize.attention.native import switched
from linearize.checkpoint.loading import load_converted
from linearize.cli._output import console, print_json
from linearize.evaluation.bench.meter import Timing, in_turns
from linearize.evaluation.options import check_lengths
from linearize.export.graphs import BATCH, TOKENS, Graph, graphs_of
from linearize.export.onnx import resized, run, session, state_of, to_onnx, write


@dataclass(frozen=True)
class Timed:
    """Times at one length, all with the same number of threads.

    Attributes:
        what: "forward", or "step" for one token after a text.
        tokens: the length; None for a model whose inputs have a fixed size.
        pytorch: the model, with the native op if it was built (and `LINEARIZE_NATIVE` is not 0).
        pytorch_alone: the model without the native op; None if `pytorch` already runs without it.
        onnxruntime: the exported graph.
    """

    what: str
    tokens: int | None
    pytorch: Timing
    pytorch_alone: Timing | None
    onnxruntime: Timing


def time_graphs(graphs: list[Graph], model: PreTrainedModel, folder: Path, lengths: tuple[int, ...]) -> list[Timed]:
    """Return the times of exported graphs and of their model.

    Args:
        graphs: the graphs in PyTorch form.
        model: the model.
        folder: the folder that the graphs were exported to.
        lengths: tokens per row; a model that takes no tokens is timed once.
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
    """Return the time of one token after `tokens` tokens; PyTorch updates the state in place, as in `generate`."""
    cache = model.new_cache()
    kept, token = cache_argument(model, cache), inputs["input_ids"][:, -1:]
    with torch.no_grad():
        model(**inputs, **kept)
    # The same position every time, so that no turn exceeds the model's length.
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


def text(row: Timed) -> str:
    """Return a row as readable text."""
    where = "" if row.tokens is None else f" {'after' if row.what == 'step' else 'of'} {row.tokens:,} tokens"
    sides = [("PyTorch" if row.pytorch_alone is None else "PyTorch with the native op", row.pytorch)]
    sides += [] if row.pytorch_alone is None else [("without", row.pytorch_alone)]
    sides.append(("onnxruntime", row.onnxruntime))
    times = [f"{name} {timing.seconds * 1e3:.2f} ms (spread {timing.spread:.0%})" for name, timing in sides]
    return f"{row.what}{where}: {', '.join(times)}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = new_parser(__doc__)
    parser.add_argument("model", help="converted checkpoint")
    add_lengths(parser, (128, 512))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Export a checkpoint into a temporary folder, time it and print the times."""
    args = parse(argv)
    model, lengths = load_converted(args.model).model.float().eval(), check_lengths(args.lengths)
    graphs = graphs_of(model)
    with tempfile.TemporaryDirectory() as folder:
        write({graph.name: to_onnx(graph) for graph in graphs}, Path(folder))
        rows = time_graphs(graphs, model, Path(folder), tuple(lengths))
    out = console(to_stderr=args.json)
    for row in rows:
        out.print(text(row), soft_wrap=True)
    if args.json:
        print_json([asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
