"""Measure speed and memory of kernels next to softmax (SDPA): one attention, decoding, whole models."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from linearize.cli._backends import add_explain, explain_layers
from linearize.cli._options import add_json, add_options, take_options
from linearize.cli.native import add_native, prepare_native
from linearize.core.errors import ConfigError
from linearize.core.options import options_of
from linearize.evaluation.bench.options import HOW, WHAT, BenchOptions

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.status import Status

    from linearize.core.events import Event
    from linearize.evaluation.bench.job import BenchResult
    from linearize.evaluation.bench.rows import Row, Variant

EPILOG = """examples:
  linearize bench --kernel flexformer_n --kernel hedgehog
  linearize bench --causal --backward --lengths 4096 --dtype bfloat16
  linearize bench --features-given --causal
  linearize bench --decode --lengths 8192,32768
  linearize bench gpt2 --decode --lengths 1024,8192
  linearize bench google/vit-base-patch16-224 --image-size 224,384,512
  linearize bench bert-base --lengths 128,4096,16384
  linearize bench bert-base --train --lengths 2048,4096 --batch-tokens 4096
  linearize bench ./roberta-base-hedgehog --json --plot speed.png
  linearize bench --config mine.yaml --device cpu

Without MODEL one attention is measured, on made-up inputs, at 512, 4,096 and 16,384 tokens. MODEL is a Hub name or a
folder, converted or not; `bert-base` has BERT's sizes with random weights, and needs no network. A model of images is
measured at sizes in pixels. MODEL --decode decodes with a whole causal model, compares it with softmax and its cache,
and shows what each keeps between two tokens.

Softmax and kernel run in turns in one process; a turn of --decode is eight tokens, and the first of them, whose state
softmax's turn has pushed out of the caches, has a separate column. Memory is the peak above what was there before, on
the CPU in a separate process for each figure. The native op is compiled first if it is missing (`linearize native`),
and used unless --no-native is given. Columns: seconds (median, and the distance of the quartiles over it) and MiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    groups = add_options(parser, BenchOptions)
    add = groups[WHAT].add_argument
    add(
        "--decode",
        action="store_true",
        help="one token after a context (--lengths): the attentions of all layers, or all of MODEL",
    )
    add("--train", action="store_true", help="a training step of the whole MODEL: forward, backward and AdamW")
    add = groups[HOW].add_argument
    add("--plot", metavar="FILE.png", help="draw time and memory against length")
    add("--overwrite", action="store_true", help="replace the file of --plot if it exists")
    add_native(groups[HOW])
    add_explain(groups[HOW])
    add_json(groups[HOW], "print every figure as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from linearize.cli._output import console, print_json
    from linearize.core.parsing import check_file
    from linearize.evaluation.bench.job import run_bench
    from linearize.evaluation.bench.rows import write_plot

    options = options_from(args)
    if args.plot:
        check_file(args.plot, "--plot", (".png",), overwrite=args.overwrite)
    out = console(to_stderr=args.json)
    prepare_native(args, options.device, out)
    if args.explain_backend:
        explain_suites(out, options)
    progress = Progress(out)
    try:
        result = run_bench(options, progress)
    finally:
        progress.stop()
    show(out, result)
    if args.plot:
        write_plot(result.rows, args.plot)
        out.print(f"Picture: {args.plot}", markup=False)
    if args.json:
        print_json(result.to_dict())
    return 0


def options_from(args: argparse.Namespace) -> BenchOptions:
    """Turn parsed arguments into `BenchOptions`.

    Raises:
        ConfigError: for options that do not go together, or text that cannot be read.
    """
    known = options_of(BenchOptions)
    # Flags of this verb alone are always set, options only if they were given.
    given = {name for name, value in vars(args).items() if name in known or value not in (None, False)}
    return replace(take_options(args, BenchOptions), suite=_suite(given))


def _suite(given: Collection[str]) -> str:
    """Choose what is measured, and refuse options that have no meaning there."""
    attention = ("causal", "backward", "features_given")
    if "decode" in given:
        _refuse(given, ("train", *attention, "image_size"), "--decode measures one token")
        if "model" in given:
            _refuse(given, ("heads", "head_dim"), "--decode measures one token")
        return "decode-model" if "model" in given else "decode"
    if "model" in given or "train" in given:
        _refuse(given, (*attention, "heads", "head_dim"), "a whole model is measured as it is")
        if "train" in given:
            _refuse(given, ("image_size",), "--train measures a training step")
        return "train" if "train" in given else "model"
    _refuse(given, ("layers",), "one attention is measured")
    if "features_given" in given:
        _refuse(given, ("kernel", "kernel_arg", "window", "sinks"), "with --features-given no kernel is measured")
    return "attention"


def _refuse(given: Collection[str], names: tuple[str, ...], why: str) -> None:
    for name in names:
        if name in given:
            raise ConfigError(f"bench: {why}; leave --{name.replace('_', '-')} out")


class Progress:
    """Shows what is being measured: with a spinner on a terminal, as plain lines elsewhere."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self.status: Status | None = None

    def __call__(self, event: Event) -> None:
        """Show an event."""
        from rich.markup import escape

        from linearize.cli._progress import as_lines
        from linearize.core.events import Started

        if not self.out.is_terminal:
            as_lines(self.out)(event)
            return
        if not isinstance(event, Started):
            return
        if self.status is None:
            self.status = self.out.status("")
            self.status.start()
        self.status.update(escape(event.what))

    def stop(self) -> None:
        """Remove the spinner."""
        if self.status is not None:
            self.status.stop()
            self.status = None


def explain_suites(out: Console, options: BenchOptions) -> None:
    """Print the backends of all attentions that are measured, for inputs of the longest length.

    Raises:
        LinearizeError: one of its children, for everything the user can put right.
    """
    from linearize.attention.interface import linear_attentions
    from linearize.evaluation.bench.job import LENGTHS, checked, make_suites
    from linearize.evaluation.bench.meter import DTYPES
    from linearize.evaluation.bench.models import OfModel
    from linearize.evaluation.bench.options import check_lengths
    from linearize.evaluation.bench.suites import SizedSuite

    options = checked(options)
    longest = check_lengths(LENGTHS[options.suite] if options.lengths is None else options.lengths)[-1]
    for suite in make_suites(options, longest):
        suite.check()
        tokens, layers = longest, {}
        if isinstance(suite, OfModel):
            model = suite.model
            tokens = longest if model.image_size is None else model.tokens
            names = linear_attentions(model.linear)
            layers = {str(number): layer.mixer for number, layer in enumerate(names.values())}
        elif isinstance(suite, SizedSuite) and options.features is None:
            causal = options.causal or options.suite == "decode"
            layers = {"the attention": suite.sizes.mixer(causal=causal)}
        explain_layers(out, layers, tokens, options.device, DTYPES[options.dtype])


def show(out: Console, result: BenchResult) -> None:
    """Print the tables, from which length on kernels are faster, and the machine."""
    by_what: dict[str, list[Row]] = {}
    for row in result.rows:
        by_what.setdefault(row.what, []).append(row)
    for what, rows in by_what.items():
        out.print(_table(what, sorted(rows, key=lambda row: row.tokens)))
    for crossover in result.crossovers:
        out.print(f"Faster than {crossover.reference} from: {crossover.text} ({crossover.what})", markup=False)
    for note in result.notes:
        out.print(note, markup=False)
    machine = result.machine
    out.print(f"Machine: {machine.name}, {machine.threads} threads, torch {machine.torch}.", markup=False)
    if machine.device == "cpu":
        use = "used (--no-native leaves it alone)" if machine.native else "not there (linearize native --build)"
        out.print(f"Native op: {use}.", markup=False)
    else:
        use = "used (LINEARIZE_FLA=0 leaves it alone)" if machine.fla else "not there (extra: gpu)"
        out.print(f"flash-linear-attention: {use}.", markup=False)
    out.print(f"Noise: {result.noise.text}.", markup=False)


SHOWN = {
    "linear_share_of_bound": ("share of bound", "{:.0%}"),
    "first_speedup": ("first of 8", "{:.2f} x"),
    "bound_speedup": ("at most", "{:.2f} x"),
    "share_of_least": ("share of least", "{:.0%}"),
    "image_size": ("pixels", "{:.0f}"),
    "softmax_kept_mib": ("softmax keeps, MiB", "{:,.2f}"),
    "linear_kept_mib": ("linear keeps, MiB", "{:,.2f}"),
    "memory_ratio": ("memory / forward's", "{:.2f}"),
    "memory_ratio_above_weights": ("without weights", "{:.2f}"),
}
"""Derived figures that the table shows; --json has all."""


def _table(what: str, rows: list[Row]) -> Group:
    """Return one line per length: seconds (and their spread) of each variant, the ratio, memory of each variant."""
    from linearize.cli._output import table

    first = rows[0]
    remembered = [name for name in first.variants if any(row.memory(name) is not None for row in rows)]
    derived = [key for key in SHOWN if any(row.figures.get(key) is not None for row in rows)]
    columns = ["tokens", *(f"{name}, s" for name in first.variants), "faster", *(SHOWN[key][0] for key in derived)]
    columns += [f"{name}, MiB" for name in remembered]
    cells = []
    for row in rows:
        line = [f"{row.tokens:,}", *(_seconds(one) for one in row.variants.values())]
        line.append("-" if row.speedup is None else f"{row.speedup:.2f} x")
        for key in derived:
            value = row.figures.get(key)
            line.append("-" if value is None else SHOWN[key][1].format(value))
        for name in remembered:
            taken = row.memory(name)
            line.append("-" if taken is None else f"{taken / 2**20:,.1f}")
        cells.append(line)
    return table(f"{what}: medians (spread)", columns, cells, right=tuple(range(len(columns))))


def _seconds(variant: Variant) -> str:
    if variant.timing is None:
        return variant.problem or "-"
    return f"{variant.timing.seconds:.4g} ({variant.timing.spread:.0%})"
