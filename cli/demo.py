"""Convert a small real model (all-MiniLM-L6-v2, 6-layer BERT) on this machine, without a network, and show the gain."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from linearize.cli._options import add_json, add_options, take_options
from linearize.cli._progress import show_training
from linearize.cli.native import add_native, prepare_native
from linearize.jobs.config import DemoJob

if TYPE_CHECKING:
    from linearize.jobs.events import Event

EPILOG = """examples:
  linearize demo
  linearize demo --kernel flexformer_n --steps 300 --output demo-output

Needs the demo extra: pip install "linearize[demo]"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, DemoJob)
    add_native(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    from linearize.cli._output import at_work, console, print_json, table
    from linearize.evaluation.bench.rows import mebibytes
    from linearize.jobs import events
    from linearize.jobs.demo import run_demo

    job = take_options(args, DemoJob)
    out = console(to_stderr=args.json)
    saved = []

    def on_event(event: Event) -> None:
        if isinstance(event, events.Saved):
            saved.append(event.output)
        if isinstance(event, events.Planned):
            prepare_native(args, "cpu", out)
        else:
            show_training(event, out, progress, beat)

    def kept() -> str:
        return f"the converted model is in {job.output}" if saved else "nothing was written"

    with at_work(out, "loading the model", kept) as (progress, beat):
        result = run_demo(job, on_event)
    row = result.comparison
    names = {"softmax": "softmax (SDPA)", "linear": f"linear ({job.kernel})"}
    rows = [[name, f"{row.seconds(side):.2f}", mebibytes(row.memory(side))] for side, name in names.items()]
    title = f"One document of {row.tokens:,} tokens, whole model: {row.speedup:.1f} times faster"
    out.print(table(title, ["attention", "seconds", "peak memory, MiB"], rows, right=(1, 2)))
    out.print(f"The converted model is in {job.output}.")
    if args.json:
        print_json(result.to_dict())
    return 0
