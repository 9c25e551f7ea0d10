"""Look at a converted checkpoint: one page with pictures of its attention beside softmax's, and the numbers."""

from __future__ import annotations

import argparse

EPILOG = """examples:
  linearize report ./roberta-base-hedgehog
  linearize report ./roberta-base-hedgehog --dataset reviews.jsonl --original roberta-base --output report/
  linearize report ./vit-hedgehog --dataset ./photos --inputs 4
  linearize report ./roberta-base-hedgehog --lengths 512,4096,16384

The page is one file without scripts that needs no network. The pictures lie beside it as PNG files, the numbers in
report.json. Without --dataset the inputs are the built-in ones of `linearize convert`."""


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Declare what `report` and `compare` share."""
    add = parser.add_argument
    add("--dataset", metavar="NAME_OR_PATH", help="Hub data set, local file or folder to take the inputs from")
    add("--text-column", metavar="C", help="column of the text; found by itself where it is clear")
    add("--image-column", metavar="C", help="column of the image")
    add("--inputs", type=int, default=8, metavar="N", help="how many inputs to measure on (8)")
    add("--max-length", type=int, default=128, metavar="N", help="tokens per input (128)")
    add("--lengths", default="128,512,2048", metavar="N,N", help="tokens to time at; none: no timing (128,512,2048)")
    add("--original", metavar="MODEL", help="the model it was made from, to compare whole outputs with")
    add("--device", default="auto", metavar="D", help="cpu, cuda, cuda:1, mps or auto (auto)")
    add("--overwrite", action="store_true", help="replace the output, if linearize wrote it and it holds nothing else")
    add("--json", action="store_true", help="print the numbers as JSON on stdout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", metavar="DIR", help="folder or Hub name of a converted checkpoint")
    parser.add_argument("--output", default="report", metavar="DIR", help="folder to make (report)")
    add_inputs(parser)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Read `--lengths`.

    Raises:
        ConfigError: if it is no list of whole numbers.
    """
    from linearize.errors import ConfigError

    if text.strip().lower() == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--lengths: got {text!r}, expected numbers such as 128,512,2048, or none") from None


def run(args: argparse.Namespace) -> int:
    """Make the report and print the fidelity table."""
    from linearize.cli._output import console, number, print_json, table
    from linearize.report.gather import ReportOptions
    from linearize.report.inputs import InputOptions
    from linearize.report.write import PAGE, write_report

    inputs = InputOptions(args.dataset, args.text_column, args.image_column, args.inputs, args.max_length)
    options = ReportOptions(args.checkpoint, args.original, inputs, parse_lengths(args.lengths), args.device)
    out = console(to_stderr=args.json)
    found = write_report(
        options, args.output, overwrite=args.overwrite, listen=lambda text: out.print(f"... {text}", markup=False)
    )
    figures = ("kl", "total_variation", "negative_share", "output_error")
    rows = [[y.module, y.kernel, *(number(getattr(y, f)) for f in figures)] for y in found.fidelity.layers]
    rows.append(["mean", "", *(number(found.fidelity.mean(f)) for f in figures)])
    columns = ["layer", "kernel", "KL (nats/query)", "total variation", "negative weights", "output error"]
    out.print(table(f"Kernel against softmax ({found.inputs})", columns, rows, right=(2, 3, 4, 5)))
    for line in (*found.notes, *(f"Left out: {what}" for what in found.left_out)):
        out.print(line, markup=False)
    out.print(f"Open {args.output.rstrip('/')}/{PAGE}", markup=False)
    if args.json:
        print_json(found.to_dict() | {"output": args.output})
    return 0
