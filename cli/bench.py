"""Run `bench`: speed and memory of kernels next to softmax."""

from __future__ import annotations

import argparse

from rich.console import Group

from linearize.attention.interface import linear_attentions
from linearize.cli._output import Screen, shown, table
from linearize.cli._progress import as_lines
from linearize.cli.native import explain_layers, prepare_native
from linearize.core.parsing import check_file
from linearize.evaluation.bench.job import BenchResult, checked, make_suites, run_bench
from linearize.evaluation.bench.meter import DTYPES
from linearize.evaluation.bench.models import OfModel
from linearize.evaluation.bench.rows import Row, faster_from, mebibytes, write_plot
from linearize.evaluation.bench.suites import AttentionSuite
from linearize.evaluation.options import BenchOptions


def bench(job: BenchOptions, args: argparse.Namespace, out: Screen) -> object:
    """Measure and print the results."""
    if args.plot:
        check_file(args.plot, "--plot", (".png",), overwrite=args.overwrite)
    prepare_native(args, job.device, out)
    if args.explain_backend:
        explain_suites(out, job)
    result = run_bench(job, as_lines(out))
    show(out, result)
    if args.plot:
        write_plot(result.rows, args.plot)
        out.print(f"Picture: {args.plot}")
    return result.to_dict()


def explain_suites(out: Screen, options: BenchOptions) -> None:
    """Print the backends of all measured attention layers, for inputs of the longest length.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    options = checked(options)
    longest = options.sorted_lengths()[-1]
    for suite in make_suites(options, longest):
        suite.check()
        tokens, layers = longest, {}
        if isinstance(suite, OfModel):
            model = suite.model
            tokens = longest if model.image_size is None else model.tokens
            names = linear_attentions(model.linear)
            layers = {str(number): layer.mixer for number, layer in enumerate(names.values())}
        elif isinstance(suite, AttentionSuite):
            layers = {"the attention": suite.sizes.mixer(causal=suite.causal)}
        explain_layers(out, layers, tokens, options.device, DTYPES[options.dtype])


def show(out: Screen, result: BenchResult) -> None:
    """Print the tables, the length from which kernels are faster, and the machine."""
    by_what: dict[str, list[Row]] = {}
    for row in result.rows:
        by_what.setdefault(row.what, []).append(row)
    for what, rows in by_what.items():
        out.print(_table(what, sorted(rows, key=lambda row: row.tokens)))
    for what, rows in by_what.items():
        if len(rows) > 1:
            tokens = faster_from(rows)
            where = "at none of these lengths" if tokens is None else f"from {tokens:,} tokens on"
            out.print(f"Faster than {rows[0].pair[0]} {where} ({what})")
    for note in result.notes:
        out.print(note)
    machine = result.machine
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    out.print(f"Machine: {machine['name']}, {threads}, torch {machine['torch']}.")
    if machine["device"] == "cpu":
        use = "used (--no-native turns it off)" if machine["native"] else "not compiled (linearize native --build)"
        out.print(f"Native op: {use}.")
    else:
        use = "used (LINEARIZE_TRITON=0 turns them off)" if machine["triton"] else "not available"
        out.print(f"Triton kernels: {use}.")
    out.print(f"Noise: {result.noise.text}.")


SHOWN = {
    "first_speedup": ("first of 8", "{:.2f} x"),
    "bound_speedup": ("at most", "{:.2f} x"),
    "image_size": ("pixels", "{:.0f}"),
    "softmax_kept_mib": ("softmax keeps, MiB", "{:,.2f}"),
    "linear_kept_mib": ("linear keeps, MiB", "{:,.2f}"),
}
"""Derived figures in the table; --json has all of them."""


def _table(what: str, rows: list[Row]) -> Group:
    """Return one line per length: seconds and spread of each variant, the ratio, and memory of each variant."""
    first = rows[0]
    with_memory = [name for name in first.variants if any(row.memory(name) is not None for row in rows)]
    derived = [key for key in SHOWN if any(row.figures.get(key) is not None for row in rows)]
    columns = ["tokens", *(f"{name}, s" for name in first.variants), "faster", *(SHOWN[key][0] for key in derived)]
    columns += [f"{name}, MiB" for name in with_memory]
    cells = []
    for row in rows:
        line = [f"{row.tokens:,}"]
        for variant in row.variants.values():
            timing = variant.timing
            line.append(variant.problem or "-" if timing is None else f"{timing.seconds:.4g} ({timing.spread:.0%})")
        line.append(shown(row.speedup, "{:.2f} x"))
        line += [shown(row.figures.get(key), SHOWN[key][1]) for key in derived]
        line += [mebibytes(row.memory(name), 1) for name in with_memory]
        cells.append(line)
    return table(f"{what}: medians (spread)", columns, cells, right=tuple(range(len(columns))))
