"""What a task is: its type, which says how rows, labels and head go together, and its own columns and names."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from linearize.core.heads import Head, Modality
    from linearize.training.stage_two.task_types.base import TaskType


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as users write it.
        kind: module and class of its type, `module:Class`; imported when it is needed.
        summary: one line.
        dataset: Hub data set, `name` or `name:config`; None: the user has to name one.
        folders: possible names of the task's folder in a folder of data sets (`data=PATH`).
        columns: of the text or texts, or of the image; empty: found by their content.
        label: column of the label; None if rows have none, as those of language models.
        labels: class names in the order of their numbers; None: read from the data.
        metrics: names in `linearize.training.stage_two.metrics.METRICS`; all are computed.
        score: metrics whose mean is the task's score, as in GLUE; by default all `metrics`.
        lower_is_better: whether a smaller score is better.
        percent: whether papers multiply the score by 100.
        train: name of the split to train on.
        validation: names of the split to measure on; the first that exists is used.
        exact_validation: whether the user named that split, so that no other rows may replace it.
    """

    name: str
    kind: str
    summary: str
    dataset: str | None = None
    folders: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    label: str | None = "label"
    labels: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ("accuracy",)
    score: tuple[str, ...] = ()
    lower_is_better: bool = False
    percent: bool = True
    train: str = "train"
    validation: tuple[str, ...] = ("validation", "test")
    exact_validation: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "score", self.score or self.metrics)

    @property
    def type(self) -> type[TaskType]:
        """The class that reads data of its type."""
        module, _, name = self.kind.partition(":")
        found: type[TaskType] = getattr(importlib.import_module(module), name)
        return found

    @property
    def head(self) -> Head:
        """The head that a model needs for it."""
        return self.type.head

    @property
    def modality(self) -> Modality:
        """ "text" or "image"."""
        return self.head.modality
