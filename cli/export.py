"""Write a converted checkpoint as ONNX with dynamic sizes, and compare it with PyTorch in onnxruntime."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from linearize.cli._options import add_json, add_options, take_options
from linearize.jobs.config import ExportJob

if TYPE_CHECKING:
    from linearize.export.timing import Timed
    from linearize.jobs.events import Event

EPILOG = """examples:
  linearize export ./roberta-base-hedgehog --format onnx --output roberta-onnx
  linearize export ./gpt2-hedgehog --output gpt2-onnx --last-logits
  linearize export ./gpt2-hedgehog --output gpt2-onnx --time 128,1024   # and PyTorch, native op on and off

An encoder or an image model becomes one graph, model.onnx. A causal model becomes two: model.onnx reads prompts
(padding in front) and returns logits and the state after them, as present.*; step.onnx reads one token and that state,
as past.*, and returns the next. Both read the weights from weights.bin, in fp32; export.json describes them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, ExportJob)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Export and say how close it is."""
    from linearize.cli._output import Heartbeat, console, on_interrupt, print_json
    from linearize.jobs.events import Noted, Started
    from linearize.jobs.export import export_checkpoint

    job = take_options(args, ExportJob)
    out = console(to_stderr=args.json)

    def on_event(event: Event) -> None:
        if isinstance(event, Started):
            out.print(f"... {event.what}")
        elif isinstance(event, Noted):
            out.print(event.text)

    with Heartbeat(out, "exporting"), on_interrupt(lambda: "nothing was written"):
        result = export_checkpoint(job, on_event)
    for row in result.times:
        out.print(_line(row), soft_wrap=True)
    out.print(f"Saved {result.output}.")
    if args.json:
        print_json(result.to_dict())
    return 0


def _line(row: Timed) -> str:
    where = "" if row.tokens is None else f" {'after' if row.what == 'step' else 'of'} {row.tokens:,} tokens"
    sides = [("PyTorch" if row.pytorch_alone is None else "PyTorch with the native op", row.pytorch)]
    sides += [] if row.pytorch_alone is None else [("without", row.pytorch_alone)]
    sides.append(("onnxruntime", row.onnxruntime))
    times = [f"{name} {timing.seconds * 1e3:.2f} ms (spread {timing.spread:.0%})" for name, timing in sides]
    return f"{row.what}{where}: {', '.join(times)}"
