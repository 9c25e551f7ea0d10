"""Sides of a comparison: one checkpoint at one length each, all measured on the same rows of a task, timed in turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from linearize.bench.machine import NoiseWatch
from linearize.bench.reading import peak_of_reading
from linearize.bench.timing import Call, Timing, in_turns
from linearize.errors import ConfigError
from linearize.fidelity.ablate import ablated
from linearize.finetune.chunks import TOKENS
from linearize.finetune.config import DataOptions
from linearize.finetune.interval import BALANCED, Difference, Measured, paired_difference
from linearize.finetune.lengths import beyond_training, length_limit, whole_length
from linearize.finetune.load import check_trained, fit_tokenizer, load_for_task, load_processor
from linearize.finetune.metrics.by_position import PositionLoss
from linearize.finetune.prepare import prepare
from linearize.finetune.prepared import Facts, TaskData
from linearize.finetune.tables import Given
from linearize.finetune.task import Task
from linearize.finetune.tasks import above_chance
from linearize.finetune.trainer import measure_with_interval
from linearize.jobs.events import Callback, Started, ignore
from linearize.loading import move

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

MOST_ROWS = 32
"""The most rows of a batch by default."""
TIMED_ROWS, TURNS = 8, 7
"""Rows that every side reads in each of so many turns."""


@dataclass(frozen=True)
class Setup:
    """The rows that all sides are measured on, and how.

    Attributes:
        task: the task.
        dataset: see `linearize.finetune.prepare.prepare`.
        batch_size: rows per batch; None: as many as have `TOKENS` tokens, `MOST_ROWS` at most.
        device: where models run.
        memory: whether the peak memory of the longest row is measured, in its own process.
    """

    task: Task
    dataset: Given | None
    batch_size: int | None
    device: str
    memory: bool = False


@dataclass(frozen=True)
class Side:
    """One checkpoint, and how it reads the rows.

    Attributes:
        name: what tables call it.
        model: folder or Hub name.
        options: lengths and limits; `chunks` where its outputs are averaged over chunks of `max_length`.
        without: the part of its attention that is taken away (`linearize.fidelity.ablate.PARTS`), or None.
    """

    name: str
    model: str
    options: DataOptions
    without: str | None = None


@dataclass(frozen=True)
class SideResult:
    """What one side reaches, as plain data.

    Attributes:
        name: what tables call it.
        model: folder or Hub name.
        max_length: tokens that it reads of a row, or of a chunk; None: rows are no texts.
        chunks: whether it reads rows as chunks.
        cut_share: share of the rows that were cut; None where rows cannot be cut.
        score: the task's main metric.
        interval: its 95 % bootstrap interval.
        metrics: all metrics.
        note: that it read beyond what it was trained on; None where it did not.
        by_position: of causal language models, the loss by how many tokens stand before the predicted one.
        learned: whether it is above chance: by its score, or by macro-F1 if classes are uneven.
        balanced: macro-F1 and its interval, if the task has it and classes are uneven.
    """

    name: str
    model: str
    max_length: int | None
    chunks: bool
    cut_share: float | None
    score: float
    interval: tuple[float, float] | None
    metrics: dict[str, float]
    note: str | None = None
    by_position: tuple[PositionLoss, ...] = ()
    learned: bool = True
    balanced: tuple[float, tuple[float, float]] | None = None


@dataclass(frozen=True)
class SideTime:
    """What reading costs one side, as plain data.

    Attributes:
        name: of the side.
        seconds: of the model's forward pass, per row; median over the turns.
        spread: distance of the quartiles over the median.
        peak_bytes: that reading the longest row adds to the loaded model; None: not measured.
    """

    name: str
    seconds: float
    spread: float
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Times:
    """What reading costs all sides: the same rows, in turns, so that what else the machine does falls on all alike.

    Attributes:
        sides: one each.
        rows: how many rows were read per turn.
        turns: how often.
        noise: how quiet the machine was, one line.
        noisy: whether the machine was too noisy for the times to be believed.
    """

    sides: tuple[SideTime, ...]
    rows: int
    turns: int
    noise: str
    noisy: bool

    @property
    def text(self) -> str:
        """One or two sentences."""
        if self.noisy:
            return f"No verdict on speed, the machine was {self.noise}."
        times = ", ".join(f"{one.seconds:.2g} s ({one.name})" for one in self.sides)
        return f"Time per row, medians of {self.turns} turns over {self.rows} rows: {times}."


@dataclass(frozen=True)
class SideDifference:
    """How far one side is above another on the same rows, as plain data.

    Attributes:
        side: name of the one.
        minus: name of the other.
        by: the score, or "f1_macro".
        value: the one's score minus the other's.
        interval: its 95 % paired bootstrap interval.
        within_noise: whether 0 lies in the interval.
        sentence: the same for people.
    """

    side: str
    minus: str
    by: str
    value: float
    interval: tuple[float, float]
    within_noise: bool
    sentence: str


@dataclass(frozen=True)
class Read:
    """A measured side: its rows, its model, and what it reaches."""

    side: Side
    data: TaskData
    model: PreTrainedModel
    measured: Measured
    result: SideResult


class Sides:
    """Measures checkpoints on the same rows, and times them in turns; every checkpoint is loaded once.

    Args:
        setup: the rows, and how they are measured.
        on_event: called with `Started` before each side.
    """

    def __init__(self, setup: Setup, on_event: Callback = ignore) -> None:
        self.setup, self.on_event = setup, on_event
        self.read: list[Read] = []

    def measure(self, side: Side) -> Read:
        """Measure one side; the rows are made with its own tokenizer or image processor.

        Raises:
            LinearizeError: one of its children, for everything the user can put right.
        """
        setup = self.setup
        self.on_event(Started(f"measuring: {side.name}"))
        processor = load_processor(side.model, setup.task.modality)
        data = prepare(setup.task, processor, side.options, data=setup.dataset)
        model = next((one.model for one in self.read if one.side.model == side.model), None)
        if model is None:
            check_trained(side.model, setup.task)
            model = move(load_for_task(side.model, data), setup.device).eval()
            fit_tokenizer(model, processor)
        length = data.facts.get("max_length", data.facts.get("context", side.options.max_length))
        note = beyond_training(model, setup.task, length)
        with ablated(model, side.without) if side.without is not None else nullcontext():
            measured = measure_with_interval(model, data, batch_size=setup.batch_size or rows_per_batch(data.facts))
        balanced = measured.balanced
        scores = [measured, *([] if balanced is None else [balanced])]
        result = SideResult(
            side.name,
            side.model,
            length if setup.task.modality == "text" else None,
            side.options.chunks,
            data.facts.get("cut_share"),
            measured.score,
            measured.interval,
            measured.metrics,
            note,
            measured.by_position,
            any(above_chance(setup.task, one.score, chance=one.chance, interval=one.interval) for one in scores),
            None if balanced is None or balanced.interval is None else (balanced.score, balanced.interval),
        )
        self.read.append(Read(side, data, model, measured, result))
        return self.read[-1]

    def differences(self, ours: Read) -> tuple[SideDifference, ...]:
        """Compare one side with all others; those whose rows are not the same (windows of other lengths) are left out.

        If classes are uneven, macro-F1 is compared too.
        """
        found = []
        for other in (one for one in self.read if one is not ours):
            scores = paired_difference(ours.measured, other.measured)
            balanced = paired_difference(ours.measured.balanced, other.measured.balanced)
            found.append(_difference(self.setup.task, ", ".join(self.setup.task.score), ours, other, scores))
            found.append(_difference(self.setup.task, BALANCED, ours, other, balanced))
        return tuple(one for one in found if one is not None)

    def times(self) -> Times:
        """Time all sides on some of the rows, short and long ones, in turns; and their memory, if that is asked for."""
        self.on_event(Started("timing all sides in turns"))
        text = self.setup.task.modality == "text"
        timed = [one for one in self.read if one.side.without is None]
        places = _spread_rows([one.data for one in timed], text=text)
        watch = NoiseWatch(self.setup.device)
        watch.probe()
        calls = {one.side.name: self._reading(one, places) for one in timed}
        taken = {name: Timing.of(times) for name, times in in_turns(calls, TURNS).items()}
        noise = watch.stop()
        sides = []
        for one in timed:
            timing = taken[one.side.name]
            sides.append(SideTime(one.side.name, timing.seconds / len(places), timing.spread, self._peak(one)))
        return Times(tuple(sides), len(places), TURNS, noise.text, noise.too_noisy)

    def _reading(self, one: Read, places: Sequence[int]) -> Call:
        """Return a call that reads some rows, in the batches that they are measured in."""
        size = self.setup.batch_size or rows_per_batch(one.data.facts)
        rows = [one.data.validation[place] for place in places]
        batches = [one.data.collate(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
        moved = [{name: value.to(self.setup.device) for name, value in batch.items()} for batch in batches]
        return partial(_forward, one.model if one.data.wrap is None else one.data.wrap(one.model), moved)

    def _peak(self, one: Read) -> int | None:
        """Measure the peak memory of reading the longest row as it is read here; None if that was not asked for."""
        if not self.setup.memory or one.result.max_length is None:
            return None
        longest = one.data.facts.get("longest_row", one.result.max_length)
        pieces = -(-longest // one.result.max_length) if one.side.options.chunks else 1
        tokens = min(longest, one.result.max_length)
        head = self.setup.task.head.auto_class
        return peak_of_reading(one.side.model, head, min(pieces, max(1, TOKENS // tokens)), tokens, self.setup.device)


@torch.no_grad()
def _forward(model: nn.Module, batches: Iterable[dict[str, torch.Tensor]]) -> None:
    for batch in batches:
        model(**batch)


def _spread_rows(data: Sequence[TaskData], *, text: bool) -> list[int]:
    """Choose up to `TIMED_ROWS` rows that all sides have, evenly over their lengths; fewer if rows are very long."""
    count = min(len(one.validation) for one in data)
    lengths = [0] * count
    if text:
        lengths = [max(len(one.validation[place].get("input_ids", ())) for one in data) for place in range(count)]
    order = sorted(range(count), key=lambda place: lengths[place])
    wanted = max(1, min(TIMED_ROWS, count, TOKENS // max(1, max(lengths))))
    return [order[(2 * number + 1) * count // (2 * wanted)] for number in range(wanted)]


def rows_per_batch(facts: Facts) -> int:
    """Return how many rows a batch has: as many as have `TOKENS` tokens, `MOST_ROWS` at most."""
    lengths = [facts.get("max_length"), facts.get("context"), facts.get("longest_row")]
    return rows_of_tokens(TOKENS, min((length for length in lengths if length is not None), default=1))


def rows_of_tokens(tokens: int, length: int) -> int:
    """Return how many rows of a length have at most so many tokens: 1 at least, `MOST_ROWS` at most."""
    return max(1, min(MOST_ROWS, tokens // max(1, length)))


def original_options(name: str, options: DataOptions, task: Task) -> DataOptions:
    """Return how a softmax original reads the rows that another model reads by `options`: at its own length."""
    if task.modality != "text":
        return options
    if options.auto_length:
        return replace(options, max_length=whole_length(name, task))
    return replace(options, max_length=min(options.max_length, length_limit(name) or options.max_length))


def chunk_options(name: str, options: DataOptions, length: int | None) -> DataOptions:
    """Return how an original reads the rows as chunks.

    Args:
        name: the original.
        options: how it reads them cut.
        length: tokens per chunk; None: as many as it reads of a cut row.

    Raises:
        ConfigError: if the chunks are longer than the original takes.
    """
    check_chunk_length(name, length)
    return replace(options, max_length=length or options.max_length, auto_length=False, chunks=True)


def check_chunk_length(name: str, length: int | None) -> None:
    """Refuse chunks that are longer than an original takes.

    Raises:
        ConfigError: if they are.
    """
    most = length_limit(name)
    if length is not None and most is not None and length > most:
        raise ConfigError(
            f"chunk_length: got {length}, but {name!r} takes at most {most} tokens; lower it, or leave it out"
        )


def why_no_chunks(data: TaskData, length: int, title: str = "the original") -> str | None:
    """Say why rows are not read as chunks of `length` tokens; None where they are."""
    if not data.chunkable:
        return f"No chunks: task {data.task.name} does not read one text a row (or the tokenizer is a slow one)."
    longest = data.facts["longest_row"]
    if longest <= length:
        return (
            f"The longest row has {longest:,} tokens, and {title} reads {length:,}: nothing is cut, so that chunks "
            "would be whole rows, and a greater length cannot decide here."
        )
    return None


def _difference(task: Task, by: str, ours: Read, other: Read, found: Difference | None) -> SideDifference | None:
    if found is None:
        return None
    one, two = ours.side.name, other.side.name
    said = f" by {by}" if by == BALANCED else ""
    text = f"{one} is {_how_far(task, found)} {two}{said} (95 % interval of the difference: {_signed(task, found)})"
    noise = ": within the noise." if found.within_noise else "."
    return SideDifference(
        one, two, by, found.value, found.interval, found.within_noise, text[0].upper() + text[1:] + noise
    )


def _how_far(task: Task, found: Difference) -> str:
    better = (found.value < 0) == task.lower_is_better
    size = f"{100 * abs(found.value):.2f} points" if task.percent else f"{abs(found.value):.3f}"
    if found.value == 0:
        return "level with"
    return f"{size} {'better' if better else 'worse'} than"


def _signed(task: Task, found: Difference) -> str:
    scale, digits = (100, 2) if task.percent else (1, 3)
    return " to ".join(f"{scale * end:+.{digits}f}" for end in found.interval)
