"""Run `report` and `compare`: pictures and figures of converted checkpoints."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from linearize.checkpoint.output import claim
from linearize.cli._output import console, number, print_json, table
from linearize.cli._progress import as_lines, fidelity_table
from linearize.evaluation.report.compare import PICTURE, compare_checkpoints, write_comparison
from linearize.evaluation.report.gather import answer
from linearize.evaluation.report.options import CompareOptions, ReportOptions
from linearize.evaluation.report.page import PAGE, write_report


def report(options: ReportOptions, args: argparse.Namespace) -> None:
    """Make the report and print the table of fidelity."""
    out = console(to_stderr=args.json)
    found = write_report(options, args.output, overwrite=args.overwrite, on_event=as_lines(out))
    out.print(answer(found))
    out.print(fidelity_table(f"Kernel against softmax ({found.inputs})", found.fidelity))
    for line in (*found.notes, *(f"Left out: {what}" for what in found.left_out)):
        out.print(line)
    out.print(f"Open {args.output.rstrip('/')}/{PAGE}")
    if args.json:
        print_json(found.to_dict() | {"output": args.output})


def compare(options: CompareOptions, args: argparse.Namespace) -> None:
    """Compare, print the table, write the picture."""
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
        out.print(line)
    out.print(f"Picture: {args.output.rstrip('/')}/{PICTURE}")
    if args.json:
        print_json(asdict(compared) | {"output": args.output})
