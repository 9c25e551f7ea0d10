"""Show the table of a recipe's run, the paper's figures beside ours."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

EPILOG = """examples:
  linearize results runs/minilm-glue
  linearize results runs

A cell reads: ours, in brackets the share of softmax's score, and the paper's figure behind a bar. Of several seeds
ours is the mean, with the standard deviation behind the sign +-; n tells of how many, where some are not there yet."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", metavar="FOLDER", help="folder of a run, or of several")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    from linearize.cli._output import console, print_json
    from linearize.experiments.results import tables

    found = tables(args.folder)
    if args.json:
        print_json([asdict(one) for one in found])
        return 0
    out = console()
    for one in found:
        out.print(results_table(one))
        if one.seeds > 1:
            out.print(f"Means over {one.seeds} seeds, +- the standard deviation of a single run.", markup=False)
        if one.missing:
            out.print(f"{one.missing} cells are not there yet: go on with --resume.", markup=False)
        if one.damaged:
            out.print(
                f"{one.damaged} lines of the results are damaged and left out; --resume mends them.", markup=False
            )
    return 0


def results_table(found: Any) -> Any:
    """Build the table."""
    from linearize.cli._output import table

    rows = [
        [label, *(_cell(line[column], found.seeds) for column in found.columns)] for label, line in found.rows.items()
    ]
    return table(found.title, ["", *found.columns], rows, right=tuple(range(1, len(found.columns) + 1)))


def _cell(entry: Any, seeds: int) -> str:
    ours = "-" if entry.ours is None else f"{entry.ours:.2f}"
    ours += "" if entry.deviation is None else f" +- {entry.deviation:.2f}"
    ours += f" n={entry.seeds}" if 0 < entry.seeds < seeds else ""
    share = "" if entry.recovered is None else f" ({entry.recovered:.1f} %)"
    paper = "" if entry.paper is None else f" | {entry.paper:.1f}"
    return f"{ours}{share}{paper}"
