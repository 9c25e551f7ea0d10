"""A converted checkpoint beside its own frozen softmax (SDPA): time in turns, memory in a process of its own per side.

Both sides are the same weights and the same forward: the softmax side is what the layers compute while observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linearize.bench.measure import peak_memory
from linearize.bench.models import BenchModel
from linearize.bench.rows import Row, Side
from linearize.bench.timing import Timing, in_turns
from linearize.bench.whole_model import ModelSuite
from linearize.errors import LinearizeError

SIDES = ("softmax", "linear")


@dataclass(frozen=True)
class Comparison:
    """One length, as plain data.

    Attributes:
        tokens: length of the input.
        softmax_seconds: median forward with softmax (SDPA).
        linear_seconds: median forward with the kernels.
        softmax_bytes: peak memory of that forward above the loaded model, or None.
        linear_bytes: the same with the kernels.
        repeats: forwards per side.
    """

    tokens: int
    softmax_seconds: float
    linear_seconds: float
    softmax_bytes: int | None
    linear_bytes: int | None
    repeats: int

    @classmethod
    def of(cls, row: Row) -> Comparison:
        """Take it from a row whose sides both ran."""
        timings = [row.sides[side].timing for side in SIDES]
        softmax, linear = (timing for timing in timings if timing is not None)
        memory = [row.memory(side) for side in SIDES]
        return cls(row.tokens, softmax.seconds, linear.seconds, memory[0], memory[1], linear.repeats)

    @property
    def speedup(self) -> float:
        """Softmax's time over the linear model's."""
        return self.softmax_seconds / self.linear_seconds


def measure_speed(model: Any, folder: str | None, lengths: Sequence[int], repeats: int = 3) -> list[Row]:
    """Time one forward of a text model without its head per length, and measure its memory.

    Args:
        model: a converted text model.
        folder: where it is saved, for the memory of each side in a fresh process; None: no memory.
        lengths: tokens, ascending.
        repeats: forwards per side; medians are returned.
    """
    if not lengths:
        return []
    path = None if folder is None else str(Path(folder).absolute())
    suite = ModelSuite(BenchModel.of(model, path, longest=max(lengths)))
    memory = {side: {} if path is None else _memory(suite, side, lengths) for side in SIDES}
    rows = []
    for tokens in lengths:
        times = in_turns({side: suite.prepare(side, tokens) for side in SIDES}, repeats)
        sides = {side: Side(Timing.of(values), memory[side].get(tokens)) for side, values in times.items()}
        rows.append(Row(suite.name, suite.what, tokens, suite.pair, sides))
    return rows


def _memory(suite: ModelSuite, side: str, lengths: Sequence[int]) -> dict[int, int]:
    """Return peak bytes per length; empty where the process failed, for a report is no place to fail over that."""
    try:
        return peak_memory(suite, side, lengths)
    except LinearizeError:
        return {}
