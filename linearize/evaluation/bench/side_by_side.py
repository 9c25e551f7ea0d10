"""Converted models next to their own softmax (SDPA): time in turns, memory in separate processes.

Both variants have the same weights and the same forward: an observer makes the layers compute softmax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.core.errors import LinearizeError
from linearize.evaluation.bench.memory import peak_memory
from linearize.evaluation.bench.meter import Noise, NoiseWatch, in_turns
from linearize.evaluation.bench.model_suites import ModelSuite
from linearize.evaluation.bench.models import BenchModel
from linearize.evaluation.bench.rows import Row, Variant

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
        """Make it of a row whose variants both ran."""
        softmax, linear = (row.variants[variant].timing for variant in VARIANTS)
        assert softmax is not None and linear is not None
        memory = row.memory("softmax"), row.memory("linear")
        spreads = softmax.spread, linear.spread
        return cls(row.tokens, softmax.seconds, linear.seconds, *memory, linear.repeats, *spreads)

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
        One row per length, by model, with the memory of models that have a folder; and how quiet the machine was.
    """
    suites, memory = {}, {}
    for name, timed in models.items():
        path = None if timed.folder is None else str(Path(timed.folder).absolute())
        longest = max(timed.lengths, default=1)
        suites[name] = ModelSuite(BenchModel.of(timed.model, path, longest=longest, image_size=timed.image_size))
        for variant in VARIANTS:
            memory[name, variant] = {} if path is None else _memory(suites[name], variant, timed.lengths)
    watch = NoiseWatch(next(iter(suites.values())).device if suites else "cpu")
    rows: dict[str, list[Row]] = {name: [] for name in models}
    for tokens in sorted({tokens for timed in models.values() for tokens in timed.lengths}):
        sides = [(name, variant) for name in models if tokens in models[name].lengths for variant in VARIANTS]
        calls = {f"{variant} {name}": suites[name].prepare(variant, tokens) for name, variant in sides}
        timings = in_turns(calls, repeats)
        watch.probe()
        for name in dict.fromkeys(name for name, _ in sides):
            variants = {
                variant: Variant(timings[f"{variant} {name}"], memory[name, variant].get(tokens))
                for variant in VARIANTS
            }
            suite = suites[name]
            rows[name].append(Row(suite.name, suite.what, tokens, suite.pair, variants))
    return rows, watch.stop()


def _memory(suite: ModelSuite, variant: str, lengths: Sequence[int]) -> dict[int, int]:
    """Return peak bytes per length; empty if the process fails, as a report does not fail because of its memory."""
    try:
        return peak_memory(suite, variant, lengths)
    except LinearizeError:
        return {}
