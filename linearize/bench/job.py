"""The whole measurement: options in, rows out. The command line calls this and prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from linearize.attention.factory import default_scale
from linearize.bench.alignment import AlignmentSuite
from linearize.bench.attention import AttentionSizes, AttentionSuite
from linearize.bench.decode import DecodeSuite
from linearize.bench.decode_model import DecodeModelSuite
from linearize.bench.machine import Machine, Noise, NoiseWatch, check_dtype, describe, peak_rate
from linearize.bench.measure import measure, threads
from linearize.bench.models import BERT_BASE, BenchModel
from linearize.bench.options import BenchOptions
from linearize.bench.rows import Crossover, Row, crossovers
from linearize.bench.stage_one import StageOneSuite
from linearize.bench.suite import Suite, check_image_sizes, check_lengths
from linearize.bench.train import TrainSuite
from linearize.bench.whole_model import ModelSuite, OfModel
from linearize.errors import ConfigError, unknown_name
from linearize.events import Callback, Event, Started, ignore
from linearize.registry import PLAIN, Hybrid, kernel_info, make_config

LENGTHS = {
    "attention": (512, 4096, 16384),
    "decode": (8192, 32768),
    "decode-model": (8192, 32768),
    "model": (128, 512, 4096),
    "train": (512, 2048, 4096),
    "stage-one": (512, 2048),
    "alignment": (512, 2048),
}
"""What is measured, and at which lengths unless asked otherwise."""

OF_MODELS: dict[str, Callable[[BenchModel], Suite]] = {
    "model": ModelSuite,
    "train": TrainSuite,
    "decode-model": DecodeModelSuite,
    "stage-one": StageOneSuite,
    "alignment": AlignmentSuite,
}
IN_BATCHES = ("model", "train")
"""Those whose batch may be counted in tokens: stage one, the alignment and decoding are measured on what they say."""
KERNEL = "hedgehog"


@dataclass(frozen=True)
class Measured(Event):
    """A length is measured."""

    row: Row


@dataclass
class BenchResult:
    """What was measured.

    Attributes:
        machine: on what.
        noise: how quiet it was.
        rows: one per kernel and length.
        crossovers: from which length on the kernel is faster.
        notes: what a reader must know.
    """

    machine: Machine
    noise: Noise
    rows: list[Row]
    crossovers: list[Crossover]
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "machine": self.machine.to_dict(),
            "noise": self.noise.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "crossovers": [asdict(found) for found in self.crossovers],
            "notes": self.notes,
        }


def run_bench(options: BenchOptions, on_event: Callback = ignore) -> BenchResult:
    """Measure one suite for every kernel and length.

    Args:
        options: what to measure.
        on_event: called with what happens.

    Raises:
        LinearizeError: one of its children, for everything the user can put right, before anything is measured.
    """
    options = checked(options)
    lengths = check_lengths(LENGTHS[options.suite] if options.lengths is None else options.lengths)
    several = len(options.kernels) > 1 or len(options.image_sizes or ()) > 1
    notes: list[str] = []
    with threads(options.threads):
        suites: Iterable[Suite] = make_suites(options, lengths[-1])
        # Of several, each is made again when it is measured, so that no model is kept longer than that.
        suites = suites if several else list(suites)
        for suite in suites:
            suite.check()
            notes += [suite.note] if suite.note else []
        if several:
            suites = make_suites(options, lengths[-1])
        tasks = ((suite, tokens) for suite in suites for tokens in _lengths_of(suite, lengths))
        machine, noise, rows = run_tasks(tasks, options, on_event)
    return BenchResult(machine, noise, rows, crossovers(rows), list(dict.fromkeys(notes)))


def _lengths_of(suite: Suite, lengths: Sequence[int]) -> Sequence[int]:
    """Return at which lengths a suite is measured: a picture has one, which follows from its size."""
    pictures = isinstance(suite, OfModel) and suite.model.image_size is not None
    return (suite.model.tokens,) if pictures else lengths  # type: ignore[attr-defined]


def checked(options: BenchOptions) -> BenchOptions:
    """Check what does not depend on the suite, and name the device.

    Raises:
        ConfigError: for an unknown suite, a device that is not there, a type that it lacks, a wrong number.
    """
    from linearize.loading import check_device

    if options.suite not in LENGTHS:
        raise unknown_name("suite", options.suite, LENGTHS)
    for name in ("repeats", "threads", "batch", "batch_tokens", "heads", "head_dim", "layers"):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536):
            raise ConfigError(f"{name.replace('_', '-')}: got {value!r}, expected a whole number from 1 to 65536")
    if options.batch_tokens is not None and (options.suite not in IN_BATCHES or options.batch != 1):
        other = "measure a MODEL's forward, or --train" if options.suite not in IN_BATCHES else "leave batch out"
        raise ConfigError(f"batch-tokens: got {options.batch_tokens}, which says how many sequences; {other}")
    if options.layers is not None and options.suite != "decode" and options.model not in (None, BERT_BASE):
        raise ConfigError(f"layers: a checkpoint has its own; leave it out, or measure {BERT_BASE}")
    if options.image_sizes is not None:
        check_image_sizes(options.image_sizes)
        if options.suite != "model" or options.lengths is not None:
            other = "leave --lengths out" if options.suite == "model" else "measure a MODEL's forward"
            raise ConfigError(f"image-size: got it where nothing is measured by the size of pictures; {other}")
    device = check_device(options.device)
    return replace(options, device=device, dtype=check_dtype(options.dtype, device))


def make_suites(options: BenchOptions, longest: int) -> Iterator[Suite]:
    """Make the suites one by one, one for each kernel and size of pictures."""
    for kernel in options.kernels or (KERNEL,):
        for size in sorted(set(options.image_sizes or ())) or (None,):
            yield _suite(options, kernel, longest, size)


def _hybrid(options: BenchOptions, kernel: str) -> Hybrid:
    """Return what the options add to a kernel, its scales as `convert` would choose them."""
    info = kernel_info(kernel)
    scale = options.scale or default_scale(info, make_config(info, options.kernel_args), options.window)
    return Hybrid(options.window, options.sinks, options.exact_keys, scale)


def _suite(options: BenchOptions, kernel: str, longest: int, image_size: int | None) -> Suite:
    named: dict[str, Any] = {
        "kernel": kernel,
        "kernel_args": dict(options.kernel_args),
        "hybrid": _hybrid(options, kernel),
        "batch": options.batch,
        "dtype": options.dtype,
        "device": options.device,
    }
    if options.suite in OF_MODELS:
        # A token is decoded behind its context.
        longest += options.suite == "decode-model"
        named |= {
            "batch_tokens": options.batch_tokens,
            "layers": options.layers,
            "longest": longest,
            "image_size": image_size,
        }
        model = BenchModel(options.model or BERT_BASE, **named)
        if model.converted and (options.kernels or options.kernel_args or _hybrid(options, kernel) != PLAIN):
            raise ConfigError(f"bench: {model.model!r} is converted and has its kernels; leave kernel and window out")
        return OF_MODELS[options.suite](model)
    sizes = AttentionSizes(heads=options.heads, head_dim=options.head_dim, **named)
    if options.suite == "decode":
        return DecodeSuite(sizes, options.layers or 12)
    return AttentionSuite(sizes, options.causal, options.backward, options.features)


def run_tasks(
    tasks: Iterable[tuple[Suite, int]],
    options: BenchOptions,
    on_event: Callback,
    remember: Callable[[tuple[Suite, int]], bool] | None = None,
) -> tuple[Machine, Noise, list[Row]]:
    """Measure suites at lengths, and the machine before, between and after.

    Args:
        tasks: suites and lengths.
        options: device, type and repeats.
        on_event: called with what happens.
        remember: says which of them are measured for memory too; None: as the options say, for all.
    """
    on_event(Started("measuring the machine"))
    machine = describe(options.device, options.dtype)
    watch = NoiseWatch(options.device)
    watch.probe()
    rates = {options.dtype: machine.peak}
    rows = []
    for suite, tokens in tasks:
        on_event(Started(f"{suite.what}, {tokens:,} tokens"))
        memory = options.memory if remember is None else remember((suite, tokens))
        if suite.dtype not in rates:
            rates[suite.dtype] = peak_rate(options.device, suite.dtype)
        row = measure(suite, tokens, rate=rates[suite.dtype], repeats=options.repeats, memory=memory)
        on_event(Measured(row))
        rows.append(row)
        watch.probe()
    return machine, watch.stop(), rows
