"""Compare several conversions on the same inputs: which kernel, how close, how fast. One table and one picture."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from linearize.cli._options import add_options, take_options
from linearize.cli.report import add_output
from linearize.evaluation.report.options import CompareOptions

EPILOG = """examples:
  linearize compare ./roberta-base-hedgehog ./roberta-base-luna
  linearize compare ./a ./b ./c --dataset reviews.jsonl --original roberta-base --lengths 4096
  linearize compare ./a ./b --json --lengths none

The output folder gets comparison.png and comparison.json. Of --lengths the longest that a model takes is timed.
The lines below the table name the best by each figure, and the differences that are within noise: over the inputs by
paired 95 % intervals (comparison.json has them), over the turns of the timing by the quartiles."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, CompareOptions)
    add_output(parser, "comparison")


def run(args: argparse.Namespace) -> int:
    """Compare, print the table, write the picture."""
    from linearize.checkpoint.output import claim
    from linearize.cli._output import console, number, print_json, table
    from linearize.cli._progress import as_lines
    from linearize.evaluation.report.compare import PICTURE, compare_checkpoints, write_comparison

    options = take_options(args, CompareOptions)
    out = console(to_stderr=args.json)
    sources = [*options.checkpoints, options.original, options.inputs.dataset]
    with claim(args.output, overwrite=args.overwrite, sources=sources):
        compared = compare_checkpoints(options, as_lines(out))
        write_comparison(compared, args.output, overwrite=args.overwrite)
    figures = ("kl", "total_variation", "negative_share", "output_error", "cosine", "seconds", "speedup")
    rows = [
        [c.name, c.kernels, f"{c.parameters_added:,}", *(number(getattr(c, f)) for f in figures)]
        for c in compared.conversions
    ]
    columns = ["name", "kernels", "added", "KL", "TV", "negative", "error", "cosine", "seconds", "x softmax"]
    if compared.noisy:
        columns[-2:] = [f"{name} (noisy)" for name in columns[-2:]]
    at = f"; timed at {compared.timed_at}" if compared.timed_at else ""
    out.print(table(f"On {compared.inputs}{at}", columns, rows, right=tuple(range(2, 10))))
    for line in (*compared.verdicts, *compared.notes):
        out.print(line, markup=False)
    out.print(f"Picture: {args.output.rstrip('/')}/{PICTURE}", markup=False)
    if args.json:
        print_json(asdict(compared) | {"output": args.output})
    return 0
