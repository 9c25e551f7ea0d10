"""Classification of tokens: a tag for every word, learned and scored on each word's first piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from linearize.errors import ConfigError, DataError
from linearize.finetune.metrics import metric
from linearize.finetune.metrics.entities import COUNTS, entity_counts, of_counts
from linearize.finetune.prepared import (
    IGNORED,
    DataOptions,
    Predictions,
    Row,
    Rows,
    TaskData,
    copy_tokenizer,
    pad_with_labels,
    row_facts,
)
from linearize.finetune.tables import Given, need_columns, open_splits
from linearize.finetune.task import Task
from linearize.finetune.task_types.text import MOST_CLASSES

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


def prepare(task: Task, given: Given, processor: PreTrainedTokenizerBase, options: DataOptions) -> TaskData:
    """Read words and tags.

    Raises:
        DataError: if a column is missing or holds something else than lists, or a tag is not among the task's.
        ConfigError: if the tokenizer cannot tell which word a token belongs to.
    """
    tokenizer = copy_tokenizer(processor)
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("token classification: got a slow tokenizer, expected a fast one that knows its words")
    splits = open_splits(task, given, limit=options.limit, seed=options.seed, raw=True, most=options.validation_limit)
    words, label = task.columns[0], str(task.label)
    need_columns(splits.train, (words, label), "token classification")
    task = dataclasses.replace(task, labels=tag_names(task, splits.train, label))
    entities = metric("entities")
    names = task.labels or ()

    def tags(predictions: Predictions, labels: Predictions) -> Iterator[list[list[str]]]:
        for guess, answer in zip(np.asarray(predictions), np.asarray(labels), strict=True):
            yield [[names[i] for i in side[answer != IGNORED]] for side in (guess, answer)]

    def compute_metrics(predictions: Predictions, labels: Predictions) -> dict[str, float]:
        pairs = list(tags(predictions, labels))
        return entities.compute(predictions=[guess for guess, _ in pairs], references=[answer for _, answer in pairs])

    def by_unit(predictions: Predictions, labels: Predictions) -> dict[str, np.ndarray]:
        counts = [entity_counts(*pair) for pair in tags(predictions, labels)]
        return {name: np.array([one[name] for one in counts]) for name in COUNTS}

    held = _rows(task, splits.validation, tokenizer, options)
    return TaskData(
        task,
        _rows(task, splits.train, tokenizer, options),
        held,
        partial(pad_with_labels, tokenizer),
        compute_metrics,
        splits.description,
        reduce=lambda logits, labels: (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1),
        facts=row_facts(_whole_lengths(tokenizer, splits.validation[words], held.rows, options), options),
        by_unit=by_unit,
        of_means=of_counts,
    )


def _whole_lengths(
    tokenizer: PreTrainedTokenizerBase, texts: list[list[str]], rows: Sequence[Row], options: DataOptions
) -> list[int]:
    """Return the tokens of every row of words, uncut: those that fill their row are tokenised again, whole."""
    lengths = [len(row["input_ids"]) for row in rows]
    for place, length in enumerate(lengths):
        if length >= options.max_length:
            coded = tokenizer(list(texts[place]), is_split_into_words=True, verbose=False)
            lengths[place] = len(coded["input_ids"])
    return lengths


def tag_names(task: Task, table: Dataset, label: str) -> tuple[str, ...]:
    """Return the tags in the order of their numbers: the task's, the column's, or those that occur."""
    from datasets import ClassLabel

    if task.labels is not None:
        return task.labels
    feature = getattr(table.features[label], "feature", None)
    if isinstance(feature, ClassLabel):
        return tuple(feature.names)
    found = {tag for tags in table[label] for tag in (tags if isinstance(tags, list) else [tags])}
    if found and all(isinstance(tag, str) for tag in found):
        return tuple(sorted(found))
    wrong = [tag for tag in found if not isinstance(tag, int) or not 0 <= tag < MOST_CLASSES]
    if wrong or not found:
        raise DataError(
            f"task {task.name}: got {f'tag {wrong[0]!r}' if wrong else 'no tags'} in column {label!r}, expected a list "
            "of names or of whole numbers from 0 in every row; repair the rows"
        )
    return tuple(str(number) for number in range(int(max(found)) + 1))


def _rows(task: Task, table: Dataset, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> Rows:
    words, label = task.columns[0], str(task.label)
    names = task.labels or ()
    places: dict[str | int, int] = {name: number for number, name in enumerate(names)} | {
        n: n for n in range(len(names))
    }
    rows = []
    for texts, tags in zip(table[words], table[label], strict=True):
        if not isinstance(tags, list) or not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            raise DataError(
                f"task {task.name}: got {str(texts)[:60]!r} with {str(tags)[:60]!r}, expected a list of words in "
                f"column {words!r} and a list of tags in {label!r}; repair the row"
            )
        unknown = [tag for tag in tags if tag not in places]
        if unknown or len(tags) != len(texts):
            problem = f"tag {unknown[0]!r}" if unknown else f"{len(tags)} tags for {len(texts)} words"
            raise DataError(f"task {task.name}: got {problem}, expected one of {', '.join(names)} for every word")
        coded = tokenizer(list(texts), is_split_into_words=True, truncation=True, max_length=options.max_length)
        owners = coded.word_ids()
        first = [owner is not None and owner != before for owner, before in zip(owners, [None, *owners], strict=False)]
        labels = [places[tags[owner]] if new else IGNORED for owner, new in zip(owners, first, strict=True)]
        fields = {name: coded[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in coded}
        rows.append({**fields, "labels": labels})
    return Rows(rows)
