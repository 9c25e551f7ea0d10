"""Convert a checkpoint: replace softmax by kernels, teach them to imitate it, save an ordinary HuggingFace model."""

from __future__ import annotations

import argparse
from typing import Any

from linearize.errors import ConfigError

EPILOG = """examples:
  linearize convert roberta-base --kernel hedgehog --max-length 4096
  linearize convert ./my-bert --kernel flexformer_n --dataset reviews.jsonl.gz --text-column text --distill-steps 500
  linearize convert gpt2 --kernel hedgehog --kernel-arg activation=exp --keep-softmax 0,11
  linearize convert google/vit-base-patch16-224 --dataset ./photos --output vit-linear
  linearize convert roberta-base --dry-run

Without --dataset, text models learn from a stated Hub data set or, offline, from the prose inside Python;
vision models likewise or from two sample photographs. The choice is printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hub name or folder of a transformers checkpoint")
    add(
        "--kernel", default="hedgehog", metavar="NAME", help="kernel for all layers; see `linearize kernels` (hedgehog)"
    )
    add("--kernel-arg", action="append", default=[], metavar="K=V", help="an argument of the kernel; may be repeated")
    add("--layers", metavar="PLAN", help="kernels per layer, such as 0-5=hedgehog,6-11=flexformer_n")
    add("--keep-softmax", metavar="LAYERS", help="layers to leave as they are, such as 0,11")
    add("--window", type=int, metavar="W", help="softmax inside a window of W tokens, the kernel outside it")
    add("--task", metavar="TASK", help="head to load, such as fill-mask; by default the one the checkpoint names")
    add("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    add("--dataset", metavar="NAME_OR_PATH", help="Hub data set (name or name:config), local file or folder")
    add("--text-column", metavar="C", help="column of the text; found by itself where it is clear")
    add("--image-column", metavar="C", help="column of the image")
    add("--max-length", type=int, metavar="N", help="longest input that the result shall take, in tokens")
    add("--positions", default="tile", metavar="HOW", help="how learned positions are extended: tile or interpolate")
    add("--distill-steps", type=int, default=1000, metavar="N", help="steps of stage one; 0 skips it (1000)")
    add("--distill-length", type=int, metavar="N", help="tokens per training row (256, or what the model takes)")
    add("--batch-size", type=int, default=32, metavar="B", help="rows per step (32)")
    add("--learning-rate", type=float, metavar="R", help="peak learning rate; by default the kernel's own")
    add("--loss", default="auto", metavar="L", help="weights, output, both, or auto (auto)")
    add("--holdout", type=int, default=64, metavar="N", help="examples to measure on, never trained on (64)")
    add("--output", metavar="DIR", help="folder to make (<model-name>-<kernel>)")
    add("--overwrite", action="store_true", help="replace the folder if it holds something")
    add("--device", default="auto", metavar="D", help="cpu, cuda, cuda:1, mps or auto (auto)")
    add("--precision", default="no", metavar="P", help="of the frozen model in stage one: no, bf16 or fp16 (no)")
    add("--seed", type=int, default=0, metavar="S", help="of kernels, data order and sampling (0)")
    add("--dry-run", action="store_true", help="print the plan and change nothing")
    add("--json", action="store_true", help="print the result as JSON on stdout")


def options_from(args: argparse.Namespace) -> Any:
    """Turn parsed arguments into `ConvertOptions`.

    Raises:
        ConfigError: for text that cannot be read.
    """
    from linearize.surgery.layers import parse_indices
    from linearize.workflow import ConvertOptions

    same = vars(args).copy()
    for name in ("kernel_arg", "dry_run", "json", "keep_softmax"):
        same.pop(name)
    kept = tuple(parse_indices(args.keep_softmax, "--keep-softmax")) if args.keep_softmax else ()
    return ConvertOptions(**same, kernel_args=parse_pairs(args.kernel_arg), keep_softmax=kept)


def parse_pairs(pairs: list[str]) -> dict[str, str]:
    """Read repeated K=V options.

    Raises:
        ConfigError: if one has no equals sign, or a name comes twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--kernel-arg: got {pair!r}, expected NAME=VALUE such as activation=exp")
        if name in found:
            raise ConfigError(f"--kernel-arg: {name} is given twice; give it once")
        found[name] = value
    return found


def run(args: argparse.Namespace) -> int:
    """Convert, or show the plan."""
    from linearize.cli._output import (
        StageOneProgress,
        console,
        fidelity_table,
        plan_table,
        print_json,
    )

    from linearize.workflow import convert_checkpoint, make_plan

    options = options_from(args)
    # With --json, stdout is for the program that reads it and people look at stderr.
    out = console(to_stderr=args.json)
    if args.dry_run:
        _, plan = make_plan(options)
        print_json(plan.to_dict()) if args.json else out.print(plan_table(plan))
        return 0
    progress = StageOneProgress(out)

    def listen(event: str, data: Any) -> None:
        if event == "plan":
            out.print(plan_table(data))
        elif event == "data" and data is not None:
            out.print(f"Stage one learns from: {data}", markup=False)
        elif event == "positions" and data is not None:
            out.print(f"Inputs: {data.note}", markup=False)
        elif event == "step":
            progress(data)
        elif event == "distilled" and data is not None:
            progress.stop()
            _say_distilled(out, data)
            out.print(fidelity_table(data.before, data.after))

    try:
        result = convert_checkpoint(options, listen)
    finally:
        progress.stop()
    out.print(
        f"Saved {result.output} ({result.parameters_added:,} parameters added, {result.seconds:.0f} s).", markup=False
    )
    out.print("Load it: import linearize; AutoModel.from_pretrained(...) or pipeline(task, ...).", markup=False)
    if args.json:
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
