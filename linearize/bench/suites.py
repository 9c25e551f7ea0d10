"""Measure a suite at one length: memory of each side in a process of its own first, then all sides in turns."""

from __future__ import annotations

import abc
import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from linearize.bench.memory import (
    OUT_OF_MEMORY,
    NoRoomError,
    in_fresh_process,
    is_out_of_memory,
    limit_memory,
    peak,
    start_peak,
)
from linearize.bench.rows import Row, Side
from linearize.bench.timing import Call, Timing, in_turns, seconds_of
from linearize.errors import ConfigError

WARM_UP = 8
"""Tokens of the call that a fresh process makes before it is measured."""


@dataclass(frozen=True)
class Suite(abc.ABC):
    """Something that can be done in several ways, at any length. Its fields are plain data.

    Attributes:
        name: of the kind.
        sides: the ways.
        pair: the two of them that are compared: the reference, and ours.
        remembered: the ways whose memory is measured.
        risky: the ways that may need more memory than there is: tried in a process of their own in any case.
        calls: of one side in a row, before it is the next one's turn.
        holds: whether memory counts what `prepare` makes (caches, states), and not only what a call needs.
    """

    name: ClassVar[str]
    sides: ClassVar[tuple[str, ...]] = ("softmax", "linear")
    pair: ClassVar[tuple[str, str]] = ("softmax", "linear")
    remembered: ClassVar[tuple[str, ...]] = ("softmax", "linear")
    risky: ClassVar[tuple[str, ...]] = ()
    calls: ClassVar[int] = 1
    holds: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def what(self) -> str:
        """Say what is measured, with all that tells it from another suite."""

    @property
    @abc.abstractmethod
    def device(self) -> str:
        """Where it runs."""

    @property
    @abc.abstractmethod
    def dtype(self) -> str:
        """Type of the numbers."""

    @abc.abstractmethod
    def prepare(self, side: str, tokens: int) -> Call:
        """Make the inputs and return the call."""

    @abc.abstractmethod
    def check(self) -> None:
        """Refuse what cannot be measured before anything is.

        Raises:
            LinearizeError: one of its children.
        """

    def figures(self, row: Row, rate: float) -> Mapping[str, float | None]:
        """Derive further figures of a row; `rate` is the machine's operations per second."""
        return {}


def suite_kinds() -> dict[str, type[Suite]]:
    """Return the suites by name."""
    from linearize.bench.alignment import AlignmentSuite
    from linearize.bench.attention import AttentionSuite
    from linearize.bench.decode import DecodeSuite
    from linearize.bench.public_op import PublicOpSuite
    from linearize.bench.stage_one import StageOneSuite
    from linearize.bench.whole_model import ModelSuite

    kinds = (AlignmentSuite, AttentionSuite, DecodeSuite, ModelSuite, PublicOpSuite, StageOneSuite)
    return {kind.name: kind for kind in kinds}


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """Return lengths ascending, each once.

    Raises:
        ConfigError: if there is none, or one is no length.
    """
    bad = [n for n in lengths if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1 << 24]
    if bad or not lengths:
        got = repr(bad[0]) if bad else "none"
        raise ConfigError(f"lengths: got {got}, expected numbers of tokens such as 512,4096,16384")
    return sorted(set(lengths))


def measure(suite: Suite, tokens: int, *, rate: float, repeats: int | None = None, memory: bool = True) -> Row:
    """Measure all sides of a suite at one length.

    Args:
        suite: what to measure.
        tokens: the length.
        rate: the machine's operations per second.
        repeats: turns; None: chosen from how long they take.
        memory: whether peak memory is measured too.

    Raises:
        LinearizeError: if a side fails, other than by memory that runs out: that is a result.
    """
    tried = suite.remembered if memory else suite.risky
    taken = {name: _memory(suite, name, tokens) for name in tried}
    calls: dict[str, Call] = {}
    sides: dict[str, Side] = {}
    warm_up = 0.0
    for name in suite.sides:
        sides[name] = taken.get(name, Side())
        if sides[name].problem is None:
            try:
                calls[name] = suite.prepare(name, tokens)
                warm_up += seconds_of(calls[name])
            except (RuntimeError, MemoryError) as error:
                sides[name] = _no_room(error)
                calls.pop(name, None)
    times = in_turns(calls, repeats, warm_up=warm_up, calls=suite.calls)
    for name, values in times.items():
        sides[name] = Side(Timing.of(values, suite.calls), sides[name].bytes)
    calls.clear()
    gc.collect()
    row = Row(suite.name, suite.what, tokens, suite.pair, sides)
    return Row(suite.name, suite.what, tokens, suite.pair, sides, suite.figures(row, rate))


def _no_room(error: RuntimeError | MemoryError | NoRoomError) -> Side:
    """Return a side that ran out of memory, and give back what it had; another error goes on."""
    if not (isinstance(error, NoRoomError) or is_out_of_memory(error)):
        raise error
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Side(problem=OUT_OF_MEMORY)


def _memory(suite: Suite, side: str, tokens: int) -> Side:
    """Measure the peak memory of one side: here on a GPU, in a fresh process on the CPU."""
    request = {"suite": suite.name, "fields": asdict(suite), "side": side, "tokens": tokens}
    try:
        if suite.device == "cpu":
            return Side(bytes=in_fresh_process(measure_memory, request | {"threads": torch.get_num_threads()}))
        if suite.device.startswith("cuda"):
            return Side(bytes=_on_gpu(suite, side, tokens))
    except (RuntimeError, MemoryError, NoRoomError) as error:
        return _no_room(error)
    return Side()


def measure_memory(request: dict[str, Any]) -> int:
    """Body of the fresh process: a short call, then the measured one; bytes that it added to the peak."""
    torch.set_num_threads(request["threads"])
    suite = suite_kinds()[request["suite"]](**request["fields"])
    side, tokens = request["side"], request["tokens"]
    suite.prepare(side, WARM_UP)()
    limit_memory()
    gc.collect()
    before = start_peak()
    call = suite.prepare(side, tokens)
    if not suite.holds:
        before = start_peak()
    call()
    return max(0, peak() - before)


def _on_gpu(suite: Suite, side: str, tokens: int) -> int:
    device = suite.device
    suite.prepare(side, WARM_UP)()
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    call = suite.prepare(side, tokens)
    if not suite.holds:
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
