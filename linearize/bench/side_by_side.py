"""Converted checkpoints beside their own frozen softmax (SDPA): time in turns, memory in separate processes.

Both variants are the same weights and the same forward: the softmax variant is what the layers compute while observed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.bench.machine import Noise, NoiseWatch
from linearize.bench.measure import peak_memory
from linearize.bench.models import BenchModel
from linearize.bench.rows import Row, Variant
from linearize.bench.timing import Call, Timing, in_turns
from linearize.bench.whole_model import ModelSuite
from linearize.errors import LinearizeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARIANTS = ("softmax", "linear")
TURNS = 7


@dataclass(frozen=True)
class Comparison:
    """One length, as plain data.

    Attributes:
        tokens: length of the input.
        softmax_seconds: median forward with softmax (SDPA).
        linear_seconds: median forward with the kernels.
        softmax_bytes: peak memory of that forward above the loaded model, or None.
        linear_bytes: the same with the kernels.
        repeats: forwards per variant.
        softmax_spread: distance of the quartiles over the median.
        linear_spread: the same with the kernels.
    """

    tokens: int
    softmax_seconds: float
    linear_seconds: float
    softmax_bytes: int | None
    linear_bytes: int | None
    repeats: int
    softmax_spread: float
    linear_spread: float

    @classmethod
    def of(cls, row: Row) -> Comparison:
        """Take it from a row whose variants both ran."""
        timings = [row.variants[variant].timing for variant in VARIANTS]
        softmax, linear = (timing for timing in timings if timing is not None)
        memory = [row.memory(variant) for variant in VARIANTS]
        spreads = softmax.spread, linear.spread
        return cls(row.tokens, softmax.seconds, linear.seconds, memory[0], memory[1], linear.repeats, *spreads)

    @property
    def speedup(self) -> float:
        """Softmax's time over the linear model's."""
        return self.softmax_seconds / self.linear_seconds


@dataclass(frozen=True)
class Timed:
    """A converted model to time.

    Attributes:
        model: the model.
        lengths: tokens of the inputs, ascending.
        folder: where it is saved, for the memory of each variant in a fresh process; None: no memory.
        image_size: pixels of the pictures of a model of images, whose one length is their tokens; None: it reads text.
    """

    model: PreTrainedModel
    lengths: Sequence[int]
    folder: str | None = None
    image_size: int | None = None


def measure_speed(models: Mapping[str, Timed], repeats: int = TURNS) -> tuple[dict[str, list[Row]], Noise]:
    """Time one forward without the head per length, all models with and without softmax in the same turns.

    Args:
        models: what to time, by name.
        repeats: forwards per variant; medians are returned.

    Returns:
        One row per length, by model, with the memory where there is a folder; and how quiet the machine was.
    """
    suites, memory = {}, {}
    for name, one in models.items():
        path = None if one.folder is None else str(Path(one.folder).absolute())
        longest = max(one.lengths, default=1)
        suites[name] = ModelSuite(BenchModel.of(one.model, path, longest=longest, image_size=one.image_size))
        for variant in VARIANTS:
            memory[name, variant] = {} if path is None else _memory(suites[name], variant, one.lengths)
    watch = NoiseWatch(next(iter(suites.values())).device if suites else "cpu")
    rows: dict[str, list[Row]] = {name: [] for name in models}
    for tokens in sorted({tokens for one in models.values() for tokens in one.lengths}):
        watch.probe()
        names = [name for name, one in models.items() if tokens in one.lengths]
        calls: dict[str, Call] = {}
        for name in names:
            calls |= {f"{variant} {name}": suites[name].prepare(variant, tokens) for variant in VARIANTS}
        times = in_turns(calls, repeats)
        for name in names:
            variants = {
                variant: Variant(Timing.of(times[f"{variant} {name}"]), memory[name, variant].get(tokens))
                for variant in VARIANTS
            }
            suite = suites[name]
            rows[name].append(Row(suite.name, suite.what, tokens, suite.pair, variants))
    return rows, watch.stop()


def _memory(suite: ModelSuite, variant: str, lengths: Sequence[int]) -> dict[int, int]:
    """Return peak bytes per length; empty where the process failed, for a report is no place to fail over that."""
    try:
        return peak_memory(suite, variant, lengths)
    except LinearizeError:
        return {}
