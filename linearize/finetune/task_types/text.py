"""Classification and regression of texts and pairs of texts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from linearize.data.pairs import paired_anew
from linearize.data.records import Example
from linearize.errors import ConfigError, DataError
from linearize.finetune.chunks import ChunkMean, chunk_facts, chunked, pad_chunks, whole_lengths
from linearize.finetune.extra_texts import extra_texts
from linearize.finetune.metrics import metric
from linearize.finetune.prepared import (
    IGNORED,
    DataOptions,
    Facts,
    Predictions,
    Row,
    Rows,
    TaskData,
    check_tokens,
    copy_tokenizer,
    has_tokens,
    pad,
    row_facts,
    text_facts,
    tokenise,
)
from linearize.finetune.tables import Given, View, open_splits
from linearize.finetune.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNKS = "chunks"
"""The field of a row that holds a text's chunks."""
MOST_CLASSES = 100_000
"""A label of a larger number is no class: a head of a million outputs was never meant."""


def prepare(task: Task, given: Given, processor: PreTrainedTokenizerBase, options: DataOptions) -> TaskData:
    """Read texts and labels.

    Raises:
        DataError: if a column is missing, a regression's label is text, or a class is not among the task's.
    """
    tokenizer = copy_tokenizer(processor)
    splits = open_splits(task, given, limit=options.limit, seed=options.seed, most=options.validation_limit)
    if task.type.labels == "class":
        task = dataclasses.replace(task, labels=label_names(task, splits.train))

    def collate(rows: list[Row]) -> dict[str, Tensor]:
        kind = torch.float32 if task.type.labels == "number" else torch.long
        chunks = CHUNKS in rows[0]
        fields = pad_chunks(tokenizer, [row[CHUNKS] for row in rows]) if chunks else pad(tokenizer, rows)
        return {**fields, "labels": torch.tensor([row["labels"] for row in rows], dtype=kind)}

    examples = splits.train.fetch(range(len(splits.train)))
    held = splits.validation.fetch(range(len(splits.validation)))
    validation, facts = (_in_chunks if options.chunks else _measured)(task, held, tokenizer, options)
    extra, said = _extra(task, examples, held, tokenizer, options)
    return TaskData(
        task,
        _rows(task, examples, tokenizer, options),
        validation,
        collate,
        metrics_of(task),
        splits.description + said,
        facts=facts,
        extra=extra,
        wrap=ChunkMean if options.chunks else None,
        chunkable=getattr(tokenizer, "is_fast", False) and all(example.pair is None for example in held),
    )


def _measured(
    task: Task, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> tuple[Rows, Facts]:
    """Make the rows to measure on, and what is to be said of them."""
    rows = _rows(task, examples, tokenizer, options)
    texts, pairs = [e.value for e in examples], [e.pair for e in examples]
    return rows, text_facts(tokenizer, texts, pairs, rows.rows, options)


def _in_chunks(
    task: Task, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> tuple[Rows, Facts]:
    """Make the rows to measure on of texts that are read as chunks.

    Raises:
        ConfigError: if the task's rows are pairs.
    """
    if any(example.pair is not None for example in examples):
        raise ConfigError(f"chunks: task {task.name} reads pairs of texts, expected one text a row; drop --chunks")
    texts = chunked(tokenizer, [example.value for example in examples], options.max_length)
    check_tokens(task, [chunks[0] for chunks in texts], tokenizer)
    facts = chunk_facts(row_facts(whole_lengths(tokenizer, texts), options), texts)
    labels = numbered(task, examples)
    return Rows([{CHUNKS: chunks, "labels": label} for chunks, label in zip(texts, labels, strict=True)]), facts


def _extra(
    task: Task,
    examples: Sequence[Example],
    measured: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
) -> tuple[Rows | None, str]:
    """Make the rows without a label that the options ask for, and say how many; their label says that there is none.

    Raises:
        ConfigError: if pairs are to be made anew and the task does not read pairs.
        DataError: if further texts cannot be read, or are not new.
    """
    if not options.unlabelled:
        return None, ""
    rows, said = [], ""
    if options.extra_pairs:
        rows = _paired_anew(task, examples, tokenizer, options)
        said = f", {len(rows):,} pairs made anew"
    if options.extra_texts:
        found = extra_texts(task, examples, measured, options)
        made = tokenise(
            tokenizer, [e.value for e in found.examples], [e.pair for e in found.examples], options.max_length
        )
        # Nobody chose these texts one by one, so one without any token is passed over.
        rows += [
            {**row, "sources": places}
            for row, places in zip(made, found.sources, strict=True)
            if has_tokens(row, tokenizer)
        ]
        said += f", {found.description}"
    none = math.nan if task.type.labels == "number" else IGNORED
    return Rows([{**row, "labels": none} for row in rows]), said


def _paired_anew(
    task: Task, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> list[Row]:
    """Make the rows of texts paired anew, still without the field of the label.

    Raises:
        ConfigError: if the task does not read pairs.
    """
    if examples[0].pair is None:
        raise ConfigError(f"data, extra_pairs: got {options.extra_pairs}, but task {task.name} reads no pairs; drop it")
    seconds = [str(example.pair) for example in examples]
    count = round(options.extra_pairs * len(examples))
    sources = paired_anew([example.value for example in examples], seconds, count, options.seed)
    firsts = [examples[first].value for first, _ in sources]
    rows = tokenise(tokenizer, firsts, [seconds[second] for _, second in sources], options.max_length)
    return [{**row, "sources": places} for row, places in zip(rows, sources, strict=True)]


def _rows(task: Task, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> Rows:
    rows = tokenise(tokenizer, [e.value for e in examples], [e.pair for e in examples], options.max_length)
    check_tokens(task, rows, tokenizer)
    for row, label in zip(rows, numbered(task, examples), strict=True):
        row["labels"] = label
    return Rows(rows)


def label_names(task: Task, view: View) -> tuple[str, ...]:
    """Return the class names in the order of their numbers: the task's, the data's, or the numbers that occur.

    Raises:
        DataError: if the labels are neither names nor whole numbers from 0, or there is only one.
    """
    if task.labels is not None:
        return task.labels
    if view.names is not None:
        if len(view.names) < 2:
            raise _one_class(task, view.names[0])
        return view.names
    found = sorted(
        {example.label for example in view.fetch(range(len(view)))}, key=lambda label: (str(type(label)), label)
    )
    numbers = [label for label in found if isinstance(label, int | float) and whole(label) and label >= 0]
    if len(numbers) < len(found):
        raise DataError(
            f"task {task.name}: got the label {next(x for x in found if x not in numbers)!r} in column {task.label!r}, "
            "expected class names or whole numbers from 0; use task text-regression for numbers of other kinds"
        )
    if max(numbers) >= MOST_CLASSES:
        raise DataError(
            f"task {task.name}: got the label {max(numbers)!r} in column {task.label!r}, expected class numbers from 0 "
            f"below {MOST_CLASSES:,}; number the classes anew, or use task text-regression"
        )
    if len(found) < 2:
        raise _one_class(task, found[0])
    return tuple(str(number) for number in range(int(max(numbers)) + 1))


def whole(number: float) -> bool:
    """Whether a number is whole and finite."""
    return math.isfinite(number) and number == int(number)


def _one_class(task: Task, only: object) -> DataError:
    return DataError(
        f"task {task.name}: got the one class {only!r} in column {task.label!r}, expected at least two; add rows of "
        "others, or name all classes (--labels A,B)"
    )


def numbered(task: Task, examples: Sequence[Example]) -> list[float] | list[int]:
    """Turn labels into class numbers, or numbers of a regression.

    Raises:
        DataError: if a label does not fit the task.
    """
    if task.type.labels == "number":
        wrong = next((e.label for e in examples if isinstance(e.label, str) or e.label is None), None)
        if wrong is not None:
            raise DataError(
                f"task {task.name}: got the text {wrong!r} in label column {task.label!r}, expected numbers; "
                "use task text-classification for names, or name another column"
            )
        numbers = [float(e.label) for e in examples]  # type: ignore[arg-type]
        infinite = next((number for number in numbers if not math.isfinite(number)), None)
        if infinite is not None:
            raise DataError(
                f"task {task.name}: got {infinite} in label column {task.label!r}, expected finite numbers; repair it"
            )
        return numbers
    names = task.labels or ()
    places = {name: number for number, name in enumerate(names)}
    found = []
    for example in examples:
        label = example.label
        if isinstance(label, str):
            number = places.get(label, -1)
        else:
            number = int(label) if label is not None and whole(label) else -1
        if not 0 <= number < len(names):
            raise DataError(
                f"task {task.name}: got label {label!r}, expected one of its {len(names)} classes: "
                f"{', '.join(names[:20])}"
            )
        found.append(number)
    return found


def metrics_of(task: Task) -> Callable[[Predictions, Predictions], dict[str, float]]:
    """Return the function from logits [N, C], classes [N] or numbers [N, 1] and labels [N] to metrics by name."""
    metrics = [metric(name) for name in task.metrics]

    def compute_metrics(predictions: Predictions, labels: Predictions) -> dict[str, float]:
        logits = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
        if task.type.labels == "number":
            guesses = logits.reshape(-1).astype(np.float64)
        else:
            guesses = logits if logits.ndim == 1 else logits.argmax(axis=-1)
        result: dict[str, float] = {}
        for one in metrics:
            result |= one.compute(predictions=guesses, references=np.asarray(labels))
        return result

    return compute_metrics
