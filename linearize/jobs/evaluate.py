"""Compare checkpoints on the same rows of a task: each at its own length, the original also in chunks.

Differences are paired, and the checkpoints are timed in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from linearize.checkpoint.loading import check_device, load_processor, move
from linearize.core.errors import ConfigError
from linearize.core.options import name_of
from linearize.evaluation.bench.memory import peak_of_reading
from linearize.evaluation.bench.meter import Call, Noise, in_turns
from linearize.evaluation.report.paired import SideDifference, score_difference
from linearize.fidelity.ablate import ablated
from linearize.jobs.events import Advanced, Callback, Started, ignore
from linearize.jobs.stages import exact_rows
from linearize.jobs.task_config import EvaluateJob
from linearize.modeling.model import is_linearized
from linearize.modeling.plan import Plan
from linearize.training.processes import check_alone, under_fsdp
from linearize.training.stage_two import load
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.intervals import BALANCED, Measured
from linearize.training.stage_two.metrics import PositionLoss
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.rows import Facts
from linearize.training.stage_two.splits import NO_SPLIT, Given
from linearize.training.stage_two.task_types.base import TaskData
from linearize.training.stage_two.task_types.embeddings import EmbeddedPairs, pooling_of
from linearize.training.stage_two.task_types.text import TOKENS
from linearize.training.stage_two.tasks import Task, above_chance, recovery
from linearize.training.stage_two.trainer import measure_with_interval

OURS, ORIGINAL, CHUNKS = "this model", "the original", "the original, chunks averaged"
"""Names of the sides."""
MOST_ROWS = 32
"""The maximum number of rows per batch by default."""
TIMED_ROWS, TURNS, TIMING = 8, 7, 30.0
"""Rows that each side reads per turn, the largest number of turns, and seconds for all turns, unless 3 take longer."""


@dataclass(frozen=True)
class SideResult:
    """The score of one side, as plain data.

    Attributes:
        name: name of the side in tables.
        model: folder or Hub name.
        max_length: the maximum number of tokens it reads per row, or per chunk; None if rows are not texts.
        chunks: whether it reads rows in chunks.
        cut_share: share of the rows that were truncated; None if rows cannot be truncated.
        score: the task's main metric.
        interval: 95 % bootstrap interval of the score.
        metrics: all metrics.
        note: a warning that it read longer rows than in training, that its classes have other names, or that all its
            rows fit into the window; None if not.
        by_position: for causal language models, the loss by the number of tokens before the predicted one.
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
        name: name of the side.
        seconds: time of the model's forward pass per row; median over the turns.
        spread: interquartile range divided by the median.
        peak_bytes: peak memory added to the loaded model by reading the longest row; None if not measured.
    """

    name: str
    seconds: float
    spread: float
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Times:
    """Times of all sides on the same rows, in turns, so that other work on the machine slows all of them alike.

    Attributes:
        sides: the time of each side.
        rows: rows per turn.
        turns: number of turns.
        noise: how noisy the machine was, in one line.
        noisy: whether the machine was too noisy for a verdict.
    """

    sides: tuple[SideTime, ...]
    rows: int
    turns: int
    noise: str
    noisy: bool

    @property
    def text(self) -> str:
        """The times in one or two sentences."""
        if self.noisy:
            return f"No verdict on speed, the machine was {self.noise}."
        times = ", ".join(f"{side.seconds:.2g} s ({side.name})" for side in self.sides)
        return f"Time per row, medians of {self.turns} turns over {self.rows} rows: {times}."


@dataclass(frozen=True)
class Read:
    """A measured side: its data, its model and its scores.

    Attributes:
        without: the removed part of its attention (`linearize.fidelity.ablate.PARTS`), or None.
    """

    without: str | None
    data: TaskData
    model: PreTrainedModel
    measured: Measured
    result: SideResult


@dataclass
class Sides:
    """Measures checkpoints on the same rows and times them in turns; every checkpoint is loaded once.

    Attributes:
        task: the task.
        dataset: the data, passed to `linearize.training.stage_two.prepare.prepare`.
        device: device that the models run on.
        on_event: called with `Started` before each side, and with `Advanced` after each batch.
        batch_size: rows per batch; None: as many as fit into `TOKENS` tokens, at most `MOST_ROWS`.
        memory: whether to measure the peak memory of the longest row, in a separate process.
        read: the measured sides.
    """

    task: Task
    dataset: Given | None
    device: str
    on_event: Callback
    batch_size: int | None = None
    memory: bool = False
    read: list[Read] = field(default_factory=list)

    def measure(self, name: str, checkpoint: str, options: DataOptions, without: str | None = None) -> Read:
        """Measure one side; the rows are made with its own tokenizer or image processor.

        Args:
            name: name of the side in tables.
            checkpoint: folder or Hub name.
            options: lengths and limits; with `chunks`, outputs are averaged over chunks of `max_length` tokens.
            without: the part of its attention to remove (`linearize.fidelity.ablate.PARTS`), or None.

        Raises:
            LinearizeError: a subclass of it, for everything the user can correct.
        """
        task = self.task
        self.on_event(Started(f"measuring: {name}"))
        processor, shape = load_processor(checkpoint, task.modality), replace(options, trains=False)
        # All sides read the same rows, as the first one's head needs them.
        head = self.read[0].result.model if self.read else checkpoint
        data = prepare(task, processor, shape, data=self.dataset, head_of=head)
        model = next((read.model for read in self.read if read.result.model == checkpoint), None)
        if model is None:
            load.check_trained(checkpoint, task)
            model = move(load.load_for_task(checkpoint, data), self.device).eval()
        facts = {"context": options.max_length, **data.facts}
        length = facts.get("max_length", facts["context"])
        note = _notes(checkpoint, model, data, length)
        with ablated(model, without) if without is not None else nullcontext():
            measured = measure_with_interval(
                model,
                data,
                batch_size=self.batch_size or rows_per_batch(data.facts),
                on_batch=lambda done, total: self.on_event(Advanced(done, total)),
            )
        balanced = measured.balanced
        scores = [measured] if balanced is None else [measured, balanced]
        result = SideResult(
            name=name,
            model=checkpoint,
            max_length=length if task.modality == "text" else None,
            chunks=options.chunks,
            cut_share=data.facts.get("cut_share"),
            score=measured.score,
            interval=measured.interval,
            metrics=measured.metrics,
            note=note,
            by_position=measured.by_position,
            learned=any(above_chance(task, one.score, chance=one.chance, interval=one.interval) for one in scores),
            balanced=None if balanced is None or balanced.interval is None else (balanced.score, balanced.interval),
        )
        self.read.append(Read(without, data, model, measured, result))
        return self.read[-1]

    def differences(self, ours: Read) -> tuple[SideDifference, ...]:
        """Return the differences between one side and all others, also by macro-F1 if classes are uneven.

        Sides with other rows (windows of another length) are left out.
        """
        task, differences = ours.data.task, []
        for other in (read for read in self.read if read is not ours and _same_rows(read, ours)):
            names, pair = (ours.result.name, other.result.name), (ours.measured, other.measured)
            balanced = (ours.measured.balanced, other.measured.balanced)
            differences.append(score_difference(task, ", ".join(task.score), *names, *pair))
            differences.append(score_difference(task, BALANCED, *names, *balanced))
        return tuple(difference for difference in differences if difference is not None)

    def times(self) -> Times:
        """Time the sides that read the rows of the first one, in turns; also measure memory if `memory` is set."""
        self.on_event(Started("timing all sides in turns"))
        timed = [read for read in self.read if read.without is None and _same_rows(read, self.read[0])]
        # Some short and some long rows, spread over the lengths; fewer if rows are long.
        count = min(len(read.data.validation) for read in timed)
        lengths = [0] * count
        if self.task.modality == "text":
            sides = [read.data.validation for read in timed]
            lengths = [max(len(rows[row].get("input_ids", ())) for rows in sides) for row in range(count)]
        order = sorted(range(count), key=lambda row: lengths[row])
        wanted = max(1, min(TIMED_ROWS, count, TOKENS // max(1, max(lengths))))
        rows = [order[(2 * number + 1) * count // (2 * wanted)] for number in range(wanted)]
        watch = Noise(self.device)
        calls = {read.result.name: self._reading(read, rows) for read in timed}
        timings = in_turns(calls, aim=TIMING, most=TURNS)
        noise = watch.stop()
        times = []
        for read in timed:
            timing, most, peak = timings[read.result.name], read.result.max_length, None
            if self.memory and most is not None:
                longest = read.data.facts.get("longest_row", most)
                tokens, pieces = min(longest, most), -(-longest // most) if read.result.chunks else 1
                together, head = min(pieces, max(1, TOKENS // tokens)), self.task.head.auto_class
                peak = peak_of_reading(read.result.model, head, together, tokens, self.device)
            times.append(SideTime(read.result.name, timing.seconds / len(rows), timing.spread, peak))
        turns = next(iter(timings.values())).repeats
        return Times(tuple(times), len(rows), turns, noise.text, noise.too_noisy)

    def _reading(self, read: Read, numbers: Sequence[int]) -> Call:
        """Return a call that runs the model on some rows, with the batch size used for its score."""
        size = self.batch_size or rows_per_batch(read.data.facts)
        rows = [read.data.validation[number] for number in numbers]
        batches = [read.data.collate(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
        moved = [{name: value.to(self.device) for name, value in batch.items()} for batch in batches]
        model = read.data.type.wrap(read.model)

        @torch.no_grad()
        def forward() -> None:
            for batch in moved:
                model(**batch)

        return forward


def _same_rows(one: Read, other: Read) -> bool:
    """Tell whether two sides are scored on the same rows; windows of another length, or of other tokens, are others."""
    return one.measured.scored == other.measured.scored


def _notes(name: str, model: PreTrainedModel, data: TaskData, length: int) -> str | None:
    """Return what a reader must know about a side whose rows have up to `length` tokens; None if nothing."""
    notes = [load.beyond_training(model, data.task, length), load.other_classes(name, data)]
    tuned, seed = load.recorded(name), data.type.options.seed
    if NO_SPLIT in data.description and tuned.get("task") == data.task.name and tuned.get("seed", seed) != seed:
        notes.append(
            f"{name_of(name)!r} was tuned with --seed {tuned['seed']}: if on this data, it was trained on most of the "
            f"held-out rows, which are those of --seed {seed}."
        )
    if data.task.modality == "text" and is_linearized(model):
        exact = exact_rows(Plan.from_dict(model.config.linearize), min(length, data.facts.get("longest_row", length)))
        # If attention is exact in all rows, no score shows what the kernel does.
        notes.append(None if exact is None else f"{exact}, so they show nothing of the kernel.")
    how, more = pooling_of(name) if isinstance(data.type, EmbeddedPairs) else ("", [])
    if more:
        left_out = f"left out, unlike in SentenceTransformer: {', '.join(more)}"
        notes.append(f"Measured were token states ({how}); {left_out}.")
    return " ".join(note for note in notes if note is not None) or None


def rows_per_batch(facts: Facts) -> int:
    """Return the number of rows per batch: as many as fit into `TOKENS` tokens, at most `MOST_ROWS`."""
    lengths = [facts.get("max_length"), facts.get("context"), facts.get("longest_row")]
    return rows_of_tokens(TOKENS, min((length for length in lengths if length is not None), default=1))


def rows_of_tokens(tokens: int, length: int) -> int:
    """Return how many rows of this length fit into `tokens`, from 1 to `MOST_ROWS`."""
    return max(1, min(MOST_ROWS, tokens // max(1, length)))


def original_options(name: str, options: DataOptions, task: Task) -> DataOptions:
    """Return the other model's `options` adapted to its softmax original, which reads rows at its own length."""
    if task.modality != "text":
        return options
    if options.auto_length:
        return replace(options, max_length=load.whole_length(name, task))
    return replace(options, max_length=min(options.max_length, load.length_limit(name) or options.max_length))


def chunk_options(name: str, options: DataOptions, length: int | None) -> DataOptions:
    """Return the options with which an original reads rows in chunks.

    Args:
        name: the original.
        options: its options for truncated rows.
        length: tokens per chunk; None: its length for truncated rows.

    Raises:
        ConfigError: if the chunks are longer than the original takes.
    """
    most = load.length_limit(name)
    if length is not None and most is not None and length > most:
        raise ConfigError(
            f"chunk_length: got {length}, but {name!r} takes at most {most} tokens; lower it, or leave it out"
        )
    return replace(options, max_length=length or options.max_length, auto_length=False, chunks=True)


def why_no_chunks(data: TaskData, length: int) -> str | None:
    """Return why rows cannot be read in chunks of `length` tokens; None if they can."""
    if not data.chunkable:
        return f"No chunks: task {data.task.name} does not read one text per row (or its tokenizer is a slow one)."
    longest = data.facts["longest_row"]
    if longest <= length:
        return (
            f"The longest row has {longest:,} tokens, and the original reads {length:,}: nothing is cut, so chunks "
            "would be whole rows, and a longer input makes no difference here."
        )
    return None


@dataclass(frozen=True)
class Evaluation:
    """Result of `linearize evaluate`.

    Attributes:
        task: name of the task.
        data: one line about the data.
        figures: the model's metrics.
        score: the task's main metric.
        facts: number and length of the rows, share of truncated rows, stride of a perplexity.
        recovered: share of the original's score above chance, percent; None if the original is not above chance, or
            was scored on other rows.
        interval: 95 % bootstrap interval of the score over rows.
        chance: the score of the best answer that ignores the input.
        sides: all measured sides: this model, ablations, the original at its own length and in chunks.
        differences: this model minus each other side, on the same rows.
        times: times of each side; None without a comparison.
        notes: caveats for the reader.
    """

    task: str
    data: str
    figures: dict[str, float]
    score: float
    facts: Facts
    recovered: float | None = None
    interval: tuple[float, float] | None = None
    chance: float | None = None
    sides: tuple[SideResult, ...] = ()
    differences: tuple[SideDifference, ...] = ()
    times: Times | None = None
    notes: tuple[str, ...] = ()


def evaluate_checkpoint(job: EvaluateJob, on_event: Callback = ignore) -> Evaluation:
    """Measure a checkpoint on a task, and compare it with its original if the job names one.

    Args:
        job: what to measure.
        on_event: called with `Started` before each side.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    if under_fsdp():
        check_alone("evaluate")
    compared, options, pieces = job.compare, None, None
    if compared is not None:
        options = original_options(compared, job.data, job.task)
        pieces = chunk_options(compared, options, job.chunk_length) if job.chunks else None
    sides = Sides(job.task, job.dataset, check_device(job.device), on_event, job.batch_size, job.memory)
    # First, so that a part that the model lacks is refused before the slow work.
    for part in job.ablate:
        sides.measure(f"this model without its {part}", job.model, job.data, part)
    ours = sides.measure(OURS, job.model, job.data)
    sides.read.sort(key=lambda read: read is not ours)
    measured, recovered, skipped = ours.measured, None, None
    if compared is not None and options is not None:
        original = sides.measure(ORIGINAL, compared, options)
        score, interval = original.measured.score, original.measured.interval
        if _same_rows(ours, original):
            recovered = recovery(ours.data.task, measured.score, score, chance=measured.chance, interval=interval)
        if pieces is not None:
            skipped = why_no_chunks(original.data, pieces.max_length)
            if skipped is None:
                sides.measure(CHUNKS, compared, pieces)
            elif not original.data.chunkable and not original.data.facts.get("cut_share"):
                skipped = None
        if not _same_rows(ours, original):
            theirs, mine = original.result.max_length, ours.result.max_length
            how, advice = "other tokens: another tokenizer, or other labels", ""
            if theirs is not None and mine is not None and theirs != mine:
                how = f"windows of {theirs:,} tokens; this model: {mine:,}"
                advice = f"; --max-length {theirs} gives both the same windows"
            skipped = (
                f"The original reads other rows ({how}), so neither differences nor times can be compared{advice}."
            )
    results = tuple(read.result for read in sides.read)
    failed = ", ".join(result.name for result in results if not result.learned)
    notes = [f"Not above chance: {failed}." if failed else None, *(result.note for result in results), skipped]
    return Evaluation(
        task=ours.data.task.name,
        data=ours.data.description,
        figures=measured.metrics,
        score=measured.score,
        facts={"rows": measured.rows, **ours.data.facts},
        recovered=recovered,
        interval=measured.interval,
        chance=measured.chance,
        sides=results,
        differences=sides.differences(ours),
        times=None if compared is None else sides.times(),
        # Sides of one checkpoint can have the same note.
        notes=tuple(dict.fromkeys(note for note in notes if note is not None)),
    )
