"""Language models: next token with windows and a stated stride, masked tokens, and probes of what a model can look up.

All texts of a split to measure on are joined unchanged, with a line break after each. A causal model's windows overlap
by at least one token, so that every token but the very first is predicted once. To train a causal model, texts are
joined as in stage one's packing: each with its special tokens and an end token.

Every row of a causal model begins with the start tokens that its tokenizer adds to a text, if it adds any. They are
part of the row's length, and are not predicted. Models whose rows always began with one are far worse without it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from linearize.core.errors import ConfigError, DataError
from linearize.core.heads import HEADS
from linearize.data.columns import column_kinds, find_column
from linearize.data.encode import special_tokens
from linearize.training.stage_two.metrics import PositionLoss, losses_by_position, perplexity, range_sums
from linearize.training.stage_two.rows import IGNORED, Logits, Predictions, Row, pad_with_labels, row_facts, stable_seed
from linearize.training.stage_two.splits import Given, need_columns, open_splits
from linearize.training.stage_two.task_types.base import TaskData, TaskType, first_output
from linearize.training.stage_two.task_types.tokens import TokenLabels

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

TEXTS = 1_000
"""Texts that are tokenised at a time."""
WINDOW = 2_048
"""Tokens in a language model's windows if the user gives no length and the model takes that many."""


class Windows:
    """Windows over one long row of tokens.

    Args:
        tokens: [N] int32.
        length: tokens per window.
        cuts: the first token of each window, and the first that it predicts, as places in the whole row [W] each
            (`strided`); None for windows that do not overlap and predict all their tokens.
        fixed: whether masks are the same each time.
        front: start tokens, put before each window that does not begin with them.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        length: int,
        cuts: tuple[np.ndarray, np.ndarray] | None = None,
        *,
        fixed: bool = False,
        front: Sequence[int] = (),
    ) -> None:
        self.tokens, self.length, self.fixed, self.front = tokens, length, fixed, list(front)
        # Without cuts: full windows, or a single short window if the row is too short.
        begins: np.ndarray = np.arange(0, max(1, len(tokens) - length + 1), length)
        self.starts, self.fresh = (begins, begins) if cuts is None else cuts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, place: int) -> Row:
        start = int(self.starts[place])
        ids = self.tokens[start : start + self.length].astype(np.int64)
        labels = ids.copy()
        labels[: int(self.fresh[place]) - start] = IGNORED
        if ids[: len(self.front)].tolist() != self.front:
            # The window's first token is in the middle of a text: the start tokens alone say nothing about it.
            labels[0] = IGNORED
            ids, labels = _after(self.front, ids), _after([IGNORED] * len(self.front), labels)
        return {"input_ids": ids, "labels": labels, "fixed": self.fixed}


def _after(front: list[int], ids: np.ndarray) -> np.ndarray:
    return np.concatenate([np.array(front, dtype=np.int64), ids])


class LanguageType(TaskType):
    """Tasks whose labels are tokens of the row; predictions are sums over rows, so that no logits have to be kept."""

    head = HEADS["text-generation"]
    next_token = True
    train_tokens: ClassVar[int] = 1_024
    most_tokens: ClassVar[int | None] = WINDOW

    @functools.cached_property
    def front(self) -> list[int]:
        """The start tokens that the tokenizer adds to a text."""
        return special_tokens(self.tokenizer)[0]

    def read_tokens(self, given: Given, readings: int = 1, *, ends: bool = False) -> tuple[np.ndarray, np.ndarray, str]:
        """Return training and validation texts, each as one row of tokens [N], and a description.

        Without a length from the user (`auto_length`), rows are no longer than the tokens to measure on fill.

        Args:
            given: the data set.
            readings: how often every token stands in its row.
            ends: whether training texts are joined with their special tokens and an end token.

        Raises:
            DataError: if there is no text column.
        """
        splits = open_splits(self.task, given, self.options, raw=True)
        named = self.task.columns[0] if self.task.columns else None
        column = find_column(column_kinds(splits.train), named, "text", "text")
        need_columns(splits, [column], "text", kind="text")
        valid, self.words = tokens_of(splits.validation, column, self.tokenizer)
        train = tokens_of(splits.train, column, self.tokenizer, ends)[0] if self.options.trains else valid
        self.fit_length(readings * max(2, len(valid)) + (len(self.front) if self.next_token else 0))
        return train, valid, splits.description

    def without_front(self, least: int, reason: str) -> int:
        """Return the tokens of a row that are left for its text, after the start tokens.

        Raises:
            ConfigError: if they are fewer than `least`, with the reason.
        """
        got, start = self.options.max_length, len(self.front)
        if got < start + least:
            raise ConfigError(f"data, max_length: got {got}, expected at least {start + least}: {reason}")
        return got - start

    def sizes(self, train: np.ndarray, valid: np.ndarray) -> str:
        """Return the numbers of tokens to train on, if they were read, and to measure on."""
        return f"{len(train):,} and {len(valid):,}" if self.options.trains else f"{len(valid):,}"

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return the sum of the losses and the count of the tokens of each row [N]."""
        sums = np.asarray(predictions, dtype=np.float64)
        return sums[:, 0], sums[:, 1]


class CausalType(LanguageType):
    """Next-token tasks that keep the loss by position."""

    def reduce(self, logits: Logits, labels: Tensor) -> Tensor:
        """Return sums of the negative log-likelihoods of labels [B, T] under logits [B, T, V].

        Returns:
            [B, 2 + 3 R]: their sum and their count, then those by position (`metrics.range_sums`).
        """
        nll, counted = token_losses(first_output(logits)[:, :-1], labels[:, 1:])
        return torch.cat([torch.stack([nll.sum(dim=1), counted.sum(dim=1)], dim=1), range_sums(nll, counted)], dim=1)

    def by_position(self, predictions: Predictions) -> tuple[PositionLoss, ...]:
        """Return the loss by position in the row."""
        return losses_by_position(np.asarray(predictions)[:, 2:])


class CausalLanguage(CausalType):
    """Next token over windows of a corpus."""

    def prepare(self, given: Given) -> TaskData:
        """Read texts as one row of tokens per split, and cut it into windows.

        Raises:
            DataError: if there is no text column or too little text for one window.
            ConfigError: if the stride does not fit.
        """
        train, valid, description = self.read_tokens(given, ends=True)
        context, front = self.options.max_length, self.front
        length = self.without_front(2, "tokens are predicted from others")
        _need_tokens(description, f"a window of {context}", min(length, 2), train, valid)
        # Every token but the first is predicted once.
        self.tokens = len(valid) - 1
        stride = self.options.stride or length - 1
        if stride >= length:
            less = f" without {len(front)} start tokens" if front else ""
            raise ConfigError(
                f"data, stride: got {stride}, expected less than max_length ({context}){less}, to overlap"
            )
        validation = Windows(valid, length, strided(len(valid), length, stride), front=front)
        description += f"; {self.sizes(train, valid)} tokens, windows of {context}, stride {stride}"
        facts = {"context": context, "stride": stride, "words": self.words}
        return TaskData(self, Windows(train, length, front=front), validation, description, facts=facts)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return windows [B, T]; a shorter last window is padded with labels that do not count."""
        ids = pad_sequence([torch.from_numpy(row["input_ids"]) for row in rows], True)
        labels = pad_sequence([torch.from_numpy(row["labels"]) for row in rows], True, IGNORED)
        # The padding comes after the text, where a causal model does not look, so no padding mask is needed.
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def metrics(self, *units: np.ndarray) -> dict[str, float]:
        """Return the perplexity per token, and per word: rows that an interval draws have their share of the words."""
        by_word = perplexity(units[0], self.words * units[1] / self.tokens)
        return super().metrics(*units) | {"word_perplexity": by_word["perplexity"]}


class MaskedLanguage(LanguageType):
    """Masked tokens in windows of a corpus."""

    head = HEADS["fill-mask"]
    next_token = False

    def prepare(self, given: Given) -> TaskData:
        """Read texts as one row of tokens per split, and cut it into windows.

        Raises:
            DataError: if there is no text column or too little text for one window.
            ConfigError: if the tokenizer has no mask token.
        """
        train, valid, description = self.read_tokens(given)
        options = self.options
        _need_tokens(description, f"a window of {options.max_length}", min(options.max_length, 2), train, valid)
        if self.tokenizer.mask_token_id is None:
            raise ConfigError("masked language model: got a tokenizer without a mask token; use task causal-lm")
        around = sum(token is not None for token in (self.tokenizer.cls_token_id, self.tokenizer.sep_token_id))
        length = options.max_length - around
        if length < 1:
            raise ConfigError(f"data, max_length: got {options.max_length}, expected more than {around} special tokens")
        validation = Windows(valid, length, fixed=True)
        description += f"; {self.sizes(train, valid)} tokens, rows of {options.max_length}"
        # Windows do not overlap, and tokens that do not fill the last one are not measured.
        left_out = round(1 - min(1.0, len(validation) * length / max(1, len(valid))), 4)
        facts = {"context": options.max_length, "mask_share": options.mask_share, "left_out_share": left_out}
        return TaskData(self, Windows(train, length), validation, description, facts=facts)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return rows with tokens replaced as in BERT: 80 % by the mask, 10 % by a random token, 10 % unchanged."""
        tokenizer, options = self.tokenizer, self.options
        salt = np.concatenate([row["input_ids"] for row in rows])
        front, back = ([] if token is None else [token] for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
        filled: list[Row] = []
        for row in rows:
            seed = stable_seed(options.seed, row["input_ids"], *(() if row["fixed"] else (salt, self.epoch)))
            chance = np.random.default_rng(seed)
            ids, labels = row["input_ids"].copy(), np.full(len(row["input_ids"]), IGNORED)
            chosen = chance.random(len(ids)) < options.mask_share
            chosen[chance.integers(len(ids))] = True
            labels[chosen] = ids[chosen]
            how = chance.random(len(ids))
            ids[chosen & (how < 0.8)] = tokenizer.mask_token_id
            swapped = chosen & (how >= 0.9)
            ids[swapped] = chance.integers(len(tokenizer), size=int(swapped.sum()))
            answers = [*[IGNORED] * len(front), *labels.tolist(), *[IGNORED] * len(back)]
            filled.append({"input_ids": [*front, *ids.tolist(), *back], "labels": answers})
        return pad_with_labels(tokenizer, filled)

    def reduce(self, logits: Logits, labels: Tensor) -> Tensor:
        """Return the sum and the count of the labels' negative log-likelihoods [B, 2]."""
        nll, counted = token_losses(first_output(logits), labels)
        return torch.stack([nll.sum(dim=1), counted.sum(dim=1)], dim=1)


def _need_tokens(description: str, what: str, least: int, train: np.ndarray, valid: np.ndarray) -> None:
    for name, row in (("training", train), ("validation", valid)):
        if len(row) < least:
            raise DataError(f"{description}: got {len(row)} {name} tokens, expected {what}")


def tokens_of(
    table: Dataset, column: str, tokenizer: PreTrainedTokenizerBase, ends: bool = False
) -> tuple[np.ndarray, int]:
    """Tokenise a column; return its tokens [N] and its number of words, counted as in WikiText (line ends count).

    Args:
        table: one text per row.
        column: the column of texts.
        tokenizer: the tokenizer.
        ends: whether every text gets its special tokens and an end token; else texts are joined, with line breaks.
            Rows that are lines of a longer text are joined: those of a .txt file, and those that each end with their
            only line break, as in WikiText. So are all texts if the tokenizer has no end token.
    """
    parts, words = [np.zeros(0, dtype=np.int32)], 0
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    apart = ends and end is not None and table.builder_name != "text" and not all(map(_is_line, table[column]))
    for begin in range(0, len(table), TEXTS):
        texts = [text or "" for text in table[begin : begin + TEXTS][column]]
        lines = [text if text.endswith("\n") else text + "\n" for text in texts]
        words += sum(len(text.split()) + text.count("\n") for text in lines)
        read = [text for text in texts if text.strip()] if apart else ["".join(lines)]
        if not read:
            continue
        coded = tokenizer(read, add_special_tokens=apart, return_attention_mask=False, verbose=False)["input_ids"]
        parts += [np.asarray([*ids, end] if apart and ids[-1:] != [end] else ids, dtype=np.int32) for ids in coded]
    return np.concatenate(parts), words


def _is_line(text: str | None) -> bool:
    return not (text or "").strip() or str(text).find("\n") == len(str(text)) - 1


def strided(count: int, length: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a row of `count` tokens into windows of `length`, `stride` new tokens each.

    Returns:
        starts [W] and, for each window, the first place that it predicts [W]: every place from 1 on is predicted once.
    """
    starts, fresh = [0], [1]
    end = min(length, count)
    while end < count:
        fresh.append(end)
        end = min(end + stride, count)
        starts.append(max(0, end - length))
    return np.array(starts), np.array(fresh)


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihoods of labels [B, T] under logits [B, T, V], 0 if ignored, and a mask [B, T]."""
    nll = functional.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return nll, (labels != IGNORED).float()


class Copies(Windows):
    """Passages of one long row of tokens, each repeated once, after the start tokens."""

    def __getitem__(self, place: int) -> Row:
        start = int(self.starts[place])
        passage = self.tokens[start : start + self.length].astype(np.int64)
        labels = np.concatenate([np.full(len(self.front) + len(passage), IGNORED), passage])
        # The first token of the second reading cannot be predicted.
        labels[len(self.front) + len(passage)] = IGNORED
        return {"input_ids": _after(self.front, np.concatenate([passage, passage])), "labels": labels}


class Copying(LanguageType):
    """A passage appears twice in a row, and every token of the second reading could be looked up in the first.

    The probe depends on the length of the passage (half of `max_length`): softmax looks tokens up exactly, and a state
    of a fixed size has a limit. It uses the repeated sequences of Olsson et al. 2022, https://arxiv.org/abs/2209.11895,
    with passages of real text.
    """

    def prepare(self, given: Given) -> TaskData:
        """Read texts as one row of tokens per split, and cut it into passages of half of `max_length`.

        Raises:
            DataError: if there is no text column, or too little text for one passage.
            ConfigError: if `max_length` is below 4 tokens and the start tokens.
        """
        train, valid, description = self.read_tokens(given, readings=2)
        length = self.without_front(4, "each passage appears twice") // 2
        _need_tokens(description, f"a passage of {length}", length, train, valid)
        description += f"; passages of {length:,} tokens, each twice"
        facts = {"context": len(self.front) + 2 * length}
        rows, held = (Copies(tokens, length, front=self.front) for tokens in (train, valid))
        return TaskData(self, rows, held, description, facts=facts)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return rows of both readings [B, T]."""
        ids, labels = (torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("input_ids", "labels"))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def reduce(self, logits: Logits, labels: Tensor) -> Tensor:
        """Return the sums that the metric `copying` reads, [B, 5], from logits [B, T, V]."""
        scores: Tensor = first_output(logits)[:, len(self.front) :]
        labels = labels[:, len(self.front) :]
        half = labels.shape[1] // 2
        passage = labels[:, half + 1 :]
        again, counted = token_losses(scores[:, half:-1], passage)
        right = (scores[:, half:-1].argmax(dim=-1) == passage).float() * counted
        first, counted_first = token_losses(scores[:, : half - 1], passage)
        return torch.stack([values.sum(dim=1) for values in (right, again, first, counted, counted_first)], dim=1)

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return the sums of each row [N, 5]."""
        return (np.asarray(predictions),)


class Recall(TokenLabels, LanguageType):
    """Predict chosen tokens of a sequence from the tokens before them (associative recall and similar tasks).

    A raw table with a column of texts (tokens between blanks), and one that lists which tokens are answers, from 0.
    """

    most_tokens = None

    def prepare(self, given: Given) -> TaskData:
        """Read sequences; the loss is computed on the answers only.

        Raises:
            DataError: if a column is missing, a row holds something else, or a sequence does not fit the length.
        """
        splits = open_splits(self.task, given, self.options, raw=True)
        need_columns(splits, (self.task.columns[0], str(self.task.label)), "recall")
        train, validation = self._rows(splits.train), self._rows(splits.validation)
        facts = row_facts([len(row["input_ids"]) for row in validation], self.options)
        return TaskData(self, train, validation, splits.description, facts=facts)

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return the predicted token of each place and the true one [N, T - 1]."""
        return self.read(np.asarray(predictions)[:, :-1], np.asarray(labels)[:, 1:])

    def metrics(self, *units: np.ndarray) -> dict[str, float]:
        """Return the metrics over the answers."""
        guesses, answers = units
        asked = answers != IGNORED
        return super().metrics(guesses[asked], answers[asked])

    def _rows(self, table: Dataset) -> list[Row]:
        most, column, label = self.options.max_length, self.task.columns[0], str(self.task.label)
        rows = []
        for text, positions in zip(table[column], table[label], strict=True):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else []
            listed = positions if isinstance(positions, list) else [None]
            if not ids or not all(isinstance(place, int) and 0 <= place < len(ids) for place in listed):
                raise DataError(
                    f"recall: got {label} {str(positions)[:60]} for {str(text)[:60]!r} ({len(ids)} tokens), expected a "
                    f"text in column {column!r} and a list of its tokens' places, from 0; repair the row"
                )
            if len(ids) > most:
                raise DataError(f"recall: got a row of {len(ids)} tokens, expected at most {most}; raise max_length")
            labels = torch.full((len(ids),), IGNORED)
            labels[positions] = torch.tensor(ids)[positions]
            rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels.tolist()})
        return rows
