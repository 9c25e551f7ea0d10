"""Texts and pairs of texts, each with a class or a number; whole or in chunks.

Chunks are the usual way to read long texts with a short-input model: each is read alone, and the outputs are averaged.
A text's chunks do not overlap, and each has the tokenizer's special tokens around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from linearize.core.errors import ConfigError, DataError
from linearize.core.heads import HEADS
from linearize.data.encode import TOKEN_FIELDS, coded, tokenise
from linearize.data.records import Example, paired_anew
from linearize.training.stage_two.rows import IGNORED, Facts, Outputs, Row, pad, row_facts
from linearize.training.stage_two.splits import Given, open_splits
from linearize.training.stage_two.task_types.base import ClassLabels, NumberLabels, TaskData, TaskType

CHUNKS = "chunks"
"""The field of a row that holds a text's chunks."""
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
    for owner, row in coded(tokenizer, texts, None, length, return_overflowing_tokens=True):
        chunks[owner].append(row)
    return chunks


def pad_chunks(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Sequence[Row]]) -> dict[str, Tensor]:
    """Return the chunks of texts as one batch: token fields [chunks, T], and `owners` [chunks]."""
    fields = pad(tokenizer, [chunk for chunks in texts for chunk in chunks])
    owners = [number for number, chunks in enumerate(texts) for _ in chunks]
    return {**fields, "owners": torch.tensor(owners)}


def read_chunks(read: Callable[..., Tensor], fields: Mapping[str, Tensor]) -> Tensor:
    """Read chunks, `TOKENS` at a time.

    Args:
        read: token fields [n, T] -> values [n, C].
        fields: token fields [chunks, T]; other fields of the batch are ignored.

    Returns:
        [chunks, C], fp32.
    """
    names = [name for name in TOKEN_FIELDS if name in fields]
    rows = max(1, TOKENS // fields["input_ids"].shape[1])
    parts = zip(*(fields[name].split(rows) for name in names), strict=True)
    return torch.cat([read(**dict(zip(names, part, strict=True))).float() for part in parts])


def mean_over_chunks(read: Callable[..., Tensor], owners: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    """Read chunks and return the mean of each text's outputs.

    Args:
        read: token fields [n, T] -> values [n, C].
        owners: [chunks] the text of each, from 0, in order.
        fields: token fields [chunks, T]; other fields of the batch are ignored.

    Returns:
        [texts, C], fp32; all chunks of a text have the same weight.
    """
    values, count = read_chunks(read, fields), torch.bincount(owners)
    sums = values.new_zeros(len(count), values.shape[1]).index_add_(0, owners, values)
    return sums / count[:, None]


class Reader(nn.Module):
    """Wraps a model for measuring: texts go in, values to score come out, and nothing is trained.

    Args:
        model: the model.
        read: returns the values of a batch: called with the model, which text each chunk belongs to (`owners`, None for
            whole texts), and the token fields.
    """

    def __init__(self, model: nn.Module, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.read = model, read

    def forward(self, labels: object = None, owners: Tensor | None = None, **fields: Tensor) -> dict[str, Tensor]:
        """Return `logits` for a batch, and a zero loss, which the trainer needs."""
        logits = self.read(self.model, owners, **fields)
        return {"loss": torch.zeros((), device=logits.device), "logits": logits}


def mean_logits(model: nn.Module, owners: Tensor, **fields: Tensor) -> Tensor:
    """Return the means [texts, C] of a classifier's logits, or a regression's numbers, over each text's chunks."""
    return mean_over_chunks(lambda **part: model(**part).logits, owners, fields)


class Texts(TaskType):
    """Tasks whose rows are texts: those to measure on may be read in chunks."""

    def checked(self, first: Sequence[str], second: Sequence[str] | None = None) -> list[Row]:
        """Return texts, or pairs of texts, as token fields.

        Raises:
            DataError: naming the place of a text without tokens.
        """
        rows = tokenise(self.tokenizer, first, second, self.options.max_length)
        around, special = self.tokenizer.num_special_tokens_to_add(), set(self.tokenizer.all_special_ids)
        for place, row in enumerate(rows):
            if len(row["input_ids"]) <= around and special.issuperset(row["input_ids"]):
                raise DataError(
                    f"task {self.task.name}: got a text without any token (number {place} of {len(rows)}, from 0; the "
                    "tokenizer drops all its characters), expected text; remove the row"
                )
        return rows

    def measured(self, first: Sequence[str], second: Sequence[str] | None = None) -> tuple[list[Row], Facts]:
        """Return rows to measure on, in chunks if the options say so, and their facts.

        Raises:
            DataError: if a text has no token.
        """
        rows = self.checked(first, second)
        whole = tokenise(self.tokenizer, first, second)
        facts = row_facts([len(row["input_ids"]) for row in whole], self.options)
        if not self.options.chunks:
            return rows, facts
        texts = chunked(self.tokenizer, first, self.options.max_length)
        # No token is cut off.
        facts = {**facts, "cut_share": 0.0, "chunks": sum(len(chunks) for chunks in texts)}
        return [{CHUNKS: chunks} for chunks in texts], facts

    def padded(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return padded token fields, of chunks if the rows are in chunks."""
        if CHUNKS in rows[0]:
            return pad_chunks(self.tokenizer, [row[CHUNKS] for row in rows])
        return pad(self.tokenizer, rows)


class TextRows(Texts):
    """Texts, or pairs of texts, each with a label."""

    head = HEADS["text-classification"]
    columns = 2
    row_labels = True

    def prepare(self, given: Given) -> TaskData:
        """Read texts and labels.

        Raises:
            DataError: if a column is missing, a regression's label is text, or a class is not among the task's.
            ConfigError: if pairs of texts are asked for in chunks, or new pairs of texts without a pair.
        """
        splits = open_splits(self.task, given, self.options)
        if (reader := self.fitted(splits.train)) is not self:
            return reader.prepare(given)
        self.read_labels(splits.train)
        examples = splits.train.fetch(range(len(splits.train)))
        held = splits.validation.fetch(range(len(splits.validation)))
        paired = any(example.pair is not None for example in held)
        if self.options.chunks and paired:
            raise ConfigError(f"chunks: task {self.task.name} reads pairs of texts, expected one a row; drop --chunks")
        rows, facts = self.measured(*_columns(held))
        validation = self._labelled(rows, held)
        train: list[Row] = []
        if self.options.trains:
            train = self._labelled(self.checked(*_columns(examples)), examples)
        else:
            # Labels are checked all the same.
            self.numbered(examples)
        extra: list[Row] | None = None
        if share := self.options.extra_pairs:
            if examples[0].pair is None:
                raise ConfigError(f"data, extra_pairs: got {share}, but task {self.task.name} reads no pairs; drop it")
            firsts, seconds = [e.value for e in examples], [str(e.pair) for e in examples]
            sources = paired_anew(firsts, seconds, round(share * len(examples)), self.options.seed)
            texts = [firsts[first] for first, _ in sources], [seconds[second] for _, second in sources]
            pairs = tokenise(self.tokenizer, *texts, self.options.max_length)
            # Each has the training rows that it shares a text with.
            extra = [
                {**row, "sources": places, "labels": self.unlabelled}
                for row, places in zip(pairs, sources, strict=True)
            ]
        note = f", {len(extra):,} new pairs" if extra else ""
        chunkable = getattr(self.tokenizer, "is_fast", False) and not paired
        description = splits.description + note
        return TaskData(self, train, validation, description, facts=facts, extra=extra, chunkable=chunkable)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return padded token fields, of chunks if the rows are read as chunks, and labels [B] (several: [B, C])."""
        return {**self.padded(rows), "labels": self.label_tensor([row["labels"] for row in rows])}

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model, or the mean of its logits over each text's chunks."""
        return Reader(model, mean_logits) if self.options.chunks else model

    @classmethod
    def label_loss(cls, outputs: Outputs, inputs: dict[str, Tensor]) -> Tensor:
        """Return the loss on the rows that have a label; 0 if no row has one."""
        logits: Tensor = outputs.logits
        labels = inputs["labels"]
        known = ~labels.isnan() if labels.is_floating_point() else labels != IGNORED
        if not known.any():
            return logits.float().sum() * 0.0
        logits, labels = logits[known].float(), labels[known]
        if cls.numeric:
            return functional.mse_loss(logits.squeeze(-1), labels)
        return functional.cross_entropy(logits, labels)

    def _labelled(self, rows: list[Row], examples: Sequence[Example]) -> list[Row]:
        return [{**row, "labels": label} for row, label in zip(rows, self.numbered(examples), strict=True)]


def _columns(examples: Sequence[Example]) -> tuple[list[str], list[str] | None]:
    second = [str(example.pair) for example in examples] if examples[0].pair is not None else None
    return [example.value for example in examples], second


class TextClassification(ClassLabels, TextRows):
    """Texts, or pairs of texts, each with a class."""


class TextRegression(NumberLabels, TextRows):
    """Texts, or pairs of texts, each with a number."""
