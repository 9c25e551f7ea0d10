"""Tasks that a model can be tuned for and measured on, as data.

GLUE's tasks have their own names. For any other data set, use the task of its type and name other columns
(`task("text-classification", columns=("review",))`).

A new task is one entry of `TASKS`. A new type of task is also a subclass of `task_types.base.TaskType`, which the entry
names, and a new metric a function in `metrics.METRICS`.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from linearize.core.errors import ConfigError, repeated, unknown_name
from linearize.core.heads import HEADS
from linearize.core.registry import Values

if TYPE_CHECKING:
    from linearize.core.heads import Head, Modality

TYPES = "linearize.training.stage_two.task_types"
Interval = tuple[float, float]
"""The ends of a score's interval."""


class Kind:
    """What every type of task says about itself.

    Attributes:
        head: the head that a model needs.
        columns: the largest number of columns that are read.
        label_fields: the fields of a batch that hold the labels.
        next_token: whether the prediction at a position is of the next token.
        numeric: whether labels are numbers, rather than classes.
        several: whether a row has any number of the classes, also none, rather than one.
        row_labels: whether each row is a text, or a pair, with one class or number; rows without a label may then be
            added for a teacher to label.
        lists: whether a row's column holds a list of messages, which stage one cannot read.
        trains: whether there is something to train; without a head the task can only be measured.
        train_tokens: the longest row to train on if the user gives no length.
        most_tokens: the longest row to measure on if the user gives no length; None for the model's limit.
        distance: name of the distance of the logits from a teacher's, in the records of stage two.
    """

    head: ClassVar[Head]
    columns: ClassVar[int] = 1
    label_fields: ClassVar[tuple[str, ...]] = ("labels",)
    next_token: ClassVar[bool] = False
    numeric: ClassVar[bool] = False
    several: ClassVar[bool] = False
    row_labels: ClassVar[bool] = False
    lists: ClassVar[bool] = False
    trains: ClassVar[bool] = True
    train_tokens: ClassVar[int] = 128
    most_tokens: ClassVar[int | None] = None
    distance: ClassVar[str] = "divergence from the teacher"


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: the name that users write.
        kind: module of `task_types` and class of its type, `module:Class`; imported when it is needed.
        summary: one line.
        dataset: Hub data set, `name` or `name:config`; None if the user must name one.
        folders: possible names of the task's folder in a folder of data sets (`data=PATH`).
        columns: columns of the text or texts, or of the image; found by their content if empty.
        label: column of the label; None if rows have no label, as for language models.
        labels: class names in the order of their numbers; None to read them from the data.
        metrics: names in `linearize.training.stage_two.metrics.METRICS`; all are computed.
        score: metrics whose mean is the task's score, as in GLUE; by default all `metrics`.
        lower_is_better: whether a smaller score is better.
        percent: whether papers multiply the score by 100.
        train: name of the split to train on.
        validation: names of the split to measure on; the first that exists is used.
        exact_validation: whether the user named that split, so that no other rows may replace it.
        several_kind: `kind` for rows with several labels each (`several_labels`); None if a row has at most one.
        head_labels: names of the outputs of a trained head that gives several labels per row.
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
    several_kind: str | None = None
    head_labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "score", self.score or self.metrics)

    def mean_of(self, metrics: Mapping[str, float], names: Sequence[str] | None = None) -> float:
        """Return the mean of the named metrics, by default the task's score.

        Raises:
            ConfigError: if one was not computed.
        """
        names = names or self.score
        missing = [name for name in names if name not in metrics]
        if missing:
            raise ConfigError(
                f"task {self.name}: the score asks for {missing[0]!r}, expected one of: {', '.join(sorted(metrics))}"
            )
        return sum(metrics[name] for name in names) / len(names)

    def written(self, score: float) -> str:
        """Write a score as papers do: shares as points."""
        return f"{100 * score:.2f}" if self.percent else f"{score:.3f}"

    @property
    def type(self) -> type[Kind]:
        """The class that reads data for this type of task, a `TaskType`."""
        found: type[Kind] = pkgutil.resolve_name(f"{TYPES}.{self.kind}")
        return found

    @property
    def head(self) -> Head:
        """The head that a model needs for it."""
        return self.type.head

    @property
    def modality(self) -> Modality:
        """ "text" or "image"."""
        return self.head.modality


_PAIR = ("sentence1", "sentence2")
_NLI = ("entailment", "neutral", "contradiction")
_RTE = ("entailment", "not_entailment")
_EQUIVALENT = ("not_equivalent", "equivalent")
_DUPLICATE = ("not_duplicate", "duplicate")
_PREMISE, _MATCHED = ("premise", "hypothesis"), ("validation_matched", "validation")
_CORPORA = ("wikitext2", "wikitext103")
_ACCURACY_F1 = ("accuracy", "f1")
_CORRELATIONS = ("pearson", "spearman")
_CLASSES: Values = {"metrics": ("accuracy", "f1_macro"), "score": ("accuracy",)}


def _glue(name: str, summary: str, columns: tuple[str, ...], labels: tuple[str, ...] | None, **more: object) -> Task:
    folders = (name, name.replace("sst2", "SST-2"), name.upper())
    values: Values = {"kind": "text:TextClassification", "dataset": f"nyu-mll/glue:{name}", "folders": folders}
    return Task(name, summary=summary, columns=columns, labels=labels, **{**values, **more})


def _language(name: str, kind: str, summary: str, **more: object) -> Task:
    values: Values = {"label": None, "metrics": ("perplexity",), "lower_is_better": True, "percent": False}
    return Task(name, kind, summary, **{**values, **more})


_ALL = (
    _glue("cola", "is a sentence grammatical?", ("sentence",), ("unacceptable", "acceptable"), metrics=("matthews",)),
    _glue("sst2", "sentiment of a film review's sentence", ("sentence",), ("negative", "positive")),
    _glue("mrpc", "do two sentences mean the same?", _PAIR, _EQUIVALENT, metrics=_ACCURACY_F1),
    _glue("stsb", "similarity of two sentences, 0-5", _PAIR, None, kind="text:TextRegression", metrics=_CORRELATIONS),
    _glue("qqp", "are two questions the same?", ("question1", "question2"), _DUPLICATE, metrics=_ACCURACY_F1),
    _glue("mnli", "does a premise entail a hypothesis?", _PREMISE, _NLI, validation=_MATCHED),
    _glue("qnli", "does a sentence answer a question?", ("question", "sentence"), _RTE),
    _glue("rte", "does a text entail another?", _PAIR, _RTE),
    Task(
        "text-classification",
        "text:TextClassification",
        "any text, or pair of texts, with a class, or several",
        several_kind="multi_label:MultiLabelText",
        **_CLASSES,
    ),
    Task(
        "text-regression",
        "text:TextRegression",
        "any text, or pair of texts, with a number",
        metrics=(*_CORRELATIONS, "mse"),
        score=_CORRELATIONS,
    ),
    Task(
        "similarity",
        "embeddings:Similarity",
        "similarity of two sentences by the cosine of their embeddings; no head, nothing to train",
        dataset="nyu-mll/glue:stsb",
        folders=("stsb", "STS-B"),
        columns=_PAIR,
        metrics=("spearman", "pearson"),
        score=("spearman",),
    ),
    Task(
        "duplicates",
        "embeddings:Duplicates",
        "do two sentences mean the same, by the cosine of their embeddings? no head, nothing to train",
        dataset="nyu-mll/glue:mrpc",
        folders=("mrpc", "MRPC"),
        columns=_PAIR,
        labels=_EQUIVALENT,
        metrics=("roc_auc",),
    ),
    Task(
        "retrieval",
        "embeddings:Retrieval",
        "find the second half of a long text by its first (or a text by a question), without training",
        label=None,
        metrics=("retrieval",),
        score=("recall_at_1",),
    ),
    _language("masked-lm", "language:MaskedLanguage", "predict masked tokens"),
    _language(
        "causal-lm", "language:CausalLanguage", "next token; perplexity over windows with a stride", folders=_CORPORA
    ),
    Task(
        "copying",
        "language:Copying",
        "each passage appears twice: how much of the second copy is looked up in the first",
        label=None,
        metrics=("copying",),
        score=("copy_accuracy",),
        folders=_CORPORA,
    ),
    _language(
        "chat",
        "chat:Chat",
        "conversations: the assistant's next tokens, in the tokenizer's chat template",
        columns=("messages",),
    ),
    Task(
        "image-classification",
        "images:ImageClassification",
        "any images with a class, or several",
        several_kind="multi_label:MultiLabelImages",
        **_CLASSES,
    ),
    Task(
        "cifar10",
        "images:ImageClassification",
        "CIFAR-10: 32 x 32 photographs in ten classes",
        dataset="uoft-cs/cifar10",
        folders=("cifar10",),
        columns=("img",),
    ),
    Task(
        "token-classification",
        "tokens:TokenClassification",
        "a tag for every word (names, parts of speech)",
        columns=("tokens",),
        label="ner_tags",
        metrics=("entities",),
        score=("entity_f1",),
    ),
    Task(
        "question-answering",
        "tokens:QuestionAnswering",
        "the answer's span in a text, SQuAD's columns",
        dataset="rajpurkar/squad",
        columns=("question", "context"),
        label="answers",
        metrics=("spans",),
        score=("span_f1",),
    ),
    Task("recall", "language:Recall", "the answer after a sequence of tokens", columns=("text",), label="positions"),
)
TASKS: dict[str, Task] = {task.name: task for task in _ALL}


def task(
    name: str,
    *,
    dataset: str | None = None,
    columns: Sequence[str] = (),
    label: str | None = None,
    labels: Sequence[str] = (),
    validation: str | None = None,
    score: Sequence[str] = (),
) -> Task:
    """Return a task by its name, with the user's changes.

    Args:
        name: a key of `TASKS`.
        dataset: Hub name, file or folder.
        columns: text (or image) columns.
        label: label column.
        labels: class names in the order of their numbers.
        validation: split to measure on; it is an error if the data lacks it.
        score: metrics whose mean is the score.

    Raises:
        UnknownNameError: for an unknown task.
        ConfigError: for the name of a head; if there are more columns than the type of task reads, a label column for
            rows without labels, or a class twice.
    """
    if name not in TASKS:
        if name in HEADS:
            tasks = ", ".join(other.name for other in _ALL if other.head.name == name) or "text-classification"
            raise ConfigError(f"task: got {name!r}, which is a head, expected a task such as {tasks}")
        raise unknown_name("task", name, TASKS)
    known = TASKS[name]
    if columns and len(columns) > known.type.columns:
        raise ConfigError(f"task {name}: got the columns {', '.join(columns)}, expected fewer; name those to read")
    if label is not None and known.label is None:
        raise ConfigError(f"task {name}: got the label column {label!r}, but its rows have no labels; drop it")
    if (twice := repeated(labels)) is not None:
        raise ConfigError(f"task {name}: got the class {twice!r} twice, expected different names; drop one")
    given: Values = {"dataset": dataset, "label": label}
    given |= {"columns": tuple(columns), "labels": tuple(labels), "score": tuple(score)}
    changes: Values = {name: value for name, value in given.items() if value not in (None, ())}
    if validation is not None:
        changes |= {"validation": (validation,), "exact_validation": True}
    return dataclasses.replace(known, **changes)


MULTI_LABEL = ("f1_micro", "f1_macro", "subset_accuracy")


def several_labels(chosen: Task, head_labels: Sequence[str] = ()) -> Task:
    """Return the task whose rows have several labels each; micro F1 is its score unless another of its metrics was.

    Args:
        chosen: a task with `several_kind`.
        head_labels: names of the outputs of the trained head, if there is one.
    """
    assert chosen.several_kind is not None
    score = tuple(name for name in chosen.score if name in MULTI_LABEL) or MULTI_LABEL[:1]
    changes: Values = {"kind": chosen.several_kind, "metrics": ("multi_label",), "score": score}
    return dataclasses.replace(chosen, **changes, head_labels=tuple(head_labels))


def recovery(
    chosen: Task, score: float, original: float, *, chance: float | None = None, interval: Interval | None = None
) -> float | None:
    """Return what share of the original's score above chance is recovered, in percent.

    Args:
        chosen: the task.
        score: the converted model's score.
        original: the original's score.
        chance: the score of guessing; None means 0, as in papers.
        interval: the original's interval; None to use its score alone.

    Returns:
        `(score - chance) / (original - chance)`; None if the original is not above chance. For perplexities the
        original's score divided by ours, so that more is better there too.
    """
    if chosen.lower_is_better:
        return None if score == 0 else 100.0 * (original / score)
    floor = chance or 0.0
    if original == floor or not above_chance(chosen, original, chance=chance, interval=interval):
        return None
    return 100.0 * (score - floor) / (original - floor)


def above_chance(chosen: Task, score: float, *, chance: float | None, interval: Interval | None = None) -> bool:
    """Tell whether a score, with its whole interval if it has one, beats guessing; True if `chance` is None."""
    if chance is None:
        return True
    low, high = interval or (score, score)
    return bool(high < chance if chosen.lower_is_better else low > chance)
