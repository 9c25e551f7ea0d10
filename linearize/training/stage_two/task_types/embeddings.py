"""Texts that are compared by their embeddings, without a head: pairs of sentences, halves of texts, questions.

Texts are read whole or in chunks (`task_types.text`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from linearize.checkpoint.loading import pooling, sentence_files
from linearize.core.errors import DataError
from linearize.core.heads import HEADS
from linearize.training.alignment.objective import pooled
from linearize.training.stage_two.metrics import part_ranks, ranks, retrieval
from linearize.training.stage_two.rows import IGNORED, Predictions, Row
from linearize.training.stage_two.splits import Given, View, open_splits
from linearize.training.stage_two.task_types.base import ClassLabels, NumberLabels, TaskData, first_output
from linearize.training.stage_two.task_types.text import Reader, Texts, mean_over_chunks, read_chunks

SPAN = 512
"""Tokens per part of a text that is read whole."""
SECOND = "second_"
"""Prefix of the second text's fields."""


def pooling_of(name: str | None) -> tuple[str, list[str]]:
    """Return how a checkpoint pools its last hidden states, and what its embedding has beyond that (`pooling`)."""
    return pooling(sentence_files(name) if name else {})


def embedded(model: nn.Module, how: str, attention_mask: Tensor, **fields: Tensor) -> Tensor:
    """Embed texts [N, T] -> [N, D]: last hidden states, pooled as sentence-transformers does (`pooled`)."""
    return pooled(model(attention_mask=attention_mask, **fields).last_hidden_state, attention_mask, how)


def cosines(model: nn.Module, owners: Tensor | None, *, how: str = "mean", **fields: Tensor) -> Tensor:
    """Embed 2 N texts [2 N, T] -> the cosines [N] of the first and second texts of N rows.

    Embeddings of chunks [chunks, T] are averaged over the texts that they belong to, `owners` [chunks].
    """
    embed = partial(embedded, model, how)
    embeddings = embed(**fields) if owners is None else mean_over_chunks(embed, owners, fields)
    one, two = embeddings.chunk(2)
    return functional.cosine_similarity(one, two)


def with_parts(model: nn.Module, owners: Tensor | None, *, how: str = "mean", **fields: Tensor) -> Tensor:
    """Embed 2 N texts [2 N, T] -> [N, 1 + P, 2, D]: first the whole texts, then their parts.

    Parts are their chunks, or, read whole, spans of `SPAN` tokens ("late chunking", https://arxiv.org/abs/2409.04701).
    Texts with fewer parts are padded with `IGNORED`, as the trainer pads batches with fewer parts. A whole text is its
    pooled tokens (`how`), or the mean over its chunks.
    """
    if owners is None:
        sides = []
        for side in (0, 1):
            half = {name: field.chunk(2)[side] for name, field in fields.items()}
            length, width = int(half["attention_mask"].sum(dim=1).max()), half["attention_mask"].shape[1]
            # Columns that are padding in all rows are cut if they are at least half: questions next to documents.
            kept = length if 2 * length <= width else width
            sides.append(spans(model, how, **{name: field[:, :kept] for name, field in half.items()}))
    else:
        chunks = read_chunks(partial(embedded, model, how), fields)
        texts = [chunks[owners == owner] for owner in range(int(owners[-1]) + 1)]
        both = pad_sequence([torch.cat([one.mean(dim=0)[None], one]) for one in texts], True, IGNORED)
        sides = list(both.chunk(2))
    most = max(side.shape[1] for side in sides)
    filled = [functional.pad(side, (0, 0, 0, most - side.shape[1]), value=IGNORED) for side in sides]
    return torch.stack(filled, dim=2)


def spans(model: nn.Module, how: str, attention_mask: Tensor, **fields: Tensor) -> Tensor:
    """Embed texts [n, T] and their spans -> [n, 1 + P, D]; the text first."""
    states = model(attention_mask=attention_mask, **fields).last_hidden_state
    parts = zip(states.split(SPAN, dim=1), attention_mask.split(SPAN, dim=1), strict=True)
    found = [pooled(part, mask).masked_fill(~mask.any(dim=1)[:, None], IGNORED) for part, mask in parts]
    return torch.stack([pooled(states, attention_mask, how), *found], dim=1)


class EmbeddedPairs(Texts):
    """Rows of two texts each, which one model embeds.

    A batch of N rows has 2 N texts, the first of every row and then the second of every row: stage one and the
    alignment learn from the texts alone.
    """

    head = HEADS["feature-extraction"]
    trains = False

    def prepare(self, given: Given) -> TaskData:
        """Read rows of two texts and their labels.

        Raises:
            DataError: if rows have only one text, a text has no token, or a label does not fit the task.
        """
        splits = open_splits(self.task, given, self.options)
        first, second, labels = self.read(splits.validation)
        texts, facts = self.measured(first + second)
        validation = _side_by_side(texts, labels)
        facts = {**facts, "rows": len(validation)}
        train = []
        if self.options.trains:
            # Recipes train on their texts, although the task has no labels to tune on.
            first, second, labels = self.read(splits.train)
            train = _side_by_side(self.checked(first + second), labels)
        chunkable = getattr(self.tokenizer, "is_fast", False)
        return TaskData(self, train, validation, splits.description, facts=facts, chunkable=chunkable)

    def read(self, view: View) -> tuple[list[str], list[str], Sequence[float]]:
        """Return the first and the second texts of all rows, and their labels."""
        raise NotImplementedError

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return the fields of 2 N texts of N rows, and the labels [N]."""
        texts = [{name: row[name] for name in row if not name.startswith(SECOND)} for row in rows]
        texts += [{name.removeprefix(SECOND): row[name] for name in row if name.startswith(SECOND)} for row in rows]
        return {**self.padded(texts), "labels": torch.tensor([row["labels"] for row in rows])}


def _side_by_side(texts: list[Row], labels: Sequence[float]) -> list[Row]:
    """Return rows of two texts: the first half of `texts` are the first texts of the rows."""
    half = len(labels)
    return [
        {**one, **{f"{SECOND}{name}": value for name, value in two.items()}, "labels": label}
        for one, two, label in zip(texts[:half], texts[half:], labels, strict=True)
    ]


class Similarity(EmbeddedPairs, NumberLabels):
    """Similarity of two sentences by the cosine of their embeddings."""

    columns = 2

    def read(self, view: View) -> tuple[list[str], list[str], Sequence[float]]:
        """Return the first and the second sentences of all rows, and the labels.

        Raises:
            DataError: if rows have only one text, or a label is not a number.
        """
        examples = view.fetch(range(len(view)))
        if any(example.pair is None for example in examples):
            raise DataError(f"task {self.task.name}: got rows with one text, expected two; name both (--columns A,B)")
        return [e.value for e in examples], [str(e.pair) for e in examples], self.numbered(examples)

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the cosines of the model's embeddings; the labels' scale does not matter for a correlation."""
        return Reader(model, partial(cosines, how=pooling_of(model.name_or_path)[0]))


class Duplicates(ClassLabels, Similarity):  # type: ignore[misc]
    """Whether two sentences mean the same, by the cosine of their embeddings."""

    units = NumberLabels.units


class Retrieval(EmbeddedPairs):
    """Retrieval without labels: the first half of every text is the query for its second half, among all texts.

    In rows with two texts, the first one, a question, is the query for the second.
    """

    columns = 2

    def prepare(self, given: Given) -> TaskData:
        """Read texts and cut each in two, at the middle of its words; or read questions and their texts.

        Raises:
            DataError: if a text has only one word, or there is only one text.
        """
        data = super().prepare(given)
        if len(data.validation) < 2:
            raise DataError(
                f"task {self.task.name}: got {len(data.validation)} text to measure on, expected several; add rows"
            )
        what = "halves of the texts of" if len(self.task.columns) < 2 else "questions and texts of"
        return replace(data, description=f"{what} {data.description}")

    def read(self, view: View) -> tuple[list[str], list[str], Sequence[float]]:
        """Return the first and the second halves of all texts, or both texts of each row, and their numbers.

        Raises:
            DataError: if a text to be cut has only one word.
        """
        examples = view.fetch(range(len(view)))
        if len(self.task.columns) == 2:
            return [e.value for e in examples], [str(e.pair) for e in examples], range(len(examples))
        texts = [example.value.split() for example in examples]
        short = next((place for place, words in enumerate(texts) if len(words) < 2), None)
        if short is not None:
            raise DataError(
                f"task {self.task.name}: got a text of one word (number {short} of {len(texts)}, from 0), expected at "
                "least two words, to cut it in two; remove the row"
            )
        first = [" ".join(words[: len(words) // 2]) for words in texts]
        return first, [" ".join(words[len(words) // 2 :]) for words in texts], range(len(texts))

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the embeddings of both texts of every row, and of their parts [N, 1 + P, 2, D]."""
        return Reader(model, partial(with_parts, how=pooling_of(model.name_or_path)[0]))

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return the rank [N] of each row's second text by whole texts, and by the best part: [N, 1 + P, 2, D]."""
        embeddings = np.asarray(first_output(predictions))
        first, second = embeddings[:, :, 0], embeddings[:, :, 1]
        parts = (np.where((side == IGNORED).all(-1, keepdims=True), np.nan, side)[:, 1:] for side in (first, second))
        return ranks(first[:, 0], second[:, 0]), part_ranks(*parts)

    def chance_metrics(self, labels: Predictions) -> list[dict[str, float]]:
        """Return the average metrics of a random order."""
        order = np.arange(1, len(labels) + 1)
        return [retrieval(order, order)]
