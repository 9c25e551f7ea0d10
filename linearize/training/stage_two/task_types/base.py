"""The interface of a type of task, and the base classes of types with one label per row."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from linearize.checkpoint.fingerprint import data_digest, rows_digest
from linearize.core.errors import ConfigError, DataError
from linearize.core.figures import check_finite
from linearize.data.encode import copy_tokenizer, longest_input
from linearize.data.records import Example
from linearize.training.alignment.objective import logits_loss
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.metrics import METRICS, PositionLoss
from linearize.training.stage_two.rows import IGNORED, Facts, Logits, Outputs, Predictions, Row, RowSet, pad_with_labels
from linearize.training.stage_two.splits import Given, View
from linearize.training.stage_two.tasks import Kind, Task, several_labels

MOST_CLASSES = 100_000
"""Labels must be below this number: a head with a million outputs would be a mistake."""


class TaskType(Kind):
    """One type of task: its rows, labels, predictions and metrics. An instance reads one data set.

    A subclass sets the class attributes of `Kind`, and implements `prepare` and `units`; all else has a default.

    Args:
        task: the task.
        processor: the model's tokenizer or image processor.
        options: options of the rows.

    Attributes:
        epoch: the pass over the training rows, from 0, which random changes of a row (masks, crops) depend on.
        absent: the classes of a trained head that the data has no row of; they are the last of the task's.
        unlabelled: the label of a row without one.
    """

    absent: tuple[str, ...] = ()
    unlabelled: float | None = IGNORED

    def __init__(self, task: Task, processor: Any = None, options: DataOptions | None = None) -> None:
        self.task, self.processor, self.options, self.epoch = task, processor, options or DataOptions(), 0

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy of the tokenizer, able to pad.

        Raises:
            ConfigError: if the processor is not a tokenizer, or cannot pad.
        """
        copied = copy_tokenizer(self.processor)
        # Token labels are also padded on the right, and positions count from the first token.
        copied.padding_side = "right"
        return copied

    def prepare(self, given: Given) -> TaskData:
        """Read a data set.

        Raises:
            DataError: if the data cannot be read or does not fit the task.
            ConfigError: if the tokenizer or the options do not fit the task.
        """
        raise NotImplementedError

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return a batch of rows: by default padded token fields and labels [B, T]."""
        return pad_with_labels(self.tokenizer, rows)

    def read_labels(self, view: View) -> None:
        """Find the names of the labels; numbers have no names."""

    def numbered(self, examples: Sequence[Example]) -> Sequence[object]:
        """Return the labels of examples as numbers."""
        raise NotImplementedError

    def label_tensor(self, labels: Sequence[Any]) -> Tensor:
        """Return the labels of rows, as `numbered` gives them, as one tensor [B, ...]."""
        return torch.tensor(labels)

    def fitted(self, view: View) -> TaskType:
        """Return what reads a data set whose training rows these are: by default this type of task."""
        return self

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the module that is measured: by default the model itself."""
        return model

    def reduce(self, logits: Logits, labels: Tensor) -> Logits:
        """Return the part of a batch's logits that is kept, on their device: by default all."""
        return logits

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return the arguments of the task's metrics, each with one entry per unit that is scored and resampled [N].

        Args:
            predictions: predictions of all rows, after `reduce`, as the trainer gathers them.
            labels: labels of all rows.
        """
        raise NotImplementedError

    def scored(self, labels: Predictions) -> str:
        """Return the hash of what is scored, row by row: the figures of two models are comparable if they agree on it.

        By default the labels. Labels that are tokens depend on the tokenizer and on the length of the rows.
        """
        known = np.asarray(labels)
        counts = known != IGNORED
        return data_digest([counts.reshape(len(known), -1).sum(axis=1), known[counts]])

    def metrics(self, *units: np.ndarray) -> dict[str, float]:
        """Return the task's metrics for some `units`."""
        return {name: value for metric in self.task.metrics for name, value in METRICS[metric](*units).items()}

    def compute_metrics(self, predictions: Predictions, labels: Predictions) -> dict[str, float]:
        """Return the task's metrics for all rows.

        Raises:
            DataError: if a prediction is NaN or infinite.
        """
        check_finite(f"task {self.task.name}, the model's outputs", np.asarray(first_output(predictions)))
        return self.metrics(*self.units(predictions, labels))

    def constant_answers(self, labels: Predictions) -> Iterable[np.ndarray]:
        """Return predictions that ignore the input; empty if the task has no such answer (perplexities, spans)."""
        return ()

    def chance_metrics(self, labels: Predictions) -> list[dict[str, float]]:
        """Return the metrics of every constant answer."""
        return [self.compute_metrics(answer, labels) for answer in self.constant_answers(labels)]

    def by_position(self, predictions: Predictions) -> tuple[PositionLoss, ...]:
        """Return the loss by position in the row; empty except for causal language models."""
        return ()

    @classmethod
    def label_loss(cls, outputs: Outputs, inputs: dict[str, Tensor]) -> Tensor:
        """Return the loss on a batch's labels: the model's own; for next tokens, their mean cross-entropy."""
        if not cls.next_token:
            loss: Tensor = outputs.loss
            return loss
        # Not every model shifts the labels (BART's decoder does not).
        labels = inputs["labels"][:, 1:].flatten()
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        total = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return total / (labels != IGNORED).sum().clamp(min=1)

    @classmethod
    def teacher_loss(
        cls, student: Outputs, teacher: Outputs, inputs: dict[str, Tensor], *, temperature: float = 1.0
    ) -> Tensor:
        """Return how far a model's outputs are from the teacher's on a batch.

        Args:
            student: the model's outputs.
            teacher: the teacher's outputs.
            inputs: the batch with its labels.
            temperature: temperature of both softmaxes.

        Returns:
            A scalar: the mean over rows, or over tokens if each has a prediction; for numbers, of squared errors.
        """
        mine, theirs = student.logits, teacher.logits
        if mine.ndim == 2:
            return logits_loss(mine, theirs, temperature=temperature, regression=cls.numeric)
        labels = inputs["labels"]
        if cls.next_token:
            mine, theirs, labels = mine[:, :-1], theirs[:, :-1], labels[:, 1:]
        return logits_loss(mine, theirs, temperature=temperature, mask=labels != IGNORED)

    def fit_length(self, most: int) -> None:
        """Lower the length of rows to `most` tokens if the user gave none (`auto_length`)."""
        if self.options.auto_length and most < self.options.max_length:
            self.options = dataclasses.replace(self.options, max_length=most)

    def fast_tokenizer(self, what: str, knows: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Raises:
            ConfigError: if it is slow, and so lacks the information that the task needs.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(f"{what}: got a slow tokenizer, expected a fast one, {knows}")
        return self.tokenizer


@dataclasses.dataclass(frozen=True)
class TaskData:
    """A task's data set as rows.

    Attributes:
        type: the task's type, with what it read: the class names, the tokenizer.
        train: rows to train on.
        validation: rows to measure on.
        description: one line.
        facts: facts needed to read the metrics, such as the stride of a perplexity.
        selection: rows held out of the training rows, to choose the state to keep; None if not yet held out.
        extra: rows without a label (`IGNORED`, or NaN for a number) for a teacher to label: new pairs of the texts.
        chunkable: whether the texts to measure on can be read as chunks (`DataOptions.chunks`).
    """

    type: TaskType
    train: RowSet
    validation: RowSet
    description: str
    facts: Facts = dataclasses.field(default_factory=dict)
    selection: RowSet | None = None
    extra: list[Row] | None = None
    chunkable: bool = False

    @property
    def task(self) -> Task:
        """The task, with the class names that were found."""
        return self.type.task

    @property
    def row_length(self) -> int:
        """Tokens of the longest row; 0 for images."""
        rows = (self.train, self.validation, self.selection, self.extra)
        return max(longest_input(some) for some in rows if some is not None)

    @property
    def collate(self) -> Callable[[list[Row]], dict[str, Tensor]]:
        """The function from rows to a batch of tensors."""
        return self.type.collate

    @property
    def num_labels(self) -> int | None:
        """How many outputs a head needs; None if it is the vocabulary or a span."""
        if not self.task.head.per_label:
            return None
        if self.type.numeric:
            return 1
        return None if self.task.labels is None else len(self.task.labels)

    def digest(self) -> str:
        """Return the hash of the rows, which tells whether a resumed run has the same ones."""
        parts = (self.train, self.validation, self.selection, self.extra)
        return data_digest([None if rows is None else rows_digest(rows) for rows in parts])


def first_output(outputs: Any) -> Any:
    """Return the logits, or predictions, without the outputs that may follow them."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


def is_named(labels: Sequence[str]) -> bool:
    """Tell whether labels have names, rather than numbers or transformers' `LABEL_0`."""
    return not all(label.removeprefix("LABEL_").isdigit() for label in labels)


SEPARATORS = "|;,"
"""Characters that may be between the labels of a row if they are one text."""


def separator_of(texts: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the character that separates the names of classes in texts that are not all such names; None if none does.

    A character that occurs in a name does not separate names.
    """
    others = [text for text in texts if text not in names]
    for mark in SEPARATORS if others and not any(mark in name for mark in SEPARATORS for name in names) else "":
        if all(part.strip() in names for text in others for part in text.split(mark)):
            return mark
    return None


def class_numbers(names: Sequence[str]) -> dict[object, int]:
    """Return the numbers of classes: by their names, and by the numbers themselves, of any type.

    If all names are numbers, such as 1 to 5 (stars), a number in the data is one of these names, not a place.
    """
    if all(name.removeprefix("-").isdecimal() for name in names):
        return {key: place for place, name in enumerate(names) for key in (name, int(name))}
    return {name: number for number, name in enumerate(names)} | {number: number for number in range(len(names))}


class ClassLabels(TaskType):
    """Rows that each have a class."""

    def fitted(self, view: View) -> TaskType:
        """Return the type that reads several labels per row if labels are lists, or texts that name several classes."""
        records, names = view.records, self.task.labels or ()
        if self.several or self.task.several_kind is None:
            return self
        if not records.lists and (not records.names or separator_of(records.names, names) is None):
            return self
        several = several_labels(self.task)
        reader: TaskType = several.type(several, self.processor, self.options)  # type: ignore[call-arg, assignment]
        return reader

    def read_labels(self, view: View) -> None:
        """Find the class names in the order of their numbers: the task's, the data's, or the numbers that occur.

        Raises:
            DataError: if the labels are neither names nor whole numbers from 0, or there is only one.
        """
        if self.task.labels is not None:
            return
        name, column, names = self.task.name, self.task.label, view.records.names
        labels: list[object] = list(names or ())
        limited = self.options.trains and self.options.limit is not None
        if names is not None and limited and self.task.modality == "text":
            # The first rows of a sorted table.
            labels = list(set(view.records.labels(view.rows.tolist())))
        if names is None:
            # The classes are those of the whole table: a rare one may occur only in the rows to measure on.
            every = view.records.labels(range(len(view.records.sizes)))
            numbers = [x for x in every if isinstance(x, int | float) and 0 <= x < MOST_CLASSES and x == int(x)]
            if odd := set(every).difference(numbers):
                raise DataError(
                    f"task {name}: got the label {next(x for x in every if x in odd)!r} in column {column!r}, "
                    f"expected class names or whole numbers from 0 below {MOST_CLASSES:,}; use task text-regression "
                    "for other numbers"
                )
            labels = list({every[row] for row in view.rows})
            names = tuple(str(number) for number in range(int(max(numbers)) + 1))
        if len(labels) < 2:
            raise DataError(
                f"task {name}: got only the class {labels[0]!r} in column {column!r}, expected at least two; add rows "
                "of others, or name all classes (--labels A,B)"
            )
        self.task = dataclasses.replace(self.task, labels=names)

    def numbered(self, examples: Sequence[Example]) -> Sequence[object]:
        """Return the class numbers of examples.

        Raises:
            DataError: if a label is not among the task's classes.
        """
        names = self.task.labels or ()
        known = class_numbers(names)
        labels = [example.label for example in examples]
        unknown = [label for label in labels if label not in known]
        if unknown:
            raise DataError(
                f"task {self.task.name}: got label {unknown[0]!r}, expected one of its {len(names)} classes: "
                f"{', '.join(names[:20])}"
            )
        return [known[label] for label in labels]

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return predicted classes and true ones; predictions are logits [N, C] or classes [N]."""
        guesses = np.asarray(first_output(predictions))
        return guesses if guesses.ndim == 1 else guesses.argmax(axis=-1), np.asarray(labels)

    def constant_answers(self, labels: Predictions) -> Iterable[np.ndarray]:
        """Return every class as the answer for all rows."""
        return (np.full(len(labels), number) for number in range(len(self.task.labels or ())))


class NumberLabels(TaskType):
    """Rows that each have a number."""

    numeric = True
    unlabelled = math.nan
    distance = "squared error to the teacher"

    def numbered(self, examples: Sequence[Example]) -> list[float]:
        """Return the numbers of examples.

        Raises:
            DataError: if a label is a text, or not finite.
        """
        name, column = self.task.name, self.task.label
        numbers = []
        for label in (example.label for example in examples):
            if not isinstance(label, int | float) or not math.isfinite(label):
                raise DataError(
                    f"task {name}: got {label!r} in label column {column!r}, expected finite numbers; repair it, name "
                    "another column, or use task text-classification for names"
                )
            numbers.append(float(label))
        return numbers

    def label_tensor(self, labels: Sequence[float]) -> Tensor:
        """Return numbers [B], fp32."""
        return torch.tensor(labels, dtype=torch.float32)

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return predicted numbers, from [N, 1], and true ones."""
        return np.asarray(first_output(predictions)).reshape(-1).astype(np.float64), np.asarray(labels, np.float64)

    def constant_answers(self, labels: Predictions) -> Iterable[np.ndarray]:
        """Return the mean as the answer for all rows."""
        yield np.full((len(labels), 1), float(np.mean(labels)))
