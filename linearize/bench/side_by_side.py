"""A converted checkpoint beside its own frozen softmax (SDPA): time in turns, memory in processes of their own.

Both variants are the same weights and the same forward: the softmax variant is what the layers compute while observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.bench.measure import peak_memory
from linearize.bench.models import BenchModel
from linearize.bench.rows import Row, Variant
from linearize.bench.timing import Timing, in_turns
from linearize.bench.whole_model import ModelSuite
from linearize.errors import LinearizeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARIANTS = ("softmax", "linear")


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
    """

    tokens: int
    softmax_seconds: float
    linear_seconds: float
    softmax_bytes: int | None
    linear_bytes: int | None
    repeats: int

    @classmethod
    def of(cls, row: Row) -> Comparison:
        """Take it from a row whose variants both ran."""
        timings = [row.variants[variant].timing for variant in VARIANTS]
        softmax, linear = (timing for timing in timings if timing is not None)
        memory = [row.memory(variant) for variant in VARIANTS]
        return cls(row.tokens, softmax.seconds, linear.seconds, memory[0], memory[1], linear.repeats)

    @property
    def speedup(self) -> float:
        """Softmax's time over the linear model's."""
        return self.softmax_seconds / self.linear_seconds


def measure_speed(
    model: PreTrainedModel,
    folder: str | None,
    lengths: Sequence[int],
    repeats: int = 3,
    *,
    image_size: int | None = None,
) -> list[Row]:
    """Time one forward of a model without its head per length, and measure its memory.

    Args:
        model: a converted model.
        folder: where it is saved, for the memory of each variant in a fresh process; None: no memory.
        lengths: tokens, ascending.
        repeats: forwards per variant; medians are returned.
        image_size: pixels of the pictures of a model of images, whose one length is their tokens; None: it reads text.
    """
    if not lengths:
        return []
    path = None if folder is None else str(Path(folder).absolute())
    suite = ModelSuite(BenchModel.of(model, path, longest=max(lengths), image_size=image_size))
    memory = {variant: {} if path is None else _memory(suite, variant, lengths) for variant in VARIANTS}
    rows = []
    for tokens in lengths:
        times = in_turns({variant: suite.prepare(variant, tokens) for variant in VARIANTS}, repeats)
        variants = {
            variant: Variant(Timing.of(values), memory[variant].get(tokens)) for variant, values in times.items()
        }
        rows.append(Row(suite.name, suite.what, tokens, suite.pair, variants))
    return rows


def _memory(suite: ModelSuite, variant: str, lengths: Sequence[int]) -> dict[int, int]:
    """Return peak bytes per length; empty where the process failed, for a report is no place to fail over that."""
    try:
        return peak_memory(suite, variant, lengths)
    except LinearizeError:
        return {}
