"""Classification of tokens: a tag for every word, learned and scored on each word's first piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from linearize.core.errors import DataError
from linearize.core.heads import HEADS
from linearize.training.stage_two.metrics import entity_counts
from linearize.training.stage_two.prepare import (
    IGNORED,
    TOKEN_FIELDS,
    Given,
    Logits,
    Predictions,
    Row,
    TaskData,
    need_columns,
    pad_with_labels,
    row_facts,
)
from linearize.training.stage_two.task_types.base import MOST_CLASSES, TaskType, first_output

if TYPE_CHECKING:
    from datasets import Dataset


class TokenClassification(TaskType):
    """Words with a tag each."""

    head = HEADS["token-classification"]

    def prepare(self, given: Given) -> TaskData:
        """Read words and tags.

        Raises:
            DataError: if a column is missing or does not hold lists, or a tag is not among the task's.
            ConfigError: if the tokenizer cannot tell which word a token belongs to.
        """
        self.fast_tokenizer("token classification", "which knows its words")
        splits = self.open_splits(given, raw=True)
        words, label = self.task.columns[0], str(self.task.label)
        need_columns(splits.train, (words, label), "token classification")
        if self.task.labels is None:
            self.task = dataclasses.replace(self.task, labels=self._tag_names(splits.train, label))
        train, validation = self._rows(splits.train), self._rows(splits.validation)
        lengths = self._whole_lengths(splits.validation[words], validation)
        facts = row_facts(lengths, self.options)
        return TaskData(self, train, validation, splits.description, facts=facts)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return padded token fields and labels [B, T]."""
        return pad_with_labels(self.tokenizer, rows)

    def reduce(self, logits: Logits, labels: Tensor) -> Tensor:
        """Return the predicted tags [B, T] of logits [B, T, C]."""
        tags: Tensor = first_output(logits).argmax(dim=-1)
        return tags

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return each row's `entity_counts` [N, 5], from tags and labels [N, T]."""
        names = self.task.labels or ()
        counts = []
        for guess, answer in zip(np.asarray(predictions), np.asarray(labels), strict=True):
            counts.append(entity_counts(*([names[i] for i in side[answer != IGNORED]] for side in (guess, answer))))
        return (np.array(counts),)

    def constant_answers(self, labels: Predictions) -> Iterable[np.ndarray]:
        """Return the most frequent tag as the answer for all words."""
        return most_frequent(labels)

    def _whole_lengths(self, texts: Sequence[Sequence[str]], rows: Sequence[Row]) -> list[int]:
        """Return the tokens of every row of words, uncut: only full rows can have been cut."""
        lengths = [len(row["input_ids"]) for row in rows]
        for place, length in enumerate(lengths):
            if length >= self.options.max_length:
                coded = self.tokenizer(list(texts[place]), is_split_into_words=True, verbose=False)
                lengths[place] = len(coded["input_ids"])
        return lengths

    def _tag_names(self, table: Dataset, label: str) -> tuple[str, ...]:
        """Return the tags in the order of their numbers: the column's, or those that occur."""
        from datasets import ClassLabel

        feature = getattr(table.features[label], "feature", None)
        if isinstance(feature, ClassLabel):
            return tuple(feature.names)
        found = {tag for tags in table[label] for tag in (tags if isinstance(tags, list) else [tags])}
        if found and all(isinstance(tag, str) for tag in found):
            return tuple(sorted(found))
        wrong = [tag for tag in found if not isinstance(tag, int) or not 0 <= tag < MOST_CLASSES]
        if wrong or not found:
            raise DataError(
                f"task {self.task.name}: got {f'tag {wrong[0]!r}' if wrong else 'no tags'} in column {label!r}, "
                "expected a list of names or of whole numbers from 0 in every row; repair the rows"
            )
        return tuple(str(number) for number in range(int(max(found)) + 1))

    def _rows(self, table: Dataset) -> list[Row]:
        words, label = self.task.columns[0], str(self.task.label)
        names = self.task.labels or ()
        places: dict[str | int, int] = {name: number for number, name in enumerate(names)}
        places |= {number: number for number in range(len(names))}
        rows = []
        for texts, tags in zip(table[words], table[label], strict=True):
            if not isinstance(tags, list) or not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
                raise DataError(
                    f"task {self.task.name}: got {str(texts)[:60]!r} with {str(tags)[:60]!r}, expected a list of words "
                    f"in column {words!r} and a list of tags in {label!r}; repair the row"
                )
            unknown = [tag for tag in tags if tag not in places]
            if unknown or len(tags) != len(texts):
                problem = f"tag {unknown[0]!r}" if unknown else f"{len(tags)} tags for {len(texts)} words"
                raise DataError(
                    f"task {self.task.name}: got {problem}, expected one of {', '.join(names)} for every word"
                )
            coded = self.tokenizer(
                list(texts), is_split_into_words=True, truncation=True, max_length=self.options.max_length
            )
            owners = coded.word_ids()
            labels = [
                IGNORED if owner is None or owner == before else places[tags[owner]]
                for owner, before in zip(owners, [None, *owners], strict=False)
            ]
            rows.append({**{name: coded[name] for name in TOKEN_FIELDS if name in coded}, "labels": labels})
        return rows


def most_frequent(labels: Predictions) -> Iterable[np.ndarray]:
    """Return one answer: the most frequent label of tokens, everywhere; none if no token has a label."""
    labels = np.asarray(labels)
    known = labels[labels != IGNORED]
    return (np.full_like(labels, np.bincount(known).argmax()),) if len(known) else ()
