"""Show the table of a recipe's run, the paper's figures beside ours; also as Markdown, CSV, LaTeX or a picture."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group

    from linearize.experiments.results import Table

EPILOG = """examples:
  linearize results runs/minilm-glue
  linearize results runs
  linearize results runs/minilm-glue --format latex
  linearize results runs --format csv --plot results.png

A cell reads: ours, in brackets the share of softmax's score above chance (none if softmax is not above chance), and
the paper's figure after a bar. Over several seeds ours is the mean, with the standard deviation after the sign +-; n is
how many there are, if some are missing. The last row is chance: the best score of an answer that looks at no input.
A star: not made as the recipe of the package says (steps cut, other arguments ...); below the table stands in what."""

FORMATS = ("table", "md", "csv", "latex", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="folder of a run, or of several")
    add("--format", choices=FORMATS, default="table", metavar="F", help=f"{', '.join(FORMATS)} (table)")
    add("--plot", metavar="FILE.png", help="draw means and deviations beside the paper's figures")
    add("--overwrite", action="store_true", help="replace the file of --plot if it exists")
    add("--json", action="store_true", help="print JSON, as --format json")


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    from linearize.bench.plot import check_picture
    from linearize.cli._output import console, print_json
    from linearize.experiments import formats
    from linearize.experiments.results import tables

    if args.plot:
        check_picture(args.plot, overwrite=args.overwrite)
    found = tables(args.folder)
    kind = "json" if args.json else args.format
    out = console(to_stderr=kind != "table")
    if kind == "json":
        print_json([asdict(one) for one in found])
    elif kind != "table":
        print({"md": formats.to_markdown, "csv": formats.to_csv, "latex": formats.to_latex}[kind](found), end="")
    else:
        for one in found:
            out.print(results_table(one))
            for line in formats.notes(one):
                out.print(line, markup=False)
    if args.plot:
        from linearize.experiments.plot import write_results_plot

        write_results_plot(found, args.plot)
        out.print(f"Picture: {args.plot}", markup=False)
    return 0


def results_table(found: Table) -> Group:
    """Build the table."""
    from linearize.cli._output import table
    from linearize.experiments.formats import lines_of

    return table(found.title, ["", *found.columns], lines_of(found), right=tuple(range(1, len(found.columns) + 1)))
