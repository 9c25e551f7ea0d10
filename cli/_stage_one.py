"""What `convert` and `distill` share: the options of stage one, and what is shown while it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def add_data(parser: argparse.ArgumentParser) -> Any:
    """Declare the options of the data, and return their group."""
    data = parser.add_argument_group("data")
    add = data.add_argument
    add(
        "--dataset",
        metavar="NAME_OR_PATH",
        help="Hub data set (name or name:config), local file or folder; several with weights: a.jsonl=0.7,b.txt=0.3",
    )
    add("--text-column", metavar="C[,D]", help="column of the text, or the two of a pair; found by itself where clear")
    add("--extra-pairs", type=float, default=0.0, metavar="N", help="texts of pairs paired anew, per pair (0)")
    add("--image-column", metavar="C", help="column of the image")
    add("--holdout", type=int, default=64, metavar="N", help="examples to measure on, never trained on (64)")
    add("--packing", action="store_true", help="join short texts to rows of full length")
    add("--bucket-by-length", action="store_true", help="batch texts of similar length together, to pad less")
    add("--streaming", action="store_true", help="read while training; for very large sets")
    return data


def add_output(parser: argparse.ArgumentParser, default_output: str) -> None:
    """Declare the options of the output."""
    out = parser.add_argument_group("output")
    add = out.add_argument
    add("--output", metavar="DIR", help=f"folder to make ({default_output})")
    add("--overwrite", action="store_true", help="replace the folder, if linearize wrote it and it holds nothing else")
    add("--device", default="auto", metavar="D", help="cpu, cuda, cuda:1, mps or auto (auto)")
    add("--json", action="store_true", help="print the result as JSON on stdout")


def add_stage_one(parser: argparse.ArgumentParser, default_output: str) -> None:
    """Declare the options of stage one, its data and the output."""
    add_data(parser)
    stage = parser.add_argument_group("stage one")
    add = stage.add_argument
    add("--distill-steps", type=int, default=1000, metavar="N", help="steps; 0 skips stage one (1000)")
    add("--distill-length", type=int, metavar="N", help="tokens per training row (256, or what the model takes)")
    add("--batch-size", type=int, default=32, metavar="B", help="rows per batch (32)")
    add("--gradient-accumulation", type=int, default=1, metavar="N", help="batches per step (1)")
    add("--learning-rate", type=float, metavar="R", help="peak learning rate; by default the kernel's own")
    add("--loss", default="auto", metavar="L", help="weights, output, both, or auto: what the kernel supports (auto)")
    add("--output-weight", type=float, default=1.0, metavar="W", help="of the output's error in --loss both (1)")
    add("--negative-penalty", type=float, metavar="W", help="of negative weights; by default the kernel's own")
    add(
        "--feed",
        default="teacher",
        metavar="F",
        help="whose hidden states feed the layers: teacher or student (teacher)",
    )
    add("--query-sample", type=int, metavar="R", help="take the loss on R random queries per row, for long rows")
    add("--layers-at-a-time", type=int, metavar="K", help="train K layers, then the next K")
    add("--precision", default="no", metavar="P", help="of the frozen model: no, bf16 or fp16 (no)")
    add(
        "--patience",
        type=int,
        default=5,
        metavar="N",
        help="stop after N looks, one per 100 steps, without a better held-out loss; 0: never (5)",
    )
    add("--save-every", type=int, metavar="N", help="keep a state every N steps in OUTPUT.stage1, for --resume")
    add("--keep-states", type=int, default=2, metavar="K", help="how many of these states are kept (2)")
    add("--resume", action="store_true", help="go on from the newest state in OUTPUT.stage1")
    add("--seed", type=int, default=0, metavar="S", help="of kernels, data order and sampling (0)")
    add("--report-to", default="none", metavar="R", help="none or tensorboard, into OUTPUT.tensorboard (none)")
    add_output(parser, default_output)


def kept_states(target: str, *endings: str) -> str:
    """Say what an interrupted stage one, or alignment, has left on disk (folders `<target>.<ending>`)."""
    from linearize.distillation.state import StateFolder

    for ending in endings or ("align", "stage1"):
        folder = f"{target.rstrip('/')}.{ending}"
        steps = StateFolder(folder, 1).steps()
        if steps:
            break
    else:
        return "nothing was written; --save-every N keeps a state every N steps"
    return f"the state of step {steps[-1]} lies in {folder}; go on with the same line and --resume"


def show(
    work: Callable[[Callable[[str, Any], None]], Any],
    target: str,
    *,
    as_json: bool,
    planned: Callable[[Console], None] | None = None,
) -> int:
    """Run a conversion or distillation, show what happens, and print its result.

    Args:
        work: what to run; gets a listener.
        target: the folder that it makes.
        as_json: whether stdout is for JSON.
        planned: called with the console once the model is loaded and its plan is made.
    """
    from linearize.cli._output import (
        Heartbeat,
        StepProgress,
        closeness_table,
        console,
        fidelity_table,
        on_interrupt,
        plan_table,
        print_json,
    )
    from linearize.distillation.processes import is_main

    # With --json, stdout is for the program that reads it and people look at stderr.
    out = console(to_stderr=as_json)
    # Of several processes one speaks.
    out.quiet = not is_main()
    progress = StepProgress(out)
    beat = Heartbeat(out, "loading the model")

    def listen(event: str, data: Any) -> None:
        if event == "plan":
            out.print(plan_table(data))
            if planned is not None:
                planned(out)
        elif event == "data" and data is not None:
            out.print(f"Stage one learns from: {data}", markup=False)
            beat.what = "measuring how close the kernels are"
        elif event == "positions" and data is not None:
            out.print(f"Inputs: {data.note}", markup=False)
        elif event in ("step", "align step"):
            progress(data)
            beat.what = f"training, {progress.short(data)}"
        elif event == "note":
            out.print(data, markup=False)
        elif event == "distilled" and data is not None:
            beat.what = "what follows stage one"
            progress.stop()
            _say_distilled(out, data)
            out.print(fidelity_table(data.before, data.after))
        elif event == "aligned":
            progress.stop()
            out.print(closeness_table(data))

    try:
        with beat, on_interrupt(lambda: kept_states(target)):
            result = work(listen)
    finally:
        progress.stop()
    added, seconds = result.parameters_added, result.seconds
    out.print(f"Saved {result.output} ({added:,} parameters added, {seconds:.0f} s).", markup=False)
    out.print("Load it: import linearize; AutoModel.from_pretrained(...) or pipeline(task, ...).", markup=False)
    if as_json and is_main():
        print_json(result.to_dict())
    return 0


def _say_distilled(out: Any, result: Any) -> None:
    if result.stopped == "nothing to learn":
        out.print("Stage one skipped: no kernel of this plan has anything to learn.")
    else:
        out.print(
            f"Stage one: {result.steps} steps in {result.seconds:.0f} s, ended by {result.stopped}; "
            f"kept step {result.best_step}."
        )
