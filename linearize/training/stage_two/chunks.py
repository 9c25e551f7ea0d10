"""Long texts as chunks, the usual way to read them with a model of short inputs: each is read alone, outputs averaged.

A text's chunks do not overlap, and each has the tokenizer's special tokens around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from linearize.core.errors import ConfigError
from linearize.training.stage_two.prepared import TOKEN_FIELDS, Facts, Row, pad

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNKS = "chunks"
"""The field of a row that holds a text's chunks."""
OWNERS = "owners"
"""The field of a batch of chunks that says which text each belongs to, long [chunks]."""
TOKENS = 16_384
"""Tokens, padding included, that are read at a time."""


def chunked(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> list[list[Row]]:
    """Cut texts into chunks of at most `length` tokens, special tokens included.

    Args:
        tokenizer: a fast one.
        texts: [N].
        length: tokens per chunk.

    Returns:
        The chunks of every text [N][chunks], at least one each; together they hold all its tokens, in order.

    Raises:
        ConfigError: if the tokenizer is slow, or special tokens alone fill a chunk.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("chunks: got a slow tokenizer, expected a fast one; leave chunks out (--no-chunks)")
    around = tokenizer.num_special_tokens_to_add()
    if length <= around:
        raise ConfigError(f"chunks: got a length of {length} tokens, expected more than the {around} special ones")
    chunks: list[list[Row]] = [[] for _ in texts]
    for begin in range(0, len(texts), 1_000):
        fields = tokenizer(
            list(texts[begin : begin + 1_000]),
            truncation=True,
            max_length=length,
            return_overflowing_tokens=True,
            return_attention_mask=True,
            verbose=False,
        )
        names = [name for name in TOKEN_FIELDS if name in fields]
        for place, owner in enumerate(fields["overflow_to_sample_mapping"]):
            chunks[begin + owner].append({name: fields[name][place] for name in names})
    return chunks


def whole_lengths(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Sequence[Row]]) -> list[int]:
    """Return how many tokens each text has in one piece, from its chunks."""
    around = tokenizer.num_special_tokens_to_add()
    return [around + sum(len(chunk["input_ids"]) - around for chunk in chunks) for chunks in texts]


def chunk_facts(facts: Facts, texts: Sequence[Sequence[Row]]) -> Facts:
    """Return the facts of rows that are read as chunks: no token is cut off."""
    return {**facts, "cut_share": 0.0, "chunks": sum(len(chunks) for chunks in texts)}


def pad_chunks(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Sequence[Row]]) -> dict[str, Tensor]:
    """Return the chunks of texts as one batch: token fields [chunks, T], and `owners` [chunks]."""
    fields = pad(tokenizer, [chunk for chunks in texts for chunk in chunks])
    owners = [number for number, chunks in enumerate(texts) for _ in chunks]
    return {**fields, OWNERS: torch.tensor(owners)}


def mean_over_chunks(read: Callable[..., Tensor], owners: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    """Read chunks, `TOKENS` at a time, and return the mean of each text's outputs.

    Args:
        read: token fields [n, T] -> values [n, C].
        owners: [chunks] the text of each, from 0, in order.
        fields: token fields [chunks, T]; other fields of the batch are ignored.

    Returns:
        [texts, C], fp32; all chunks of a text have the same weight.
    """
    fields = {name: field for name, field in fields.items() if name in TOKEN_FIELDS}
    rows = max(1, TOKENS // fields["input_ids"].shape[1])
    parts = [
        read(**{name: field[begin : begin + rows] for name, field in fields.items()}).float()
        for begin in range(0, len(owners), rows)
    ]
    values = torch.cat(parts)
    count = torch.bincount(owners)
    sums = values.new_zeros(len(count), values.shape[1]).index_add_(0, owners, values)
    return sums / count[:, None]


class ChunkMean(nn.Module):
    """Returns the mean of a classifier's logits, or of a regression's number, over each text's chunks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, owners: Tensor, labels: Tensor | None = None, **fields: Tensor) -> dict[str, Tensor]:
        """Read chunks [chunks, T] -> `logits` [texts, C]."""
        logits = mean_over_chunks(lambda **part: self.model(**part).logits, owners, fields)
        # The trainer wants a loss; only the task's score is read.
        return {"loss": torch.zeros((), device=logits.device), "logits": logits}
