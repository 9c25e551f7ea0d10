"""Texts and images that each have any number of classes, also none."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from linearize.core.errors import DataError
from linearize.data.records import Example, Label
from linearize.training.alignment.objective import logits_loss
from linearize.training.alignment.pair import label_choices
from linearize.training.stage_two.rows import Outputs, Predictions
from linearize.training.stage_two.splits import View
from linearize.training.stage_two.task_types.base import (
    MOST_CLASSES,
    ClassLabels,
    class_numbers,
    first_output,
    is_named,
    separator_of,
)
from linearize.training.stage_two.task_types.images import ImageClassification
from linearize.training.stage_two.task_types.text import TextRows


class MultiLabel(ClassLabels):
    """Rows that each have any number of classes: names, numbers, or a 0 or 1 for each class.

    Attributes:
        vectors: whether each row has a 0 or 1 for each class.
        separator: the character between the classes of a row if they are one text; None if they are lists.
    """

    several = True
    unlabelled = None
    vectors = False
    separator: str | None = None

    def read_labels(self, view: View) -> None:
        """Find the names of the classes, and how rows give them.

        Raises:
            DataError: if lists of 0 and 1 may be class numbers as well as a number for each class, or a number is no
                class.
        """
        task, records = self.task, view.records
        every = records.labels(range(len(records.sizes)))
        names, known = task.labels, task.head_labels
        if names is None and records.names:
            names = known if is_named(known) else records.names
        if names is None:
            names = tuple(map(str, range(len(known) or self._count(every))))
        self.task = dataclasses.replace(task, labels=names)
        if records.names is not None:
            self.separator = None if records.lists else separator_of(records.names, names)
            return
        lists = [label for label in every if isinstance(label, tuple)]
        self.vectors = bool(lists) and all(len(x) == len(names) and set(x) <= {0, 1} for x in lists)
        if self.vectors and not any(isinstance(value, bool) for value in lists[0]):
            numbers = class_numbers(names)
            if all(len(set(x)) == len(x) and numbers.keys() >= set(x) for x in lists):
                raise DataError(
                    f"task {task.name}: got lists such as {list(lists[0])} in column {task.label!r}, which may be "
                    "class numbers or a 0 or 1 for each class, expected lists of class names, or of true and false"
                )

    def _count(self, every: Sequence[Label]) -> int:
        """Return the number of classes of rows that give numbers, or a 0 or 1 for each class."""
        rows = [label if isinstance(label, tuple) else (label,) for label in every]
        values = {value for row in rows for value in row}
        lengths = {len(row) for row in rows}
        if len(lengths) == 1 and values <= {0, 1} and max(lengths) > 1:
            return max(lengths)
        numbers = [x for x in values if isinstance(x, int | float) and 0 <= x < MOST_CLASSES and x == int(x)]
        if len(numbers) < max(1, len(values)):
            odd = next(iter(values.difference(numbers)), "no class at all")
            raise DataError(
                f"task {self.task.name}: got {odd!r} in column {self.task.label!r}, expected lists of class names, of "
                f"whole numbers from 0 below {MOST_CLASSES:,}, or of a 0 or 1 for each class"
            )
        return int(max(numbers)) + 1

    def numbered(self, examples: Sequence[Example]) -> list[tuple[int, ...]]:
        """Return the numbers of the classes of examples, in ascending order.

        Raises:
            DataError: if a label is not among the task's classes, or a row does not fit the others.
        """
        names = self.task.labels or ()
        same = Counter(name.casefold() for name in names)
        folded = {name.casefold(): n for n, name in enumerate(names) if same[name.casefold()] == 1}
        known = folded | class_numbers(names)
        return [self._numbers(example.label, known) for example in examples]

    def _numbers(self, label: Label, known: Mapping[object, int]) -> tuple[int, ...]:
        names = self.task.labels or ()
        values = label if isinstance(label, tuple) else (label,)
        if self.vectors and isinstance(label, tuple):
            if len(values) == len(names) and set(values) <= {0, 1}:
                return tuple(number for number, value in enumerate(values) if value)
            raise self._refused(list(label), f"{len(names)} numbers, each 0 or 1, as in the other rows")
        if self.separator is not None and isinstance(label, str) and label not in known:
            values = tuple(part.strip() for part in label.split(self.separator))
        found = []
        for value in values:
            number = known.get(value.casefold() if isinstance(value, str) and value not in known else value)
            if number is None or isinstance(value, bool):
                raise self._refused(value, f"lists of its {len(names)} classes: {', '.join(names[:20])}")
            found.append(number)
        if len(set(found)) < len(found):
            raise self._refused(list(values), "each class once; or as many numbers as classes, each 0 or 1")
        return tuple(sorted(found))

    def _refused(self, got: object, expected: str) -> DataError:
        return DataError(f"task {self.task.name}: got {got!r} in column {self.task.label!r}, expected {expected}")

    def label_tensor(self, labels: Sequence[tuple[int, ...] | None]) -> Tensor:
        """Return for each row and class whether the row has it: fp32 [B, C], NaN for a row without labels."""
        known = torch.zeros(len(labels), len(self.task.labels or ()))
        for row, numbers in enumerate(labels):
            known[row, slice(None) if numbers is None else list(numbers)] = torch.nan if numbers is None else 1.0
        return known

    @classmethod
    def label_loss(cls, outputs: Outputs, inputs: dict[str, Tensor]) -> Tensor:
        """Return the mean binary cross-entropy over the labels of rows that have them; 0 if no row has any."""
        logits, labels = outputs.logits.float(), inputs["labels"]
        known = ~labels.isnan().any(dim=1)
        if not known.any():
            return logits.sum() * 0.0
        return functional.binary_cross_entropy_with_logits(logits[known], labels[known])

    @classmethod
    def teacher_loss(
        cls, student: Outputs, teacher: Outputs, inputs: dict[str, Tensor], *, temperature: float = 1.0
    ) -> Tensor:
        """Return the divergence from the teacher, a mean over rows and labels: each label is a separate choice."""
        mine, theirs = label_choices(student.logits), label_choices(teacher.logits)
        return logits_loss(mine, theirs, temperature=temperature)

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return predicted and true labels, bool [N, C]; a probability above 0.5 predicts a label."""
        return np.asarray(first_output(predictions)) > 0, np.asarray(labels) > 0

    def constant_answers(self, labels: Predictions) -> Iterable[np.ndarray]:
        """Return as the answer for all rows: the most frequent labels, as many as there may be, or most frequent set.

        Of all answers that ignore the input, one of these has the best micro F1, macro F1 and subset accuracy.
        """
        true = np.asarray(labels) > 0
        ranks = np.argsort(np.argsort(-true.sum(axis=0), kind="stable"), kind="stable")
        sets, counts = np.unique(true, axis=0, return_counts=True)
        for answer in [ranks < count for count in range(len(ranks) + 1)] + [sets[counts.argmax()]]:
            yield np.broadcast_to(np.where(answer, 1.0, -1.0), true.shape)


class MultiLabelText(MultiLabel, TextRows):
    """Texts, or pairs of texts, each with any number of classes."""


class MultiLabelImages(MultiLabel, ImageClassification):
    """Images that each have any number of classes."""
