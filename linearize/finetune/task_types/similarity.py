"""Likeness of two sentences by the cosine of their embeddings: measured without a head and without training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.alignment.losses import pooled
from linearize.errors import DataError
from linearize.finetune.prepared import DataOptions, Row, Rows, TaskData, copy_tokenizer, pad, tokenise
from linearize.finetune.tables import Given, View, open_splits
from linearize.finetune.task import Task
from linearize.finetune.task_types.text import metrics_of, numbered

SECOND = "second_"
"""What the names of the second sentence's fields begin with."""


def prepare(task: Task, given: Given, processor: Any, options: DataOptions) -> TaskData:
    """Read pairs of sentences and how alike they are.

    A batch of N pairs is one of 2 N sentences, the first of every pair and then the second of every pair, and N labels:
    stage one and the alignment learn from the sentences alone.

    Raises:
        DataError: if there is one text a row only, or a label is no number.
    """
    tokenizer = copy_tokenizer(processor)
    splits = open_splits(task, given, limit=options.limit, seed=options.seed, most=options.validation_limit)

    def collate(rows: list[Row]) -> dict[str, Tensor]:
        both = [{name: row[name] for name in row if not name.startswith(SECOND)} for row in rows]
        both += [{name.removeprefix(SECOND): row[name] for name in row if name.startswith(SECOND)} for row in rows]
        return {**pad(tokenizer, both), "labels": torch.tensor([row["labels"] for row in rows], dtype=torch.float32)}

    return TaskData(
        task,
        _rows(task, splits.train, tokenizer, options),
        _rows(task, splits.validation, tokenizer, options),
        collate,
        metrics_of(task),
        splits.description,
        wrap=Likeness,
    )


def _rows(task: Task, view: View, tokenizer: Any, options: DataOptions) -> Rows:
    examples = view.fetch(range(len(view)))
    if any(example.pair is None for example in examples):
        raise DataError(f"task {task.name}: got rows with one text, expected two; name both columns (--columns A,B)")
    first = tokenise(tokenizer, [e.value for e in examples], [None] * len(examples), options.max_length)
    second = tokenise(tokenizer, [str(e.pair) for e in examples], [None] * len(examples), options.max_length)
    labels = numbered(task, examples)
    return Rows(
        [
            {**one, **{f"{SECOND}{name}": value for name, value in other.items()}, "labels": label}
            for one, other, label in zip(first, second, labels, strict=True)
        ]
    )


class Likeness(nn.Module):
    """Gives the cosine of two sentences' embeddings, which are means over tokens, as sentence-transformers has them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, attention_mask: Tensor, labels: Tensor | None = None, **inputs: Tensor) -> dict[str, Tensor]:
        """Embed 2 N sentences [2 N, T] -> `logits` [N], the cosines of the first N with the last N."""
        states = self.model(attention_mask=attention_mask, **inputs).last_hidden_state
        first, second = pooled(states, attention_mask).chunk(2)
        cosine = F.cosine_similarity(first, second, dim=-1)
        # The labels' scale is the data's own: what is measured is a correlation.
        return {"loss": torch.zeros((), device=cosine.device), "logits": cosine}
