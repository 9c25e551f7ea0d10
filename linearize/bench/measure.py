"""Measure a suite at one length: memory of each variant in a process of its own first, then all of them in turns."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypedDict

import torch

from linearize.bench.memory import (
    OUT_OF_MEMORY,
    OutOfMemoryError,
    in_fresh_process,
    is_out_of_memory,
    limit_memory,
    peak,
    start_peak,
)
from linearize.bench.rows import Row, Variant
from linearize.bench.suite import Suite
from linearize.bench.timing import Call, Timing, in_turns, seconds_of

WARM_UP = 8
"""Tokens of the call that a fresh process makes before it is measured."""


def measure(suite: Suite, tokens: int, *, rate: float, repeats: int | None = None, memory: bool = True) -> Row:
    """Measure all variants of a suite at one length.

    Args:
        suite: what to measure.
        tokens: the length.
        rate: the machine's operations per second.
        repeats: turns; None: chosen from how long they take.
        memory: whether peak memory is measured too.

    Raises:
        LinearizeError: if a variant fails, other than by memory that runs out: that is a result.
    """
    tried = suite.memory_variants if memory else suite.may_run_out_of_memory
    taken = {name: memory_of(suite, name, tokens) for name in tried}
    calls: dict[str, Call] = {}
    variants: dict[str, Variant] = {}
    warm_up = 0.0
    for name in suite.variants:
        variants[name] = taken.get(name, Variant())
        if variants[name].problem is None:
            try:
                calls[name] = suite.prepare(name, tokens)
                warm_up += seconds_of(calls[name])
            except (RuntimeError, MemoryError) as error:
                variants[name] = _out_of_memory(error)
                calls.pop(name, None)
    times = in_turns(calls, repeats, warm_up=warm_up, calls=suite.calls)
    for name, values in times.items():
        variants[name] = Variant(Timing.of(values, suite.calls), variants[name].bytes)
    calls.clear()
    gc.collect()
    row = Row(suite.name, suite.what, tokens, suite.pair, variants)
    return Row(suite.name, suite.what, tokens, suite.pair, variants, suite.figures(row, rate))


def _out_of_memory(error: RuntimeError | MemoryError | OutOfMemoryError) -> Variant:
    """Return a variant that ran out of memory, and give back what it had; another error goes on."""
    if not (isinstance(error, OutOfMemoryError) or is_out_of_memory(error)):
        raise error
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Variant(problem=OUT_OF_MEMORY)


def memory_of(suite: Suite, variant: str, tokens: int) -> Variant:
    """Measure the peak memory of one variant: here on a GPU, in a fresh process on the CPU."""
    try:
        if suite.device == "cpu":
            return Variant(bytes=peak_memory(suite, variant, (tokens,))[tokens])
        if suite.device.startswith("cuda"):
            return Variant(bytes=_on_gpu(suite, variant, tokens))
    except (RuntimeError, MemoryError, OutOfMemoryError) as error:
        return _out_of_memory(error)
    return Variant()


class Measuring(TypedDict):
    """What the fresh process is asked for."""

    suite: str
    fields: dict[str, Any]
    variant: str
    lengths: list[int]
    threads: int


def peak_memory(suite: Suite, variant: str, lengths: Sequence[int]) -> dict[int, int]:
    """Return the bytes that a call of one variant adds to a fresh process's peak, by length.

    Raises:
        OutOfMemoryError: if memory runs out there.
        LinearizeError: if the process fails in another way.
    """
    request = Measuring(
        suite=suite.name,
        fields=asdict(suite),
        variant=variant,
        lengths=list(lengths),
        threads=torch.get_num_threads(),
    )
    found = in_fresh_process(measure_memory, request)
    return {int(tokens): taken for tokens, taken in found.items()}


def suite_kinds() -> dict[str, type[Suite]]:
    """Return the suites by name."""
    from linearize.bench.alignment import AlignmentSuite
    from linearize.bench.attention import AttentionSuite
    from linearize.bench.decode import DecodeSuite
    from linearize.bench.decode_model import DecodeModelSuite
    from linearize.bench.public_op import PublicOpSuite
    from linearize.bench.stage_one import StageOneSuite
    from linearize.bench.train import TrainSuite
    from linearize.bench.whole_model import ModelSuite

    kinds = (
        *(AlignmentSuite, AttentionSuite, DecodeModelSuite, DecodeSuite),
        *(ModelSuite, PublicOpSuite, StageOneSuite, TrainSuite),
    )
    return {kind.name: kind for kind in kinds}


def measure_memory(request: Measuring) -> dict[int, int]:
    """Body of the fresh process: a short call, then one per length; the bytes that each added to the peak."""
    torch.set_num_threads(request["threads"])
    suite = suite_kinds()[request["suite"]](**request["fields"])
    suite.prepare(request["variant"], WARM_UP)()
    limit_memory()
    taken = {}
    for tokens in request["lengths"]:
        gc.collect()
        before = start_peak()
        call = suite.prepare(request["variant"], tokens)
        if not suite.counts_prepared:
            before = start_peak()
        call()
        taken[tokens] = max(0, peak() - before)
        del call
    return taken


def _on_gpu(suite: Suite, variant: str, tokens: int) -> int:
    device = suite.device
    suite.prepare(variant, WARM_UP)()
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    call = suite.prepare(variant, tokens)
    if not suite.counts_prepared:
        before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads while the block runs; None: as many as before."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)
