"""Show the table of a recipe's run with the paper's figures; also as Markdown, CSV, LaTeX or a picture."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group

    from linearize.jobs.recipes.results import Table

EPILOG = """examples:
  linearize results runs/minilm-glue
  linearize results runs
  linearize results runs/minilm-glue --format latex
  linearize results runs --format csv --plot results.png

A cell shows our figure, in brackets the share of softmax's score above chance (if softmax is above chance), and after a
bar the paper's figure. With more than one seed ours is the mean, with its standard deviation after +-; n is the number
of seeds, if some are missing. The last row is chance: the best score of an answer that ignores the input.
A star marks what was not made as the package's recipe says (fewer steps, other arguments ...); notes below say how."""

FORMATS = ("table", "md", "csv", "latex", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="folder of a run, or of runs")
    add("--format", choices=FORMATS, default="table", metavar="F", help=f"{', '.join(FORMATS)} (table)")
    add("--plot", metavar="FILE.png", help="draw means and deviations, and the paper's figures")
    add("--overwrite", action="store_true", help="replace the file of --plot if it exists")
    add("--json", action="store_true", help="print JSON, as --format json")


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    from linearize.cli._output import console, print_json
    from linearize.core.parsing import check_file
    from linearize.jobs.recipes import formats
    from linearize.jobs.recipes.results import tables

    if args.plot:
        check_file(args.plot, "--plot", (".png",), overwrite=args.overwrite)
    made = tables(args.folder)
    kind = "json" if args.json else args.format
    out = console(to_stderr=kind != "table")
    if kind == "json":
        print_json([asdict(table) for table in made])
    elif kind != "table":
        print(formats.FORMATS[kind](made), end="")
    else:
        for table in made:
            out.print(results_table(table))
            for line in formats.notes(table):
                out.print(line, markup=False)
    if args.plot:
        formats.write_results_plot(made, args.plot)
        out.print(f"Picture: {args.plot}", markup=False)
    return 0


def results_table(results: Table) -> Group:
    """Build the table."""
    from linearize.cli._output import table
    from linearize.jobs.recipes.formats import lines_of

    right = tuple(range(1, len(results.columns) + 1))
    return table(results.title, ["", *results.columns], lines_of(results), right=right)
