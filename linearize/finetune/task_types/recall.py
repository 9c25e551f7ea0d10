"""Recall: predict chosen tokens of a sequence from what stands before them (associative recall and its kin).

A raw table with the columns `text` (tokens between blanks) and `positions` (which tokens are answers).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from linearize.errors import DataError
from linearize.finetune.metrics import metric
from linearize.finetune.prepared import (
    IGNORED,
    DataOptions,
    Logits,
    Predictions,
    Rows,
    TaskData,
    copy_tokenizer,
    pad_with_labels,
    row_facts,
)
from linearize.finetune.tables import Given, need_columns, open_splits
from linearize.finetune.task import Task

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


def prepare(task: Task, given: Given, processor: PreTrainedTokenizerBase, options: DataOptions) -> TaskData:
    """Read sequences; the loss is taken on the answers only.

    Raises:
        DataError: if a column is missing or a sequence does not fit the length.
    """
    tokenizer = copy_tokenizer(processor)
    splits = open_splits(task, given, limit=options.limit, seed=options.seed, raw=True, most=options.validation_limit)
    accuracy = metric("accuracy")

    def compute_metrics(predictions: Predictions, labels: Predictions) -> dict[str, float]:
        guesses, answers = np.asarray(predictions)[:, :-1], np.asarray(labels)[:, 1:]
        asked = answers != IGNORED
        return accuracy.compute(predictions=guesses[asked], references=answers[asked])

    validation = _rows(splits.validation, tokenizer, options)
    return TaskData(
        task,
        _rows(splits.train, tokenizer, options),
        validation,
        partial(pad_with_labels, tokenizer),
        compute_metrics,
        splits.description,
        reduce=lambda logits, labels: _first(logits).argmax(dim=-1),
        facts=row_facts([len(row["input_ids"]) for row in validation.rows], options),
    )


def _first(logits: Logits) -> Tensor:
    return logits[0] if isinstance(logits, tuple) else logits


def _rows(table: Dataset, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> Rows:
    need_columns(table, ("text", "positions"), "recall")
    rows = []
    for text, positions in zip(table["text"], table["positions"], strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) > options.max_length:
            raise DataError(
                f"recall: got a sequence of {len(ids)} tokens, expected at most {options.max_length}; raise max_length"
            )
        labels = torch.full((len(ids),), IGNORED)
        labels[positions] = torch.tensor(ids)[positions]
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels.tolist()})
    return Rows(rows)
