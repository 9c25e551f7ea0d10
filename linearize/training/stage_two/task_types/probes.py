"""Probes of what a causal model can find in its context: repeated passages, and associative recall."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from linearize.core.errors import ConfigError, DataError
from linearize.training.stage_two.prepared import (
    IGNORED,
    Logits,
    Predictions,
    Row,
    Rows,
    RowSet,
    TaskData,
    pad_with_labels,
    row_facts,
)
from linearize.training.stage_two.tables import Given, need_columns
from linearize.training.stage_two.task_types.base import first_output
from linearize.training.stage_two.task_types.language import LanguageType, starts_of, token_losses
from linearize.training.stage_two.task_types.tokens import most_frequent

if TYPE_CHECKING:
    from datasets import Dataset


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
        # The first token of the second reading follows from nothing.
        labels[len(passage)] = IGNORED
        return {"input_ids": np.concatenate([passage, passage]), "labels": labels}


class Copying(LanguageType):
    """A passage appears twice in a row, and every token of the second reading could be looked up in the first.

    The probe depends on the length of the passage (half of `max_length`): softmax looks tokens up exactly, and a state
    of a fixed size has a limit. The repeated sequences of Olsson et al. 2022, https://arxiv.org/abs/2209.11895, with
    passages of real text.
    """

    def prepare(self, given: Given) -> TaskData:
        """Read texts as one row of tokens per split, and cut it into passages of half of `max_length`.

        Raises:
            DataError: if there is no text column, or too little text for one passage.
            ConfigError: if `max_length` is below 4.
        """
        train, valid, _, description = self.read_tokens(given, lambda tokens: max(4, 2 * tokens))
        length = self.options.max_length // 2
        if length < 2:
            raise ConfigError(
                f"data, max_length: got {self.options.max_length}, expected at least 4: each passage appears twice"
            )
        for name, row in (("training", train), ("validation", valid)):
            if len(row) < length:
                raise DataError(f"{description}: got {len(row)} {name} tokens, expected a passage of {length}")
        return TaskData(
            self,
            Copies(train, length),
            Copies(valid, length),
            f"{description}; passages of {length:,} tokens, each twice",
            facts={"context": 2 * length},
        )

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return rows of both readings [B, T]."""
        ids, labels = (torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("input_ids", "labels"))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def reduce(self, logits: Logits, labels: Tensor) -> Tensor:
        """Return what the metric `copying` reads [B, 5], from logits [B, T, V]."""
        scores: Tensor = first_output(logits)
        half = labels.shape[1] // 2
        passage = labels[:, half + 1 :]
        again, counted = token_losses(scores[:, half:-1], passage)
        right = (scores[:, half:-1].argmax(dim=-1) == passage).float() * counted
        first, counted_first = token_losses(scores[:, : half - 1], passage)
        return torch.stack([values.sum(dim=1) for values in (right, again, first, counted, counted_first)], dim=1)

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return the sums of each row [N, 5]."""
        return (np.asarray(predictions),)


class Recall(LanguageType):
    """Predict chosen tokens of a sequence from the tokens before them (associative recall and similar tasks).

    A raw table with the columns `text` (tokens between blanks) and `positions` (which tokens are answers).
    """

    most_tokens = None

    def prepare(self, given: Given) -> TaskData:
        """Read sequences; the loss is taken on the answers only.

        Raises:
            DataError: if a column is missing or a sequence does not fit the length.
        """
        splits = self.open_tables(given)
        train, validation = self._rows(splits.train), self._rows(splits.validation)
        facts = row_facts([len(row["input_ids"]) for row in validation.rows], self.options)
        return TaskData(self, train, validation, splits.description, facts=facts)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return padded sequences and labels [B, T]."""
        return pad_with_labels(self.tokenizer, rows)

    def reduce(self, logits: Logits, labels: Tensor) -> Tensor:
        """Return the predicted tokens [B, T]."""
        guesses: Tensor = first_output(logits).argmax(dim=-1)
        return guesses

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return the predicted token of each place and the true one [N, T - 1]."""
        return np.asarray(predictions)[:, :-1], np.asarray(labels)[:, 1:]

    def metrics(self, *units: np.ndarray) -> dict[str, float]:
        """Return the metrics over the answers."""
        guesses, answers = units
        asked = answers != IGNORED
        return super().metrics(guesses[asked], answers[asked])

    def constant_answers(self, labels: Predictions) -> Iterable[np.ndarray]:
        """Return the most frequent answer."""
        return most_frequent(labels)

    def _rows(self, table: Dataset) -> Rows:
        need_columns(table, ("text", "positions"), "recall")
        most = self.options.max_length
        rows = []
        for text, positions in zip(table["text"], table["positions"], strict=True):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) > most:
                raise DataError(
                    f"recall: got a sequence of {len(ids)} tokens, expected at most {most}; raise max_length"
                )
            labels = torch.full((len(ids),), IGNORED)
            labels[positions] = torch.tensor(ids)[positions]
            rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels.tolist()})
        return Rows(rows)
