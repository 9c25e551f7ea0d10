"""Rows of two texts each, both embedded by one model: what a task measures is between the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from linearize.alignment.losses import pooled
from linearize.finetune.chunks import chunk_facts, chunked, mean_over_chunks, pad_chunks, whole_lengths
from linearize.finetune.prepared import (
    DataOptions,
    Facts,
    Row,
    Rows,
    check_tokens,
    pad,
    row_facts,
    text_facts,
    tokenise,
)
from linearize.finetune.task import Task
from linearize.finetune.task_types.text import CHUNKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECOND = "second_"
"""What the names of the second text's fields begin with."""


def rows_of_two(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    texts: tuple[Sequence[str], Sequence[str]],
    labels: Sequence[float],
    options: DataOptions,
) -> Rows:
    """Make rows of the first and the second texts [N] and a label each.

    Raises:
        DataError: if a text has no token.
    """
    first, second = (tokenise(tokenizer, one, [None] * len(one), options.max_length) for one in texts)
    check_tokens(task, [*first, *second], tokenizer)
    return Rows(
        [
            {**one, **{f"{SECOND}{name}": value for name, value in other.items()}, "labels": label}
            for one, other, label in zip(first, second, labels, strict=True)
        ]
    )


def rows_to_measure(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    texts: tuple[Sequence[str], Sequence[str]],
    labels: Sequence[float],
    options: DataOptions,
) -> tuple[Rows, Facts]:
    """Make rows of the first and the second texts [N], in chunks where the options say so, and their facts.

    Raises:
        DataError: if a text has no token.
    """
    if not options.chunks:
        made = rows_of_two(task, tokenizer, texts, labels, options)
        both = [*texts[0], *texts[1]]
        sides = [{"input_ids": row[name]} for name in ("input_ids", f"{SECOND}input_ids") for row in made.rows]
        facts = text_facts(tokenizer, both, [None] * len(both), sides, options)
        return made, {**facts, "rows": len(made)}
    first, second = (chunked(tokenizer, one, options.max_length) for one in texts)
    check_tokens(task, [chunks[0] for chunks in first + second], tokenizer)
    facts = chunk_facts(row_facts(whole_lengths(tokenizer, first + second), options), first + second)
    rows = [
        {CHUNKS: one, f"{SECOND}{CHUNKS}": other, "labels": label}
        for one, other, label in zip(first, second, labels, strict=True)
    ]
    return Rows(rows), {**facts, "rows": len(rows)}


def collate_two(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Make one batch of 2 N texts of N rows: the first of every row and then the second of every row."""
    if CHUNKS in rows[0]:
        return pad_chunks(tokenizer, [row[name] for name in (CHUNKS, f"{SECOND}{CHUNKS}") for row in rows])
    both = [{name: row[name] for name in row if not name.startswith(SECOND)} for row in rows]
    both += [{name.removeprefix(SECOND): row[name] for name in row if name.startswith(SECOND)} for row in rows]
    return pad(tokenizer, both)


class Embedder(nn.Module):
    """Embeds texts by the mean over their tokens' last hidden states, as sentence-transformers does.

    Args:
        model: a model without a head.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, labels: Tensor | None = None, owners: Tensor | None = None, **fields: Tensor
    ) -> dict[str, Tensor]:
        """Embed 2 N texts [2 N, T] -> `logits`, see `compare`.

        Of texts that are read as chunks [chunks, T], which `owners` [chunks] belong to, embeddings are averaged.
        """
        embeddings = self.embed(**fields) if owners is None else mean_over_chunks(self.embed, owners, fields)
        logits = self.compare(*embeddings.chunk(2))
        # Nothing is trained on these: what is measured comes of the logits.
        return {"loss": torch.zeros((), device=logits.device), "logits": logits}

    def embed(self, attention_mask: Tensor, **fields: Tensor) -> Tensor:
        """Embed texts [N, T] -> [N, D]."""
        return pooled(self.model(attention_mask=attention_mask, **fields).last_hidden_state, attention_mask)

    def compare(self, first: Tensor, second: Tensor) -> Tensor:
        """Return what is measured [N, ...] of the first and second embeddings [N, D]: here both, [N, 2, D]."""
        return torch.stack([first, second], dim=1)
