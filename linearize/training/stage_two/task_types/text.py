"""Classification and regression of texts and pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.core.errors import ConfigError
from linearize.core.heads import HEADS
from linearize.data.pairs import paired_anew
from linearize.data.records import Example
from linearize.training.stage_two.chunks import CHUNKS, ChunkMean, chunk_facts, chunked, pad_chunks, whole_lengths
from linearize.training.stage_two.prepare import extra_texts
from linearize.training.stage_two.prepared import (
    IGNORED,
    Facts,
    Row,
    Rows,
    TaskData,
    check_tokens,
    has_tokens,
    pad,
    row_facts,
    text_facts,
    tokenise,
)
from linearize.training.stage_two.tables import Given
from linearize.training.stage_two.task_types.base import ClassLabels, LabelledRows, NumberLabels


class _TextRows(LabelledRows):
    head = HEADS["text-classification"]
    columns = 2
    row_labels = True

    @property
    def trains(self) -> bool:
        """Whether the rows can be trained on: texts in chunks can only be measured."""
        return not self.options.chunks

    def prepare(self, given: Given) -> TaskData:
        """Read texts and labels.

        Raises:
            DataError: if a column is missing, a regression's label is text, or a class is not among the task's.
        """
        tokenizer = self.tokenizer
        splits = self.open_views(given)
        self.read_labels(splits.train)
        examples = splits.train.fetch(range(len(splits.train)))
        held = splits.validation.fetch(range(len(splits.validation)))
        pairs = [example.pair for example in held]
        paired = any(pair is not None for pair in pairs)
        if self.options.chunks:
            if paired:
                raise ConfigError(
                    f"chunks: task {self.task.name} reads pairs of texts, expected one text a row; drop --chunks"
                )
            validation, facts = self._chunked_rows(held)
        else:
            validation = self._rows(held)
            facts = text_facts(tokenizer, [e.value for e in held], pairs, validation.rows, self.options)
        extra, note = self._extra(examples, held) if self.options.unlabelled else (None, "")
        return TaskData(
            self,
            self._rows(examples),
            validation,
            splits.description + note,
            facts=facts,
            extra=extra,
            chunkable=getattr(tokenizer, "is_fast", False) and not paired,
        )

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return padded token fields, of chunks if the rows are read as chunks, and labels [B]."""
        if CHUNKS in rows[0]:
            fields = pad_chunks(self.tokenizer, [row[CHUNKS] for row in rows])
        else:
            fields = pad(self.tokenizer, rows)
        return {**fields, "labels": torch.tensor([row["labels"] for row in rows], dtype=self.dtype)}

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model, or the mean of its logits over each text's chunks."""
        return ChunkMean(model) if self.options.chunks else model

    @classmethod
    def label_loss(cls, outputs: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the loss on the rows that have a label; 0 if none has."""
        logits: Tensor = outputs.logits
        labels = inputs["labels"]
        known = ~labels.isnan() if labels.is_floating_point() else labels != IGNORED
        return cls.loss(logits[known].float(), labels[known]) if known.any() else logits.float().sum() * 0.0

    def _tokenised(self, examples: Sequence[Example]) -> list[Row]:
        return tokenise(
            self.tokenizer, [e.value for e in examples], [e.pair for e in examples], self.options.max_length
        )

    def _rows(self, examples: Sequence[Example]) -> Rows:
        rows = self._tokenised(examples)
        check_tokens(self.task, rows, self.tokenizer)
        return Rows([{**row, "labels": label} for row, label in zip(rows, self.numbered(examples), strict=True)])

    def _chunked_rows(self, examples: Sequence[Example]) -> tuple[Rows, Facts]:
        texts = chunked(self.tokenizer, [example.value for example in examples], self.options.max_length)
        check_tokens(self.task, [chunks[0] for chunks in texts], self.tokenizer)
        facts = chunk_facts(row_facts(whole_lengths(self.tokenizer, texts), self.options), texts)
        labels = self.numbered(examples)
        return Rows([{CHUNKS: chunks, "labels": label} for chunks, label in zip(texts, labels, strict=True)]), facts

    def _extra(self, examples: Sequence[Example], measured: Sequence[Example]) -> tuple[Rows, str]:
        """Return the rows without a label that the options ask for, each with the training rows it shares a text with.

        Raises:
            ConfigError: if new pairs are asked for and the task does not read pairs.
            DataError: if further texts cannot be read, or are not new.
        """
        rows: list[Row] = []
        note, share = "", self.options.extra_pairs
        if share:
            if examples[0].pair is None:
                raise ConfigError(f"data, extra_pairs: got {share}, but task {self.task.name} reads no pairs; drop it")
            firsts, seconds = [e.value for e in examples], [str(e.pair) for e in examples]
            sources = paired_anew(firsts, seconds, round(share * len(examples)), self.options.seed)
            pairs = self._tokenised([Example(firsts[first], seconds[second]) for first, second in sources])
            rows = [{**row, "sources": places} for row, places in zip(pairs, sources, strict=True)]
            note = f", {len(rows):,} new pairs"
        if self.options.extra_texts:
            found = extra_texts(self.task, examples, measured, self.options)
            texts = zip(self._tokenised(found.examples), found.sources, strict=True)
            # These texts were not chosen one by one, so one without any token is skipped.
            rows += [{**row, "sources": places} for row, places in texts if has_tokens(row, self.tokenizer)]
            note += f", {found.description}"
        return Rows([{**row, "labels": self.no_label} for row in rows]), note


class TextClassification(_TextRows, ClassLabels):
    """Texts, or pairs of texts, with a class each."""


class TextRegression(_TextRows, NumberLabels):
    """Texts, or pairs of texts, with a number each."""
