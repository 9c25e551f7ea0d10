"""Checkpoints compared on the same rows of a task: each at its own length, their differences paired, timed in turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from linearize.checkpoint.loading import move
from linearize.core.errors import ConfigError
from linearize.evaluation.bench.memory import peak_of_reading
from linearize.evaluation.bench.meter import Call, NoiseWatch, in_turns
from linearize.evaluation.report.paired import SideDifference, score_difference
from linearize.fidelity.ablate import ablated
from linearize.jobs.events import Callback, Started, ignore
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.load import (
    beyond_training,
    check_trained,
    fit_tokenizer,
    length_limit,
    load_for_task,
    load_processor,
    whole_length,
)
from linearize.training.stage_two.metrics import BALANCED, Measured, PositionLoss
from linearize.training.stage_two.prepare import Given, prepare
from linearize.training.stage_two.prepared import Facts, TaskData
from linearize.training.stage_two.task_types.text import TOKENS
from linearize.training.stage_two.tasks import Task, above_chance
from linearize.training.stage_two.trainer import measure_with_interval

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

MOST_ROWS = 32
"""The most rows of a batch by default."""
TIMED_ROWS, TURNS = 8, 7
"""Rows that every side reads per turn, and turns."""


@dataclass(frozen=True)
class Setup:
    """The rows that all sides are measured on, and how they are read.

    Attributes:
        task: the task.
        dataset: as in `linearize.training.stage_two.prepare.prepare`.
        batch_size: rows per batch; None: as many as have `TOKENS` tokens, `MOST_ROWS` at most.
        device: where models run.
        memory: whether the peak memory of the longest row is measured, in a separate process.
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
        name: for tables.
        model: folder or Hub name.
        options: lengths and limits; with `chunks`, outputs are averaged over chunks of `max_length`.
        without: the part of its attention that is removed (`linearize.fidelity.ablate.PARTS`), or None.
    """

    name: str
    model: str
    options: DataOptions
    without: str | None = None


@dataclass(frozen=True)
class SideResult:
    """The score of one side, as plain data.

    Attributes:
        name: for tables.
        model: folder or Hub name.
        max_length: tokens that it reads of a row, or of a chunk; None if rows are not texts.
        chunks: whether it reads rows as chunks.
        cut_share: share of the rows that were cut; None if rows cannot be cut.
        score: the task's main metric.
        interval: its 95 % bootstrap interval.
        metrics: all metrics.
        note: that it read more tokens than in training; None if it did not.
        by_position: of causal language models, the loss by the number of tokens before the predicted one.
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
    """Time and memory of one side, as plain data.

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
    """Times of all sides: the same rows, in turns, so that other work of the machine slows all of them alike.

    Attributes:
        sides: one entry each.
        rows: rows per turn.
        turns: number of turns.
        noise: how quiet the machine was, one line.
        noisy: whether the machine was too noisy for a verdict.
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
        times = ", ".join(f"{side.seconds:.2g} s ({side.name})" for side in self.sides)
        return f"Time per row, medians of {self.turns} turns over {self.rows} rows: {times}."


@dataclass(frozen=True)
class Read:
    """A measured side: its rows, its model and its score."""

    side: Side
    data: TaskData
    model: PreTrainedModel
    measured: Measured
    result: SideResult


class Sides:
    """Measures checkpoints on the same rows and times them in turns; every checkpoint is loaded once.

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
            LinearizeError: one of its children, for everything the user can correct.
        """
        setup = self.setup
        self.on_event(Started(f"measuring: {side.name}"))
        processor = load_processor(side.model, setup.task.modality)
        data = prepare(setup.task, processor, side.options, data=setup.dataset)
        model = next((read.model for read in self.read if read.side.model == side.model), None)
        if model is None:
            check_trained(side.model, setup.task)
            model = move(load_for_task(side.model, data), setup.device).eval()
            fit_tokenizer(model, processor)
        facts = {"context": side.options.max_length, **data.facts}
        length = facts.get("max_length", facts["context"])
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
            any(
                above_chance(setup.task, score.score, chance=score.chance, interval=score.interval) for score in scores
            ),
            None if balanced is None or balanced.interval is None else (balanced.score, balanced.interval),
        )
        self.read.append(Read(side, data, model, measured, result))
        return self.read[-1]

    def differences(self, ours: Read) -> tuple[SideDifference, ...]:
        """Compare one side with all others, also by macro-F1 if classes are uneven.

        Sides whose rows are not the same (windows of other lengths) are left out.
        """
        task, differences = self.setup.task, []
        for other in (read for read in self.read if read is not ours):
            names, pair = (ours.side.name, other.side.name), (ours.measured, other.measured)
            balanced = (ours.measured.balanced, other.measured.balanced)
            differences.append(score_difference(task, ", ".join(task.score), *names, *pair))
            differences.append(score_difference(task, BALANCED, *names, *balanced))
        return tuple(difference for difference in differences if difference is not None)

    def times(self) -> Times:
        """Time all sides in turns on some rows, short and long ones; measure their memory if the setup says so."""
        self.on_event(Started("timing all sides in turns"))
        text = self.setup.task.modality == "text"
        timed = [read for read in self.read if read.side.without is None]
        rows = _spread_rows([read.data for read in timed], text=text)
        watch = NoiseWatch(self.setup.device)
        calls = {read.side.name: self._reading(read, rows) for read in timed}
        timings = in_turns(calls, TURNS)
        noise = watch.stop()
        sides = []
        for read in timed:
            timing = timings[read.side.name]
            sides.append(SideTime(read.side.name, timing.seconds / len(rows), timing.spread, self._peak(read)))
        return Times(tuple(sides), len(rows), TURNS, noise.text, noise.too_noisy)

    def _reading(self, read: Read, numbers: Sequence[int]) -> Call:
        """Return a call that reads some rows, in batches of the size that they were measured in."""
        size = self.setup.batch_size or rows_per_batch(read.data.facts)
        rows = [read.data.validation[number] for number in numbers]
        batches = [read.data.collate(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
        moved = [{name: value.to(self.setup.device) for name, value in batch.items()} for batch in batches]
        return partial(_forward, read.data.type.wrap(read.model), moved)

    def _peak(self, read: Read) -> int | None:
        """Measure the peak memory of reading the longest row; None if that was not asked for."""
        most = read.result.max_length
        if not self.setup.memory or most is None:
            return None
        longest = read.data.facts.get("longest_row", most)
        pieces = -(-longest // most) if read.side.options.chunks else 1
        tokens = min(longest, most)
        head = self.setup.task.head.auto_class
        return peak_of_reading(read.side.model, head, min(pieces, max(1, TOKENS // tokens)), tokens, self.setup.device)


@torch.no_grad()
def _forward(model: nn.Module, batches: Iterable[dict[str, torch.Tensor]]) -> None:
    for batch in batches:
        model(**batch)


def _spread_rows(data: Sequence[TaskData], *, text: bool) -> list[int]:
    """Choose up to `TIMED_ROWS` rows that all sides have, evenly over their lengths; fewer if rows are very long."""
    count = min(len(side.validation) for side in data)
    lengths = [0] * count
    if text:
        lengths = [max(len(side.validation[row].get("input_ids", ())) for side in data) for row in range(count)]
    order = sorted(range(count), key=lambda row: lengths[row])
    wanted = max(1, min(TIMED_ROWS, count, TOKENS // max(1, max(lengths))))
    return [order[(2 * number + 1) * count // (2 * wanted)] for number in range(wanted)]


def rows_per_batch(facts: Facts) -> int:
    """Return the rows of a batch: as many as have `TOKENS` tokens, `MOST_ROWS` at most."""
    lengths = [facts.get("max_length"), facts.get("context"), facts.get("longest_row")]
    return rows_of_tokens(TOKENS, min((length for length in lengths if length is not None), default=1))


def rows_of_tokens(tokens: int, length: int) -> int:
    """Return how many rows of a length have at most so many tokens, from 1 to `MOST_ROWS`."""
    return max(1, min(MOST_ROWS, tokens // max(1, length)))


def original_options(name: str, options: DataOptions, task: Task) -> DataOptions:
    """Return how a softmax original reads rows that another model reads by `options`: at the original's length."""
    if task.modality != "text":
        return options
    if options.auto_length:
        return replace(options, max_length=whole_length(name, task))
    return replace(options, max_length=min(options.max_length, length_limit(name) or options.max_length))


def chunk_options(name: str, options: DataOptions, length: int | None) -> DataOptions:
    """Return how an original reads rows in chunks.

    Args:
        name: the original.
        options: how it reads cut rows.
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
    """Return why rows cannot be read in chunks of `length` tokens; None if they can."""
    if not data.chunkable:
        return f"No chunks: task {data.task.name} does not read one text a row (or the tokenizer is a slow one)."
    longest = data.facts["longest_row"]
    if longest <= length:
        return (
            f"The longest row has {longest:,} tokens, and {title} reads {length:,}: nothing is cut, so that chunks "
            "would be whole rows, and a greater length cannot decide here."
        )
    return None
