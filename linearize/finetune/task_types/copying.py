"""Copying: a passage stands twice in a row, and of the second time every token could be looked up in the first.

A probe of what a causal model can still find in its context, by the length of the passage (half of `max_length`):
softmax looks tokens up exactly, a state of a fixed size holds so much and no more. The repeated sequences of Olsson et
al. 2022, https://arxiv.org/abs/2209.11895, with passages of real text.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from linearize.errors import ConfigError, DataError
from linearize.finetune.metrics import metric
from linearize.finetune.prepared import IGNORED, DataOptions, Logits, Predictions, Row, RowSet, TaskData, copy_tokenizer
from linearize.finetune.tables import Given
from linearize.finetune.task import Task
from linearize.finetune.task_types.language import read_tokens, starts_of, token_losses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Copies(RowSet):
    """Passages of one long row of tokens, each twice.

    Args:
        tokens: [N] int32.
        length: tokens of a passage.
    """

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens, self.length, self.starts = tokens, length, starts_of(len(tokens), length)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, place: int) -> Row:
        start = int(self.starts[place])
        passage = self.tokens[start : start + self.length].astype(np.int64)
        labels = np.concatenate([np.full(len(passage), IGNORED), passage])
        # The first token of the second time follows from nothing.
        labels[len(passage)] = IGNORED
        return {"input_ids": np.concatenate([passage, passage]), "labels": labels}


def prepare(task: Task, given: Given, processor: PreTrainedTokenizerBase, options: DataOptions) -> TaskData:
    """Read texts as one row of tokens per split, and cut it into passages of half of `max_length`.

    Raises:
        DataError: if there is no text column, or too little text for one passage.
        ConfigError: if `max_length` is below 4.
    """
    train, valid, _, description = read_tokens(task, given, copy_tokenizer(processor), options)
    if options.auto_length:
        options = dataclasses.replace(options, max_length=max(4, min(options.max_length, 2 * len(valid))))
    length = options.max_length // 2
    if length < 2:
        raise ConfigError(f"data, max_length: got {options.max_length}, expected at least 4: a passage stands twice")
    for name, row in (("training", train), ("validation", valid)):
        if len(row) < length:
            raise DataError(f"{description}: got {len(row)} {name} tokens, expected a passage of {length}")
    return TaskData(
        task,
        Copies(train, length),
        Copies(valid, length),
        _collate,
        _compute_metrics,
        f"{description}; passages of {length:,} tokens, each twice",
        reduce=_sums,
        facts={"context": 2 * length},
    )


def _collate(rows: list[Row]) -> dict[str, Tensor]:
    ids, labels = (torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("input_ids", "labels"))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _sums(logits: Logits, labels: Tensor) -> Tensor:
    """Reduce logits [B, T, V] to sums [B, 5]: right choices, losses, losses of the first reading, and both counts."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    half = labels.shape[1] // 2
    passage = labels[:, half + 1 :]
    again, counted = token_losses(logits[:, half:-1], passage)
    right = (logits[:, half:-1].argmax(dim=-1) == passage).float() * counted
    first, counted_first = token_losses(logits[:, : half - 1], passage)
    return torch.stack([one.sum(dim=1) for one in (right, again, first, counted, counted_first)], dim=1)


def _compute_metrics(predictions: Predictions, labels: Predictions) -> dict[str, float]:
    sums = np.asarray(predictions)
    return metric("copying").compute(predictions=sums[:, :3], references=sums[:, 3:])
