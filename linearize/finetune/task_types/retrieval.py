"""Long texts found again without labels: the first half of every text looks for its second among those of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from linearize.errors import DataError
from linearize.finetune.metrics import metric
from linearize.finetune.metrics.retrieval import by_chance, by_rank, ranks
from linearize.finetune.prepared import DataOptions, Predictions, Row, TaskData, copy_tokenizer
from linearize.finetune.tables import Given, View, open_splits
from linearize.finetune.task import Task
from linearize.finetune.task_types.embedded import Embedder, collate_two, rows_of_two, rows_to_measure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare(task: Task, given: Given, processor: PreTrainedTokenizerBase, options: DataOptions) -> TaskData:
    """Read texts and cut each in two, at the middle of its words.

    A batch of N texts is one of 2 N halves: stage one and the alignment learn from halves.

    Raises:
        DataError: if a text has one word only, or there is only one text to look among.
    """
    tokenizer = copy_tokenizer(processor)
    splits = open_splits(task, given, limit=options.limit, seed=options.seed, most=options.validation_limit)

    def collate(rows: list[Row]) -> dict[str, Tensor]:
        return {**collate_two(tokenizer, rows), "labels": torch.tensor([row["labels"] for row in rows])}

    held = _halves(task, splits.validation)
    count = len(held[0])
    if count < 2:
        raise DataError(f"task {task.name}: got {count} text to measure on, expected several to look among; add rows")
    validation, facts = rows_to_measure(task, tokenizer, held, range(count), options)
    train = _halves(task, splits.train)
    return TaskData(
        task,
        rows_of_two(task, tokenizer, train, range(len(train[0])), options),
        validation,
        collate,
        _compute_metrics,
        f"halves of the texts of {splits.description}",
        facts=facts,
        wrap=Embedder,
        by_unit=_by_text,
        chance=by_chance(count),
        chunkable=getattr(tokenizer, "is_fast", False),
    )


def _halves(task: Task, view: View) -> tuple[Sequence[str], Sequence[str]]:
    """Return the first and the second halves of all texts.

    Raises:
        DataError: if a text has one word only.
    """
    texts = [example.value.split() for example in view.fetch(range(len(view)))]
    short = next((place for place, words in enumerate(texts) if len(words) < 2), None)
    if short is not None:
        raise DataError(
            f"task {task.name}: got a text of one word (number {short} of {len(texts)}, from 0), expected at least two "
            "words, to cut it in two; remove the row"
        )
    middles = [len(words) // 2 for words in texts]
    first = [" ".join(words[:middle]) for words, middle in zip(texts, middles, strict=True)]
    return first, [" ".join(words[middle:]) for words, middle in zip(texts, middles, strict=True)]


def _ranks(predictions: Predictions) -> np.ndarray:
    """Return the rank [N] of each text's second half, of the embeddings [N, 2, D] of both."""
    found = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
    return ranks(found[:, 0], found[:, 1])


def _compute_metrics(predictions: Predictions, labels: Predictions) -> dict[str, float]:
    found = _ranks(predictions)
    return metric("retrieval").compute(predictions=found, references=np.ones_like(found))


def _by_text(predictions: Predictions, labels: Predictions) -> dict[str, np.ndarray]:
    return by_rank(_ranks(predictions))
