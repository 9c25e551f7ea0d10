"""What a task is: its type, which says how rows, labels and head go together, and its own columns and names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from linearize.heads import Head, Modality

Labels = Literal["class", "number", "tags", "span", "tokens", "none"]
"""What a row's label is: a class, a number, a tag per word, a span of the text, tokens of the row, or nothing."""


@dataclass(frozen=True)
class TaskType:
    """One type of task.

    Attributes:
        name: its name.
        head: the head that a model needs for it.
        labels: what a row's label is.
        module: the module whose `prepare(task, given, processor, options)` makes rows of a data set, with `Task`,
            `linearize.finetune.tables.Given` and `linearize.finetune.prepared.DataOptions`.
        columns: how many columns it reads at most.
        label_fields: the fields of a batch that hold the labels.
        next_token: whether the prediction at a position is of the next token.
        unlabelled: whether rows without a label may stand beside the task's own, for a teacher to label.
    """

    name: str
    head: Head
    labels: Labels
    module: str
    columns: int = 1
    label_fields: tuple[str, ...] = ("labels",)
    next_token: bool = False
    unlabelled: bool = False


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as users write it.
        type: one of `linearize.finetune.tasks.TASK_TYPES`.
        summary: one line.
        dataset: Hub data set, `name` or `name:config`; None where the user must say.
        folders: names of the task's folder inside a folder of data sets (`data=PATH`), any of them.
        columns: of the text or texts, or of the image; empty: found by themselves.
        label: column of the label; None where rows have none, as those of language models.
        labels: class names in the order of their numbers; None: read from the data.
        metrics: names in `linearize.finetune.metrics`, all computed.
        score: metrics whose mean is the task's score, as GLUE has it.
        lower_is_better: whether a smaller score is better.
        percent: whether papers multiply the score by 100.
        train: name of the split to train on.
        validation: names of the split to measure on, the first that is there.
        exact_validation: whether the user named that split, so that no other rows may take its place.
    """

    name: str
    type: TaskType
    summary: str
    dataset: str | None = None
    folders: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    label: str | None = "label"
    labels: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ("accuracy",)
    score: tuple[str, ...] = ("accuracy",)
    lower_is_better: bool = False
    percent: bool = True
    train: str = "train"
    validation: tuple[str, ...] = ("validation", "test")
    exact_validation: bool = False

    @property
    def kind(self) -> str:
        """Name of its type."""
        return self.type.name

    @property
    def head(self) -> Head:
        """The head that a model needs for it."""
        return self.type.head

    @property
    def modality(self) -> Modality:
        """ "text" or "image"."""
        return self.head.modality
