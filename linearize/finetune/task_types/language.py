"""Language models: next token with windows and a stated stride, and masked tokens.

All texts of a split are joined as they stand, a line break after each. A causal model's windows overlap by at least
one token, so that every token but the very first is predicted once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from linearize.data.columns import column_kinds, find_column
from linearize.errors import ConfigError, DataError
from linearize.finetune.metrics import metric
from linearize.finetune.metrics.by_position import PositionLoss, losses_by_position, range_sums
from linearize.finetune.prepared import (
    IGNORED,
    DataOptions,
    Logits,
    Predictions,
    Row,
    RowSet,
    TaskData,
    copy_tokenizer,
    stable_seed,
)
from linearize.finetune.tables import Given, need_columns, open_splits
from linearize.finetune.task import Task

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

TEXTS = 1_000


class Windows(RowSet):
    """Windows over one long row of tokens.

    Args:
        tokens: [N] int32.
        starts: [W] where windows begin.
        length: tokens per window.
        fresh: [W] first place of the whole row whose token a window predicts; None: all of the window.
        fixed: whether masks shall be the same each time.
    """

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, length: int, fresh: np.ndarray | None = None, fixed: bool = False
    ) -> None:
        self.tokens, self.starts, self.length, self.fresh, self.fixed = tokens, starts, length, fresh, fixed

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, place: int) -> Row:
        start = int(self.starts[place])
        ids = self.tokens[start : start + self.length].astype(np.int64)
        labels = ids.copy()
        if self.fresh is not None:
            labels[: int(self.fresh[place]) - start] = IGNORED
        return {"input_ids": ids, "labels": labels, "fixed": self.fixed}


def prepare(task: Task, given: Given, processor: PreTrainedTokenizerBase, options: DataOptions) -> TaskData:
    """Read texts as one row of tokens per split.

    Raises:
        DataError: if there is no text column or too little text for one window.
        ConfigError: if the stride does not fit, or a masked model's tokenizer has no mask token.
    """
    tokenizer = copy_tokenizer(processor)
    train, valid, words, description = read_tokens(task, given, tokenizer, options)
    if options.auto_length:
        options = dataclasses.replace(options, max_length=max(2, min(options.max_length, len(valid))))
    length = options.max_length
    for name, row in (("training", train), ("validation", valid)):
        if len(row) < min(length, 2):
            raise DataError(f"{description}: got {len(row)} {name} tokens, expected a window of {length}")
    if not task.type.next_token:
        return _masked(task, train, valid, tokenizer, options, description)
    return _causal(task, train, valid, words, options, description)


def read_tokens(
    task: Task, given: Given, tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> tuple[np.ndarray, np.ndarray, int, str]:
    """Read the texts to train and to measure on, each as one row of tokens [N], the words of the latter, and one line.

    Raises:
        DataError: if there is no text column.
    """
    splits = open_splits(task, given, limit=options.limit, seed=options.seed, raw=True, most=options.validation_limit)
    column = find_column(column_kinds(splits.train, "text"), task.columns[0] if task.columns else None, "text", "text")
    for table in (splits.train, splits.validation):
        need_columns(table, [column], "text", kind="text")
    train, _ = tokens_of(splits.train, column, tokenizer)
    valid, words = tokens_of(splits.validation, column, tokenizer)
    return train, valid, words, splits.description


def tokens_of(table: Dataset, column: str, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, int]:
    """Tokenise a column -> tokens [N], and its words as WikiText counts them (line ends count)."""
    parts, words = [], 0
    for begin in range(0, len(table), TEXTS):
        texts = [text or "" for text in table[begin : begin + TEXTS][column]]
        lines = [text if text.endswith("\n") else text + "\n" for text in texts]
        words += sum(len(text.split()) + text.count("\n") for text in lines)
        ids = tokenizer("".join(lines), add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        parts.append(np.asarray(ids, dtype=np.int32))
    return np.concatenate(parts), words


def starts_of(count: int, length: int) -> np.ndarray:
    """Return the beginnings of the full windows [W] side by side in a row of tokens; one short one if none is full."""
    return np.arange(0, max(1, count - length + 1), length)


def strided(count: int, length: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a row of `count` tokens into windows of `length`, `stride` new tokens each.

    Returns:
        starts [W] and, of each window, the first place that it predicts [W]: every place from 1 on is predicted once.
    """
    starts, fresh = [0], [1]
    end = min(length, count)
    while end < count:
        fresh.append(end)
        end = min(end + stride, count)
        starts.append(max(0, end - length))
    return np.array(starts), np.array(fresh)


def _causal(
    task: Task, train: np.ndarray, valid: np.ndarray, words: int, options: DataOptions, description: str
) -> TaskData:
    length = options.max_length
    stride = options.stride or length - 1
    if stride >= length:
        raise ConfigError(f"data, stride: got {stride}, expected less than max_length ({length}), to overlap")
    starts, fresh = strided(len(valid), length, stride)

    def compute_metrics(predictions: Predictions, labels: Predictions) -> dict[str, float]:
        nats = float(np.asarray(predictions, dtype=np.float64)[:, 0].sum())
        by_word = metric("perplexity").compute(predictions=[nats], references=[float(words)])
        return perplexity_of_sums(predictions, labels) | {"word_perplexity": by_word["perplexity"]}

    return TaskData(
        task,
        Windows(train, starts_of(len(train), length), length),
        Windows(valid, starts, length, fresh),
        collate_windows,
        compute_metrics,
        f"{description}; {len(train):,} and {len(valid):,} tokens, windows of {length}, stride {stride}",
        reduce=causal_sums,
        by_position=causal_by_position,
        facts={"context": length, "stride": stride, "words": words},
    )


def collate_windows(rows: list[Row]) -> dict[str, Tensor]:
    """Stack windows; a shorter last one is filled up with labels that do not count."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for place, row in enumerate(rows):
        ids[place, : len(row["input_ids"])] = torch.from_numpy(row["input_ids"])
        labels[place, : len(row["labels"])] = torch.from_numpy(row["labels"])
    # Filling stands behind the text, where a causal model does not look; so no padding mask is needed.
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def causal_sums(logits: Logits, labels: Tensor) -> Tensor:
    """Reduce logits [B, T, V] to sums of the negative log-likelihoods of labels [B, T].

    Returns:
        [B, 2 + 3 R]: their sum and their count, then those by position (`by_position.range_sums`).
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    nll, counted = token_losses(logits[:, :-1], labels[:, 1:])
    return torch.cat([torch.stack([nll.sum(dim=1), counted.sum(dim=1)], dim=1), range_sums(nll, counted)], dim=1)


def causal_by_position(predictions: Predictions) -> tuple[PositionLoss, ...]:
    """Return the loss by position from rows of `causal_sums`."""
    return losses_by_position(np.asarray(predictions)[:, 2:])


def perplexity_of_sums(predictions: Predictions, labels: Predictions) -> dict[str, float]:
    """Return the perplexity of rows; of each, the sum and the count of its tokens' losses come first."""
    sums = np.asarray(predictions, dtype=np.float64)
    return metric("perplexity").compute(predictions=sums[:, 0], references=sums[:, 1])


def token_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the negative log-likelihoods of labels [B, T] under logits [B, T, V], and count them -> [B, 2]."""
    nll, counted = token_losses(logits, labels)
    return torch.stack([nll.sum(dim=1), counted.sum(dim=1)], dim=1)


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihoods of labels [B, T] under logits [B, T, V], 0 where ignored, and what counts."""
    nll = functional.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return nll, (labels != IGNORED).float()


def _masked(
    task: Task,
    train: np.ndarray,
    valid: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    description: str,
) -> TaskData:
    if tokenizer.mask_token_id is None:
        raise ConfigError("masked language model: got a tokenizer without a mask token; use task causal-lm")
    around = sum(token is not None for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    length = options.max_length - around
    if length < 1:
        raise ConfigError(f"data, max_length: got {options.max_length}, expected more than the {around} special tokens")
    held = Windows(valid, starts_of(len(valid), length), length, fixed=True)

    def collate(rows: list[Row]) -> dict[str, Tensor]:
        return _mask(rows, tokenizer, options)

    return TaskData(
        task,
        Windows(train, starts_of(len(train), length), length),
        held,
        collate,
        perplexity_of_sums,
        f"{description}; {len(train):,} and {len(valid):,} tokens, rows of {options.max_length}",
        reduce=lambda logits, labels: token_sums(logits[0] if isinstance(logits, tuple) else logits, labels),
        facts={
            "context": options.max_length,
            "mask_share": options.mask_share,
            # Windows lie side by side, and what does not fill the last one is not measured.
            "left_out_share": round(1 - min(1.0, len(held) * length / max(1, len(valid))), 4),
        },
    )


def _mask(rows: list[Row], tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> dict[str, Tensor]:
    """Choose tokens and replace them as BERT does: 80 % by the mask, 10 % by a random token, 10 % not at all."""
    salt = np.concatenate([row["input_ids"] for row in rows])
    made = []
    for row in rows:
        seed = stable_seed(options.seed, row["input_ids"], *(() if row["fixed"] else (salt,)))
        chance = np.random.default_rng(seed)
        ids, labels = row["input_ids"].copy(), np.full(len(row["input_ids"]), IGNORED)
        chosen = chance.random(len(ids)) < options.mask_share
        chosen[chance.integers(len(ids))] = True
        labels[chosen] = ids[chosen]
        how = chance.random(len(ids))
        ids[chosen & (how < 0.8)] = tokenizer.mask_token_id
        swapped = chosen & (how >= 0.9)
        ids[swapped] = chance.integers(len(tokenizer), size=int(swapped.sum()))
        made.append((ids, labels))
    return _framed(made, tokenizer)


def _framed(made: list[tuple[np.ndarray, np.ndarray]], tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """Put the special tokens around rows and pad them."""
    front = [tokenizer.cls_token_id] if tokenizer.cls_token_id is not None else []
    back = [tokenizer.sep_token_id] if tokenizer.sep_token_id is not None else []
    ids = [[*front, *row.tolist(), *back] for row, _ in made]
    labels = [[IGNORED] * len(front) + row.tolist() + [IGNORED] * len(back) for _, row in made]
    padded = dict(tokenizer.pad({"input_ids": ids}, return_tensors="pt", verbose=False))
    width = padded["input_ids"].shape[1]
    return {**padded, "labels": torch.tensor([row + [IGNORED] * (width - len(row)) for row in labels])}
