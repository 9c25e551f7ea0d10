"""Texts that are compared by their embeddings, without a head and without training: similarity and retrieval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from linearize.core.errors import DataError
from linearize.core.heads import HEADS
from linearize.training.alignment.losses import pooled
from linearize.training.stage_two.chunks import (
    CHUNKS,
    chunk_facts,
    chunked,
    mean_over_chunks,
    pad_chunks,
    whole_lengths,
)
from linearize.training.stage_two.metrics import ranks, retrieval
from linearize.training.stage_two.prepared import (
    Predictions,
    Row,
    Rows,
    TaskData,
    check_tokens,
    pad,
    row_facts,
    text_facts,
    tokenise,
)
from linearize.training.stage_two.tables import Given, Splits, View
from linearize.training.stage_two.task_types.base import NumberLabels, TaskType, first_output

SECOND = "second_"
"""Prefix of the second text's fields."""


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
        """Embed 2 N texts [2 N, T] -> `logits` [N, ...], what `compare` returns.

        Embeddings of chunks [chunks, T] are averaged over the texts that they belong to, `owners` [chunks].
        """
        embeddings = self.embed(**fields) if owners is None else mean_over_chunks(self.embed, owners, fields)
        logits = self.compare(*embeddings.chunk(2))
        # The trainer wants a loss; nothing is trained.
        return {"loss": torch.zeros((), device=logits.device), "logits": logits}

    def embed(self, attention_mask: Tensor, **fields: Tensor) -> Tensor:
        """Embed texts [N, T] -> [N, D]."""
        return pooled(self.model(attention_mask=attention_mask, **fields).last_hidden_state, attention_mask)

    def compare(self, first: Tensor, second: Tensor) -> Tensor:
        """Return what is measured [N, ...] of the first and second embeddings [N, D]: here both, [N, 2, D]."""
        return torch.stack([first, second], dim=1)


class Likeness(Embedder):
    """Gives the cosine of two sentences' embeddings."""

    def compare(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the cosines [N]; the labels' scale does not matter, as a correlation is measured."""
        return functional.cosine_similarity(first, second, dim=-1)


class EmbeddedPairs(TaskType):
    """Rows of two texts each, which one model embeds.

    A batch of N rows has 2 N texts, the first of every row and then the second of every row: stage one and the
    alignment learn from the texts alone.
    """

    head = HEADS["feature-extraction"]

    @property
    def trains(self) -> bool:
        """Whether the rows can be trained on: there is no head, and nothing to train."""
        return False

    def read(self, view: View) -> tuple[Sequence[str], Sequence[str], Sequence[float]]:
        """Return the first and the second texts of all rows, and their labels."""
        raise NotImplementedError

    def rows(self, splits: Splits[View], description: str) -> TaskData:
        """Return both splits as rows; those to measure on are in chunks if the options say so.

        Raises:
            DataError: if a text has no token.
        """
        tokenizer, options = self.tokenizer, self.options
        first, second, labels = self.read(splits.validation)
        if options.chunks:
            parts = [chunked(tokenizer, texts, options.max_length) for texts in (first, second)]
            both = parts[0] + parts[1]
            check_tokens(self.task, [chunks[0] for chunks in both], tokenizer)
            facts = chunk_facts(row_facts(whole_lengths(tokenizer, both), options), both)
            columns = zip(*parts, labels, strict=True)
            validation = Rows([{CHUNKS: one, f"{SECOND}{CHUNKS}": two, "labels": label} for one, two, label in columns])
        else:
            validation = self._pairs(first, second, labels)
            sides = [
                {"input_ids": row[name]} for name in ("input_ids", f"{SECOND}input_ids") for row in validation.rows
            ]
            facts = text_facts(tokenizer, [*first, *second], [None] * len(sides), sides, options)
        facts = {**facts, "rows": len(validation)}
        train = self._pairs(*self.read(splits.train))
        chunkable = getattr(tokenizer, "is_fast", False)
        return TaskData(self, train, validation, description, facts=facts, chunkable=chunkable)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return the fields of 2 N texts of N rows, and the labels [N]."""
        if CHUNKS in rows[0]:
            fields = pad_chunks(self.tokenizer, [row[name] for name in (CHUNKS, f"{SECOND}{CHUNKS}") for row in rows])
        else:
            both = [{name: row[name] for name in row if not name.startswith(SECOND)} for row in rows]
            both += [{name.removeprefix(SECOND): row[name] for name in row if name.startswith(SECOND)} for row in rows]
            fields = pad(self.tokenizer, both)
        return {**fields, "labels": torch.tensor([row["labels"] for row in rows])}

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the embeddings of the model."""
        return Embedder(model)

    def _pairs(self, first: Sequence[str], second: Sequence[str], labels: Sequence[float]) -> Rows:
        sides = [
            tokenise(self.tokenizer, texts, [None] * len(texts), self.options.max_length) for texts in (first, second)
        ]
        check_tokens(self.task, sides[0] + sides[1], self.tokenizer)
        return Rows(
            [
                {**one, **{f"{SECOND}{name}": value for name, value in two.items()}, "labels": label}
                for one, two, label in zip(*sides, labels, strict=True)
            ]
        )


class Similarity(EmbeddedPairs, NumberLabels):
    """Likeness of two sentences by the cosine of their embeddings."""

    columns = 2

    def prepare(self, given: Given) -> TaskData:
        """Read pairs of sentences and how alike they are.

        Raises:
            DataError: if rows have one text only, or a label is no number.
        """
        splits = self.open_views(given)
        return self.rows(splits, splits.description)

    def read(self, view: View) -> tuple[Sequence[str], Sequence[str], Sequence[float]]:
        """Return the first and the second sentences of all rows, and the labels.

        Raises:
            DataError: if rows have one text only, or a label is no number.
        """
        examples = view.fetch(range(len(view)))
        if any(example.pair is None for example in examples):
            raise DataError(
                f"task {self.task.name}: got rows with one text, expected two; name both columns (--columns A,B)"
            )
        return [e.value for e in examples], [str(e.pair) for e in examples], self.numbered(examples)

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the cosines of the model's embeddings."""
        return Likeness(model)


class Retrieval(EmbeddedPairs):
    """Long texts found again without labels: the first half of every text looks for its second half among all."""

    def prepare(self, given: Given) -> TaskData:
        """Read texts and cut each in two, at the middle of its words.

        Raises:
            DataError: if a text has one word only, or there is only one text.
        """
        splits = self.open_views(given)
        if len(splits.validation) < 2:
            raise DataError(
                f"task {self.task.name}: got {len(splits.validation)} text to measure on, expected several to look "
                "among; add rows"
            )
        return self.rows(splits, f"halves of the texts of {splits.description}")

    def read(self, view: View) -> tuple[Sequence[str], Sequence[str], Sequence[float]]:
        """Return the first and the second halves of all texts, and their numbers.

        Raises:
            DataError: if a text has one word only.
        """
        texts = [example.value.split() for example in view.fetch(range(len(view)))]
        short = next((place for place, words in enumerate(texts) if len(words) < 2), None)
        if short is not None:
            raise DataError(
                f"task {self.task.name}: got a text of one word (number {short} of {len(texts)}, from 0), expected at "
                "least two words, to cut it in two; remove the row"
            )
        first = [" ".join(words[: len(words) // 2]) for words in texts]
        return first, [" ".join(words[len(words) // 2 :]) for words in texts], range(len(texts))

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return the rank [N] of each text's second half, from the embeddings [N, 2, D] of both."""
        embeddings = np.asarray(first_output(predictions))
        return (ranks(embeddings[:, 0], embeddings[:, 1]),)

    def chance_metrics(self, labels: Predictions) -> list[dict[str, float]]:
        """Return what a random order reaches on average."""
        return [retrieval(np.arange(1, len(labels) + 1))]
