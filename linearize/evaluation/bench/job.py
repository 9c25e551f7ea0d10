"""The whole measurement: takes options, returns rows. The command line calls this and prints the result."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from linearize.attention.parts import default_scale
from linearize.checkpoint.loading import check_device
from linearize.core.errors import ConfigError
from linearize.core.events import Callback, Started, ignore
from linearize.core.registry import PLAIN, Hybrid, Values, kernel_info, make_config
from linearize.evaluation.bench import meter
from linearize.evaluation.bench.memory import memory_of, out_of_memory
from linearize.evaluation.bench.models import BERT_BASE, BenchModel, DecodeModelSuite, ModelSuite
from linearize.evaluation.bench.rows import Row, Variant
from linearize.evaluation.bench.suites import AttentionSizes, AttentionSuite, Suite
from linearize.evaluation.options import BenchOptions, check_lengths

KERNEL = "hedgehog"


@dataclass
class BenchResult:
    """The measurements.

    Attributes:
        machine: facts about the machine, by name.
        noise: how quiet it was.
        rows: one per kernel and length.
        notes: caveats for the reader.
    """

    machine: dict[str, str | int]
    noise: meter.Noise
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "machine": self.machine,
            "noise": self.noise.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "notes": self.notes,
        }


def run_bench(options: BenchOptions, on_event: Callback = ignore) -> BenchResult:
    """Measure one suite for every kernel and length.

    Args:
        options: what to measure.
        on_event: called with every event.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct, before anything is measured.
    """
    options = checked(options)
    lengths = options.sorted_lengths()
    several = len(options.kernels) > 1 or len(options.image_sizes or ()) > 1
    notes: list[str] = []
    with threads(options.threads):
        suites: Iterable[Suite] = make_suites(options, lengths[-1])
        # Several suites are made again for measuring, so that only one model at a time is in memory.
        suites = suites if several else list(suites)
        for suite in suites:
            suite.check()
            notes += [suite.note] if suite.note else []
        if several:
            suites = make_suites(options, lengths[-1])
        tasks = ((suite, tokens, options.memory) for suite in suites for tokens in suite.lengths(lengths))
        result = run_tasks(tasks, options, on_event)
    return replace(result, notes=list(dict.fromkeys(notes)))


def checked(options: BenchOptions) -> BenchOptions:
    """Return the options with a valid device and dtype, after checking the sizes.

    Raises:
        ConfigError: for sizes that do not fit the suite, a missing device, or a dtype that the device lacks.
    """
    if options.layers is not None and options.model not in (None, BERT_BASE):
        raise ConfigError(f"layers: a checkpoint has its own; leave it out, or measure {BERT_BASE}")
    if options.image_sizes is not None:
        check_lengths(options.image_sizes, 1 << 16, "image-size", "pixels such as 224,384,512")
        if options.suite != "model" or options.lengths is not None:
            other = "leave --lengths out" if options.suite == "model" else "measure a MODEL's forward"
            raise ConfigError(f"image-size: only the forward pass of an image MODEL has image sizes; {other}")
    device = check_device(options.device)
    return replace(options, device=device, dtype=meter.check_dtype(options.dtype, device))


def make_suites(options: BenchOptions, longest: int) -> Iterator[Suite]:
    """Yield the suites, one for each kernel and image size.

    Raises:
        ConfigError: for a converted checkpoint together with a kernel or a window.
    """
    for kernel in options.kernels or (KERNEL,):
        for size in sorted(set(options.image_sizes or ())) or (None,):
            info = kernel_info(kernel)
            # The default scales are those that `convert` chooses.
            more = options.additions
            scale = more.scale or default_scale(info, make_config(info, options.kernel_args), more.window)
            hybrid = Hybrid(**{**more.given, "scale": scale})
            named: Values = {name: getattr(options, name) for name in ("batch", "dtype", "device")}
            named |= {"kernel": kernel, "kernel_args": dict(options.kernel_args), "hybrid": hybrid}
            if options.suite == "attention":
                sizes = AttentionSizes(heads=options.heads, head_dim=options.head_dim, **named)
                yield AttentionSuite(sizes, options.causal, options.backward)
                continue
            # The decoded token comes after its context.
            named |= {"longest": longest + options.decode, "layers": options.layers, "image_size": size}
            model = BenchModel(options.model or BERT_BASE, **named)
            if model.converted and (options.kernels or options.kernel_args or hybrid != PLAIN):
                raise ConfigError(
                    f"bench: {model.model!r} is already converted and has its own kernels; leave kernel and window out"
                )
            yield DecodeModelSuite(model) if options.decode else ModelSuite(model)


def run_tasks(tasks: Iterable[tuple[Suite, int, bool]], options: BenchOptions, on_event: Callback) -> BenchResult:
    """Measure suites at lengths, and the machine's noise before, between and after them.

    Args:
        tasks: suites, lengths, and whether memory is measured too.
        options: device, dtype and repeats.
        on_event: called with every event.
    """
    noise = meter.Noise(options.device)
    rows = []
    for suite, tokens, memory in tasks:
        on_event(Started(f"{suite.what}, {tokens:,} tokens"))
        rows.append(measure(suite, tokens, repeats=options.repeats, memory=memory))
        noise.probe()
    return BenchResult(meter.describe(options.device, options.dtype), noise.stop(), rows)


def measure(suite: Suite, tokens: int, *, repeats: int | None = None, memory: bool = True) -> Row:
    """Measure all variants of a suite at one length: memory first, then time in turns.

    Args:
        suite: what to measure.
        tokens: the length.
        repeats: turns; None: chosen from how long a turn takes.
        memory: whether peak memory is measured too.

    Raises:
        LinearizeError: if a variant fails for any reason except running out of memory, which counts as a result.
    """
    tried = suite.memory_variants if memory else suite.may_run_out_of_memory
    variants = {name: memory_of(suite, name, tokens) if name in tried else Variant() for name in suite.variants}
    calls: dict[str, meter.Call] = {}
    warm_up = 0.0
    for name in [name for name, variant in variants.items() if variant.problem is None]:
        try:
            calls[name] = suite.prepare(name, tokens)
            warm_up += meter.seconds_of(calls[name])
        except (RuntimeError, MemoryError) as error:
            calls.pop(name, None)
            variants[name] = out_of_memory(error)
    for name, timing in meter.in_turns(calls, repeats, warm_up=warm_up, calls=suite.calls).items():
        variants[name] = Variant(timing, variants[name].bytes)
    calls.clear()
    gc.collect()
    row = Row(suite.name, suite.what, tokens, suite.pair, variants)
    return replace(row, figures=suite.figures(row))


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set torch's number of threads inside the block; None: leave it unchanged."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)
