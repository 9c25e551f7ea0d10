"""Make a page about a converted checkpoint: its attention and softmax's in pictures, speed, changed predictions."""

from __future__ import annotations

import argparse

from linearize.cli._options import add_json, add_options, take_options
from linearize.evaluation.report.options import ReportOptions

EPILOG = """examples:
  linearize report ./roberta-base-hedgehog
  linearize report ./roberta-base-hedgehog --dataset reviews.jsonl --original roberta-base --output report/
  linearize report ./vit-hedgehog --dataset ./photos --inputs 4
  linearize report ./roberta-base-hedgehog --lengths 512,4096,16384

The page is one file without scripts that needs no network. Its pictures are saved next to it as PNG files, its numbers
in report.json. It opens with a sentence: how close, how fast, up to what length.

Without --dataset the inputs are of the data that the checkpoint was taught on by its record, if that is in this folder,
next to the checkpoint or on the Hub; else the built-in data of `linearize convert`. For a classifier or regression the
page lists the texts whose prediction changed most (--original names the tuned original)."""


def add_output(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare the options of the output, for `report` and `compare`."""
    add = parser.add_argument
    add("--output", default=default, metavar="DIR", help=f"folder to make ({default})")
    add("--overwrite", action="store_true", help="replace the output, if linearize wrote it and it holds nothing else")
    add_json(parser, "print the numbers as JSON on stdout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, ReportOptions)
    add_output(parser, "report")


def run(args: argparse.Namespace) -> int:
    """Make the report and print the table of fidelity."""
    from linearize.cli._output import console, number, print_json, table
    from linearize.cli._progress import as_lines
    from linearize.evaluation.report.gather import answer
    from linearize.evaluation.report.page import PAGE, write_report

    options = take_options(args, ReportOptions)
    out = console(to_stderr=args.json)
    found = write_report(options, args.output, overwrite=args.overwrite, on_event=as_lines(out))
    figures = ("kl", "total_variation", "negative_share", "output_error")
    rows = [[y.module, y.kernel, *(number(getattr(y, f)) for f in figures)] for y in found.fidelity.layers]
    rows.append(["mean", "", *(number(found.fidelity.mean(f)) for f in figures)])
    columns = ["layer", "kernel", "KL (nats/query)", "total variation", "negative weights", "output error"]
    out.print(answer(found), markup=False)
    out.print(table(f"Kernel against softmax ({found.inputs})", columns, rows, right=(2, 3, 4, 5)))
    for line in (*found.notes, *(f"Left out: {what}" for what in found.left_out)):
        out.print(line, markup=False)
    out.print(f"Open {args.output.rstrip('/')}/{PAGE}", markup=False)
    if args.json:
        print_json(found.to_dict() | {"output": args.output})
    return 0
