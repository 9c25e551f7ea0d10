"""Code shared by the benchmarks' command lines: options, the measurement of suites, and its output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from linearize.cli._output import console, print_json
from linearize.cli._progress import as_lines
from linearize.cli.bench import SHOWN, show
from linearize.core.options import parse_lengths
from linearize.evaluation.bench.job import run_tasks, threads
from linearize.evaluation.bench.suites import Suite
from linearize.evaluation.options import BenchOptions

SHOWN |= {
    "linear_share_of_bound": ("share of bound", "{:.0%}"),
    "share_of_least": ("share of least", "{:.0%}"),
    "memory_ratio": ("memory / forward's", "{:.2f}"),
    "memory_ratio_above_weights": ("without weights", "{:.2f}"),
}
"""Additional figures that only the benchmarks' tables show."""


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with --json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print every figure as JSON on stdout")
    return parser


def add_lengths(parser: argparse.ArgumentParser, default: tuple[int, ...], what: str = "tokens") -> None:
    """Declare --lengths."""
    usual = ",".join(map(str, default))
    parser.add_argument("--lengths", type=parse_lengths, default=default, metavar="N,N", help=f"{what} ({usual})")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Declare device, repeats and threads."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps or auto (%(default)s)")
    parser.add_argument("--repeats", type=int, help="turns; by default as many as take ten seconds")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Declare --no-memory."""
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="measure time only")


def measure_suites(suites: Sequence[Suite], lengths: Sequence[int], options: BenchOptions, *, as_json: bool) -> int:
    """Measure suites at some lengths, and print the results.

    Args:
        suites: suites to measure.
        lengths: lengths in tokens.
        options: options from `checked`.
        as_json: whether stdout is for JSON.

    Returns:
        The exit code.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    out = console(to_stderr=as_json)
    with threads(options.threads):
        for suite in suites:
            suite.check()
        tasks = [(suite, tokens, options.memory) for suite in suites for tokens in lengths]
        result = run_tasks(tasks, options, as_lines(out))
    show(out, result)
    if as_json:
        print_json(result.to_dict())
    return 0
