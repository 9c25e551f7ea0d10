"""Likeness of two sentences by the cosine of their embeddings: measured without a head and without training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.alignment.losses import pooled
from linearize.data.records import Example
from linearize.errors import DataError
from linearize.finetune.chunks import chunk_facts, chunked, mean_over_chunks, pad_chunks, whole_lengths
from linearize.finetune.prepared import (
    DataOptions,
    Row,
    Rows,
    TaskData,
    check_tokens,
    copy_tokenizer,
    pad,
    row_facts,
    text_facts,
    tokenise,
)
from linearize.finetune.tables import Given, View, open_splits
from linearize.finetune.task import Task
from linearize.finetune.task_types.text import CHUNKS, metrics_of, numbered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECOND = "second_"
"""What the names of the second sentence's fields begin with."""


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
        if CHUNKS in rows[0]:
            texts = [row[name] for name in (CHUNKS, f"{SECOND}{CHUNKS}") for row in rows]
            return {**pad_chunks(tokenizer, texts), "labels": labels}
        both = [{name: row[name] for name in row if not name.startswith(SECOND)} for row in rows]
        both += [{name.removeprefix(SECOND): row[name] for name in row if name.startswith(SECOND)} for row in rows]
        return {**pad(tokenizer, both), "labels": labels}

    validation, facts = _measured(task, splits.validation, tokenizer, options)
    return TaskData(
        task,
        _rows(task, _examples(splits.train), tokenizer, options),
        validation,
        collate,
        metrics_of(task),
        splits.description,
        facts=facts,
        wrap=Likeness,
        chunkable=getattr(tokenizer, "is_fast", False),
    )


def _measured(
    task: Task, view: View, tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> tuple[Rows, dict[str, Any]]:
    """Make the rows to measure on, and what is to be said of their sentences: two a row."""
    examples = _examples(view)
    if not options.chunks:
        made = _rows(task, examples, tokenizer, options)
        texts = [e.value for e in examples] + [str(e.pair) for e in examples]
        sides = [{"input_ids": row[name]} for name in ("input_ids", f"{SECOND}input_ids") for row in made.rows]
        facts = text_facts(tokenizer, texts, [None] * len(texts), sides, options)
        return made, {**facts, "rows": len(made)}
    _check_pairs(task, examples)
    first = chunked(tokenizer, [e.value for e in examples], options.max_length)
    second = chunked(tokenizer, [str(e.pair) for e in examples], options.max_length)
    facts = chunk_facts(row_facts(whole_lengths(tokenizer, first + second), options), first + second)
    labels = numbered(task, examples)
    rows = [
        {CHUNKS: one, f"{SECOND}{CHUNKS}": other, "labels": label}
        for one, other, label in zip(first, second, labels, strict=True)
    ]
    return Rows(rows), {**facts, "rows": len(rows)}


def _check_pairs(task: Task, examples: Sequence[Example]) -> None:
    """Refuse rows of one text.

    Raises:
        DataError: if there is one.
    """
    if any(example.pair is None for example in examples):
        raise DataError(f"task {task.name}: got rows with one text, expected two; name both columns (--columns A,B)")


def _examples(view: View) -> list[Example]:
    return view.fetch(range(len(view)))


def _rows(task: Task, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> Rows:
    _check_pairs(task, examples)
    first = tokenise(tokenizer, [e.value for e in examples], [None] * len(examples), options.max_length)
    second = tokenise(tokenizer, [str(e.pair) for e in examples], [None] * len(examples), options.max_length)
    check_tokens(task, [*first, *second], tokenizer)
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

    def forward(
        self, labels: Tensor | None = None, owners: Tensor | None = None, **fields: Tensor
    ) -> dict[str, Tensor]:
        """Embed 2 N sentences [2 N, T] -> `logits` [N], the cosines of the first N with the last N.

        Of sentences that are read as chunks [chunks, T], which `owners` [chunks] belong to, embeddings are averaged.
        """
        embeddings = self.embed(**fields) if owners is None else mean_over_chunks(self.embed, owners, fields)
        first, second = embeddings.chunk(2)
        cosine = F.cosine_similarity(first, second, dim=-1)
        # The labels' scale is the data's own: what is measured is a correlation.
        return {"loss": torch.zeros((), device=cosine.device), "logits": cosine}

    def embed(self, attention_mask: Tensor, **fields: Tensor) -> Tensor:
        """Embed sentences [N, T] -> [N, D]."""
        return pooled(self.model(attention_mask=attention_mask, **fields).last_hidden_state, attention_mask)
