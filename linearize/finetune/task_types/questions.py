"""Question answering by spans, SQuAD's columns: long texts become several overlapping rows."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from linearize.errors import ConfigError, DataError
from linearize.finetune.metrics import metric
from linearize.finetune.metrics.spans import agreement
from linearize.finetune.prepared import (
    DataOptions,
    Predictions,
    Row,
    Rows,
    TaskData,
    copy_tokenizer,
    row_facts,
    tokenise,
)
from linearize.finetune.tables import Given, need_columns, open_splits
from linearize.finetune.task import Task

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import BatchEncoding, PreTrainedTokenizerBase

BEST, LONGEST = 20, 30
"""Starts and ends that are tried per row, and the longest answer in tokens, as in the usual SQuAD scripts."""


def prepare(task: Task, given: Given, processor: PreTrainedTokenizerBase, options: DataOptions) -> TaskData:
    """Read questions, texts and answers.

    Raises:
        DataError: if a column is missing or answers are of another form than SQuAD's.
        ConfigError: if the tokenizer does not know its characters.
    """
    tokenizer = copy_tokenizer(processor)
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("question answering: got a slow tokenizer, expected a fast one that knows its characters")
    splits = open_splits(task, given, limit=options.limit, seed=options.seed, raw=True, most=options.validation_limit)
    held = splits.validation
    for table in (held, splits.train):
        _check_texts(task, table)
    lengths = _whole_lengths(task, held, tokenizer)
    if options.auto_length:
        # Rows are padded to this length.
        options = dataclasses.replace(options, max_length=min(options.max_length, max(lengths, default=2)))
    validation = _rows(task, held, tokenizer, options)
    texts, answers = held[task.columns[1]], [entry["text"] for entry in held[str(task.label)]]
    spans = metric("spans")

    def guessed(predictions: Predictions) -> list[str]:
        start, end = (np.asarray(part) for part in predictions[:2])
        return best_answers(start, end, validation.rows, texts, any(not known for known in answers))

    def compute_metrics(predictions: Predictions, labels: Predictions) -> dict[str, float]:
        return spans.compute(predictions=guessed(predictions), references=[list(known) for known in answers])

    def by_question(predictions: Predictions, labels: Predictions) -> dict[str, np.ndarray]:
        found = [agreement(guess, known) for guess, known in zip(guessed(predictions), answers, strict=True)]
        return {name: np.array([one[name] for one in found]) for name in found[0]}

    facts = row_facts(lengths, options)
    # Nothing is cut: a longer text becomes several rows, and its best answer over all of them counts.
    facts = {"questions": facts["rows"], **facts, "rows": len(validation), "cut_share": 0.0}
    facts["split_share"] = round(float(np.mean(np.array(lengths) > options.max_length)), 4)
    return TaskData(
        task,
        _rows(task, splits.train, tokenizer, options),
        validation,
        _collate,
        compute_metrics,
        splits.description,
        facts=facts,
        by_unit=by_question,
    )


def _whole_lengths(task: Task, table: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of every question with its whole text."""
    rows = tokenise(tokenizer, table[task.columns[0]], table[task.columns[1]], None)
    return [len(row["input_ids"]) for row in rows]


def _check_texts(task: Task, table: Dataset) -> None:
    """Refuse a table without the columns, or with a row that lacks one of the texts.

    Raises:
        DataError: naming it.
    """
    question, context = task.columns
    need_columns(table, (question, context, str(task.label)), "question answering")
    for owner, texts in enumerate(zip(table[question], table[context], strict=True)):
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"question answering: got row {owner} without {question} or {context}, expected both texts")


def _collate(rows: list[Row]) -> dict[str, Tensor]:
    names = ("input_ids", "attention_mask", "token_type_ids", "start_positions", "end_positions")
    return {name: torch.tensor([row[name] for row in rows]) for name in names if name in rows[0]}


def _rows(task: Task, table: Dataset, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> Rows:
    question, context = task.columns
    rows: list[Row] = []
    columns = (table[question], table[context], table[str(task.label)])
    for owner, (asked, text, answer) in enumerate(zip(*columns, strict=True)):
        if not isinstance(answer, dict) or not {"text", "answer_start"} <= answer.keys():
            raise DataError(f"question answering: got {task.label} {answer!r}, expected text and answer_start")
        coded = tokenizer(
            asked,
            text,
            truncation="only_second",
            max_length=options.max_length,
            stride=min(options.stride or 128, options.max_length // 4),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length",
        )
        for piece in range(len(coded["input_ids"])):
            rows.append(_row(coded, piece, owner, answer))
    return Rows(rows)


def _row(coded: BatchEncoding, piece: int, owner: int, answer: dict[str, Any]) -> Row:
    """Make one row; an answer that is not wholly inside is answered by the first token."""
    inside = [part == 1 for part in coded.sequence_ids(piece)]
    offsets = [tuple(pair) if keep else None for pair, keep in zip(coded["offset_mapping"][piece], inside, strict=True)]
    start = end = 0
    if answer["text"]:
        first = answer["answer_start"][0]
        last = first + len(answer["text"][0])
        begins = [i for i, pair in enumerate(offsets) if pair and pair[0] <= first < pair[1]]
        ends = [i for i, pair in enumerate(offsets) if pair and pair[0] < last <= pair[1]]
        if begins and ends:
            start, end = begins[0], ends[-1]
    names = ("input_ids", "attention_mask", "token_type_ids")
    fields = {name: coded[name][piece] for name in names if name in coded}
    return {**fields, "start_positions": start, "end_positions": end, "owner": owner, "offsets": offsets}


def best_answers(
    start: np.ndarray, end: np.ndarray, rows: Sequence[Row], texts: Sequence[str], empty: bool
) -> list[str]:
    """Choose the best span of each text over its rows: start and end logits [R, T] -> one text per question.

    `empty` says whether "no answer" is one of the choices, as in SQuAD 2.
    """
    best: dict[int, tuple[float, str]] = defaultdict(lambda: (-np.inf, ""))
    for place, row in enumerate(rows):
        nothing = float(start[place, 0] + end[place, 0])
        if empty and nothing > best[row["owner"]][0]:
            best[row["owner"]] = (nothing, "")
        for first in np.argsort(-start[place])[:BEST]:
            for last in np.argsort(-end[place])[:BEST]:
                pair = row["offsets"][first], row["offsets"][last]
                score = float(start[place, first] + end[place, last])
                if None in pair or not 0 <= last - first < LONGEST or score <= best[row["owner"]][0]:
                    continue
                best[row["owner"]] = (score, texts[row["owner"]][pair[0][0] : pair[1][1]])
    return [best[owner][1] for owner in range(len(texts))]
