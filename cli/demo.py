"""Convert a small real model (all-MiniLM-L6-v2, 6-layer BERT) on this machine, without a network, and show the gain."""

from __future__ import annotations

import argparse
from typing import Any

from linearize.cli._native import add_native, prepare_native

EPILOG = """examples:
  linearize demo
  linearize demo --kernel flexformer_n --steps 300 --output demo-output

Needs the demo extra: pip install "linearize[demo]"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--kernel", default="hedgehog", metavar="NAME", help="kernel (hedgehog)")
    add("--steps", type=int, default=72, metavar="N", help="steps of stage one (72); a sixth as many of alignment")
    add("--tokens", type=int, default=8192, metavar="N", help="length of the long document (8192)")
    add("--output", default="demo-output", metavar="DIR", help="folder to make; replaced if it is there (demo-output)")
    add_native(parser)
    add("--json", action="store_true", help="print the result as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    from linearize.cli._output import (
        Heartbeat,
        StepProgress,
        closeness_table,
        console,
        fidelity_table,
        on_interrupt,
        print_json,
        table,
    )
    from linearize.demo import run_demo

    out = console(to_stderr=args.json)
    progress = StepProgress(out)
    beat = Heartbeat(out, "loading the model")
    saved = False

    def kept() -> str:
        return f"the converted model lies in {args.output}" if saved else "nothing was written"

    def listen(event: str, data: Any) -> None:
        nonlocal saved
        saved = saved or event == "saved"
        if event == "plan":
            prepare_native(args, out)
        elif event == "data" and data is not None:
            out.print(f"Stage one learns from: {data}", markup=False)
            beat.what = "measuring how close the kernels are"
        elif event in ("step", "align step"):
            progress(data)
            beat.what = f"training, {progress.short(data)}"
        elif event == "distilled" and data is not None:
            progress.stop()
            out.print(fidelity_table(data.before, data.after))
        elif event == "aligned":
            progress.stop()
            out.print(closeness_table(data))
        elif event == "doing":
            beat.what = data
        elif event == "note":
            out.print(data, markup=False)

    try:
        with beat, on_interrupt(kept):
            result = run_demo(args.kernel, args.steps, args.tokens, args.output, listen)
    finally:
        progress.stop()
    comparison = result.comparison
    rows = [
        ["softmax (SDPA)", f"{comparison.softmax_seconds:.2f}", f"{comparison.softmax_bytes / 2**20:.0f}"],
        [f"linear ({args.kernel})", f"{comparison.linear_seconds:.2f}", f"{comparison.linear_bytes / 2**20:.0f}"],
    ]
    title = f"One document of {comparison.tokens:,} tokens, whole model: {comparison.speedup:.1f} times faster"
    out.print(table(title, ["attention", "seconds", "peak memory, MiB"], rows, right=(1, 2)))
    out.print(f"The converted model lies in {args.output}.", markup=False)
    if args.json:
        print_json(result.to_dict())
    return 0
