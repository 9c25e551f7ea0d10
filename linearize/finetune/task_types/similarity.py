"""Likeness of two sentences by the cosine of their embeddings: measured without a head and without training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.data.records import Example
from linearize.errors import DataError
from linearize.finetune.prepared import DataOptions, Row, TaskData, copy_tokenizer
from linearize.finetune.tables import Given, View, open_splits
from linearize.finetune.task import Task
from linearize.finetune.task_types.embedded import Embedder, collate_two, rows_of_two, rows_to_measure
from linearize.finetune.task_types.text import metrics_of, numbered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare(task: Task, given: Given, processor: PreTrainedTokenizerBase, options: DataOptions) -> TaskData:
    """Read pairs of sentences and how alike they are.

    A batch of N pairs is one of 2 N sentences, the first of every pair and then the second of every pair, and N labels:
    stage one and the alignment learn from the sentences alone.

    Raises:
        DataError: if there is one text a row only, or a label is no number.
    """
    tokenizer = copy_tokenizer(processor)
    splits = open_splits(task, given, limit=options.limit, seed=options.seed, most=options.validation_limit)

    def collate(rows: list[Row]) -> dict[str, Tensor]:
        labels = torch.tensor([row["labels"] for row in rows], dtype=torch.float32)
        return {**collate_two(tokenizer, rows), "labels": labels}

    texts, labels = _pairs(task, splits.validation)
    validation, facts = rows_to_measure(task, tokenizer, texts, labels, options)
    texts, labels = _pairs(task, splits.train)
    return TaskData(
        task,
        rows_of_two(task, tokenizer, texts, labels, options),
        validation,
        collate,
        metrics_of(task),
        splits.description,
        facts=facts,
        wrap=Likeness,
        chunkable=getattr(tokenizer, "is_fast", False),
    )


def _pairs(task: Task, view: View) -> tuple[tuple[list[str], list[str]], Sequence[float]]:
    """Return the first and the second sentences of all rows, and the labels.

    Raises:
        DataError: if there is one text a row only, or a label is no number.
    """
    examples: list[Example] = view.fetch(range(len(view)))
    if any(example.pair is None for example in examples):
        raise DataError(f"task {task.name}: got rows with one text, expected two; name both columns (--columns A,B)")
    return ([e.value for e in examples], [str(e.pair) for e in examples]), numbered(task, examples)


class Likeness(Embedder):
    """Gives the cosine of two sentences' embeddings."""

    def compare(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the cosines [N]; the labels' scale is the data's own, as what is measured is a correlation."""
        return F.cosine_similarity(first, second, dim=-1)
