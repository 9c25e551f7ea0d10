"""Sides of a comparison: one checkpoint at one length each, all measured on the same rows of a task."""

from __future__ import annotations

from dataclasses import dataclass, replace

from linearize.bench.reading import peak_of_reading
from linearize.errors import ConfigError
from linearize.finetune.chunks import TOKENS
from linearize.finetune.config import DataOptions
from linearize.finetune.interval import Difference, Measured, measure_with_interval, paired_difference
from linearize.finetune.lengths import beyond_training, length_limit, whole_length
from linearize.finetune.load import check_trained, fit_tokenizer, load_for_task, load_processor
from linearize.finetune.metrics.by_position import PositionLoss
from linearize.finetune.prepare import prepare
from linearize.finetune.prepared import Facts, TaskData
from linearize.finetune.tables import Given
from linearize.finetune.task import Task
from linearize.jobs.events import Callback, Started, ignore
from linearize.loading import move

MOST_ROWS = 32
"""Rows of a batch where nobody says it and they are short."""


@dataclass(frozen=True)
class Setup:
    """The rows that all sides are measured on, and how.

    Attributes:
        task: the task.
        dataset: see `linearize.finetune.prepare.prepare`.
        batch_size: rows per batch; None: as many as have `TOKENS` tokens, `MOST_ROWS` at most.
        device: where models run.
        memory: whether the peak memory of the longest row is measured, in a process of its own.
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
    """

    name: str
    model: str
    options: DataOptions


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
        seconds_per_row: of the model's forward passes.
        peak_bytes: that reading the longest row adds to the loaded model; None: not measured.
        note: that it read beyond what it was trained on; None where it did not.
        by_position: of causal language models, the loss by how many tokens stand before the predicted one.
    """

    name: str
    model: str
    max_length: int | None
    chunks: bool
    cut_share: float | None
    score: float
    interval: tuple[float, float] | None
    metrics: dict[str, float]
    seconds_per_row: float
    peak_bytes: int | None = None
    note: str | None = None
    by_position: tuple[PositionLoss, ...] = ()


@dataclass(frozen=True)
class SideDifference:
    """How far one side is above another on the same rows, as plain data.

    Attributes:
        side: name of the one.
        minus: name of the other.
        value: the one's score minus the other's.
        interval: its 95 % paired bootstrap interval.
        within_noise: whether 0 lies in the interval.
        sentence: the same for people.
    """

    side: str
    minus: str
    value: float
    interval: tuple[float, float]
    within_noise: bool
    sentence: str


def measure_side(setup: Setup, side: Side, on_event: Callback = ignore) -> tuple[TaskData, Measured, SideResult]:
    """Measure one side; the rows are made with its own tokenizer or image processor.

    Raises:
        LinearizeError: one of its children, for everything the user can put right.
    """
    on_event(Started(f"measuring: {side.name}"))
    processor = load_processor(side.model, setup.task.modality)
    data = prepare(setup.task, processor, side.options, data=setup.dataset)
    check_trained(side.model, setup.task)
    model = move(load_for_task(side.model, data), setup.device).eval()
    fit_tokenizer(model, processor)
    length = data.facts.get("max_length", data.facts.get("context", side.options.max_length))
    note = beyond_training(model, setup.task, length)
    measured = measure_with_interval(model, data, batch_size=setup.batch_size or rows_per_batch(data.facts))
    text = setup.task.modality == "text"
    result = SideResult(
        side.name,
        side.model,
        length if text else None,
        side.options.chunks,
        data.facts.get("cut_share"),
        measured.score,
        measured.interval,
        measured.metrics,
        measured.seconds_per_unit,
        _peak(setup, side, data, length) if setup.memory and text else None,
        note,
        measured.by_position,
    )
    return data, measured, result


def rows_per_batch(facts: Facts) -> int:
    """Return how many rows a batch has: as many as have `TOKENS` tokens, `MOST_ROWS` at most."""
    lengths = [facts.get("max_length"), facts.get("context"), facts.get("longest_row")]
    return rows_of_tokens(TOKENS, min((length for length in lengths if length is not None), default=1))


def rows_of_tokens(tokens: int, length: int) -> int:
    """Return how many rows of a length have at most so many tokens: 1 at least, `MOST_ROWS` at most."""
    return max(1, min(MOST_ROWS, tokens // max(1, length)))


def _peak(setup: Setup, side: Side, data: TaskData, length: int) -> int | None:
    """Measure the peak memory of reading the longest row as it is read here."""
    longest = data.facts.get("longest_row", length)
    pieces = -(-longest // length) if side.options.chunks else 1
    tokens = min(longest, length)
    return peak_of_reading(
        side.model, setup.task.head.auto_class, min(pieces, max(1, TOKENS // tokens)), tokens, setup.device
    )


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


def difference(
    task: Task, side: tuple[SideResult, Measured], minus: tuple[SideResult, Measured]
) -> SideDifference | None:
    """Compare two sides; None where their rows are not the same ones, as windows of other lengths are not."""
    (one, ours), (other, theirs) = side, minus
    found = paired_difference(ours, theirs)
    if found is None:
        return None
    text = (
        f"{one.name} is {_how_far(task, found)} {other.name} (95 % interval of the difference: {_signed(task, found)})"
    )
    noise = ": within the noise." if found.within_noise else "."
    return SideDifference(
        one.name, other.name, found.value, found.interval, found.within_noise, text[0].upper() + text[1:] + noise
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
