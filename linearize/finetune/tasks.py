"""What a model can be tuned for and measured on: the types of tasks, and the tasks, as data.

GLUE's tasks are here by name; any other data set of a type is a copy of that type's task with other columns
(`task("text-classification", columns=("review",))`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from linearize.errors import ConfigError, unknown_name
from linearize.finetune.task import Task, TaskType
from linearize.heads import HEADS

TASK_TYPES: dict[str, TaskType] = {
    type.name: type
    for type in (
        TaskType(
            "classification",
            HEADS["text-classification"],
            "class",
            "linearize.finetune.task_types.text",
            columns=2,
            unlabelled=True,
        ),
        TaskType(
            "regression",
            HEADS["text-classification"],
            "number",
            "linearize.finetune.task_types.text",
            columns=2,
            unlabelled=True,
        ),
        TaskType(
            "similarity",
            HEADS["feature-extraction"],
            "number",
            "linearize.finetune.task_types.similarity",
            columns=2,
        ),
        TaskType(
            "retrieval", HEADS["feature-extraction"], "none", "linearize.finetune.task_types.retrieval", columns=1
        ),
        TaskType("masked-lm", HEADS["fill-mask"], "tokens", "linearize.finetune.task_types.language"),
        TaskType(
            "causal-lm", HEADS["text-generation"], "tokens", "linearize.finetune.task_types.language", next_token=True
        ),
        TaskType("chat", HEADS["text-generation"], "tokens", "linearize.finetune.task_types.chat", next_token=True),
        TaskType(
            "copying", HEADS["text-generation"], "tokens", "linearize.finetune.task_types.copying", next_token=True
        ),
        TaskType("recall", HEADS["text-generation"], "tokens", "linearize.finetune.task_types.recall", next_token=True),
        TaskType(
            "image-classification", HEADS["image-classification"], "class", "linearize.finetune.task_types.images"
        ),
        TaskType("token-classification", HEADS["token-classification"], "tags", "linearize.finetune.task_types.tokens"),
        TaskType(
            "question-answering",
            HEADS["question-answering"],
            "span",
            "linearize.finetune.task_types.questions",
            columns=2,
            label_fields=("start_positions", "end_positions"),
        ),
    )
}
"""Every type of task by its name."""


def _glue(
    name: str,
    summary: str,
    columns: Sequence[str],
    labels: Sequence[str] | None,
    metrics: Sequence[str] = ("accuracy",),
    type: str = "classification",
    **changes: object,
) -> Task:
    return Task(
        name,
        TASK_TYPES[type],
        summary,
        dataset=f"nyu-mll/glue:{name}",
        folders=(name, name.replace("sst2", "SST-2"), name.upper()),
        columns=tuple(columns),
        labels=None if labels is None else tuple(labels),
        metrics=tuple(metrics),
        score=tuple(metrics),
        **changes,  # type: ignore[arg-type]
    )


_PAIR = ("sentence1", "sentence2")
_NLI = ("entailment", "neutral", "contradiction")
_RTE = ("entailment", "not_entailment")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _glue("cola", "is a sentence grammatical?", ["sentence"], ["unacceptable", "acceptable"], ["matthews"]),
        _glue("sst2", "sentiment of a film review's sentence", ["sentence"], ["negative", "positive"]),
        _glue("mrpc", "do two sentences say the same?", _PAIR, ["not_equivalent", "equivalent"], ["accuracy", "f1"]),
        _glue("stsb", "likeness of two sentences, 0 to 5", _PAIR, None, ["pearson", "spearman"], "regression"),
        _glue(
            "qqp",
            "are two questions the same?",
            ["question1", "question2"],
            ["not_duplicate", "duplicate"],
            ["accuracy", "f1"],
        ),
        _glue(
            "mnli",
            "does a premise entail a hypothesis?",
            ["premise", "hypothesis"],
            _NLI,
            validation=("validation_matched", "validation"),
        ),
        _glue("qnli", "does a sentence answer a question?", ["question", "sentence"], _RTE),
        _glue("rte", "does a text entail another?", _PAIR, _RTE),
        Task(
            "text-classification",
            TASK_TYPES["classification"],
            "any text, or pair of texts, with a class",
            metrics=("accuracy", "f1_macro"),
        ),
        Task(
            "text-regression",
            TASK_TYPES["regression"],
            "any text, or pair of texts, with a number",
            metrics=("pearson", "spearman", "mse"),
            score=("pearson", "spearman"),
        ),
        Task(
            "similarity",
            TASK_TYPES["similarity"],
            "likeness of two sentences by the cosine of their embeddings; no head, nothing to train",
            dataset="nyu-mll/glue:stsb",
            folders=("stsb", "STS-B"),
            columns=_PAIR,
            metrics=("spearman", "pearson"),
            score=("spearman",),
        ),
        Task(
            "retrieval",
            TASK_TYPES["retrieval"],
            "first halves of long texts look for their second halves, without training",
            label=None,
            metrics=("retrieval",),
            score=("recall_at_1",),
        ),
        Task(
            "masked-lm",
            TASK_TYPES["masked-lm"],
            "fill masked tokens in",
            label=None,
            metrics=("perplexity",),
            score=("perplexity",),
            lower_is_better=True,
            percent=False,
        ),
        Task(
            "causal-lm",
            TASK_TYPES["causal-lm"],
            "next token; perplexity over windows with a stated stride",
            label=None,
            metrics=("perplexity",),
            score=("perplexity",),
            lower_is_better=True,
            percent=False,
            folders=("wikitext2", "wikitext103"),
        ),
        Task(
            "copying",
            TASK_TYPES["copying"],
            "a passage stands twice: how much of the second time is found in the first",
            label=None,
            metrics=("copying",),
            score=("copy_accuracy",),
            folders=("wikitext2", "wikitext103"),
        ),
        Task(
            "chat",
            TASK_TYPES["chat"],
            "conversations: what the assistant says next, by the tokenizer's chat template",
            columns=("messages",),
            label=None,
            metrics=("perplexity",),
            score=("perplexity",),
            lower_is_better=True,
            percent=False,
        ),
        Task("image-classification", TASK_TYPES["image-classification"], "any images with a class"),
        Task(
            "cifar10",
            TASK_TYPES["image-classification"],
            "CIFAR-10: 32 x 32 photographs of ten kinds",
            dataset="uoft-cs/cifar10",
            folders=("cifar10",),
            columns=("img",),
        ),
        Task(
            "token-classification",
            TASK_TYPES["token-classification"],
            "a tag for every word (names, parts of speech)",
            columns=("tokens",),
            label="ner_tags",
            metrics=("entities",),
            score=("entity_f1",),
        ),
        Task(
            "question-answering",
            TASK_TYPES["question-answering"],
            "the answer's span in a text, SQuAD's columns",
            dataset="rajpurkar/squad",
            columns=("question", "context"),
            label="answers",
            metrics=("spans",),
            score=("span_f1",),
        ),
        Task(
            "recall", TASK_TYPES["recall"], "the answer behind a sequence of tokens", columns=("text",), label="answer"
        ),
    )
}


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
    """Look a task up and change what the user says otherwise.

    Args:
        name: a key of `TASKS`.
        dataset: Hub name, file or folder.
        columns: text (or image) columns.
        label: label column.
        labels: class names in the order of their numbers.
        validation: split to measure on; where it is missing, that is an error of the data.
        score: metrics whose mean is the score.

    Raises:
        UnknownNameError: for an unknown task.
        ConfigError: if there are more columns than the type of task reads.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    known = TASKS[name]
    if len(columns) > known.type.columns:
        raise ConfigError(f"task {name}: got the columns {', '.join(columns)}, expected fewer; name those to read")
    changes: dict[str, object] = {}
    for key, value in (("columns", tuple(columns)), ("labels", tuple(labels)), ("score", tuple(score))):
        if value:
            changes[key] = value
    if dataset is not None:
        changes["dataset"] = dataset
    if label is not None:
        if known.label is None:
            raise ConfigError(f"task {name}: got the label column {label!r}, but its rows have no labels; drop it")
        changes["label"] = label
    if validation is not None:
        changes |= {"validation": (validation,), "exact_validation": True}
    return dataclasses.replace(known, **changes)  # type: ignore[arg-type]


def main_metric(chosen: Task, metrics: dict[str, float]) -> float:
    """Return a task's score: the mean of the metrics it names.

    Raises:
        ConfigError: if a metric that it names is not among those computed.
    """
    missing = [name for name in chosen.score if name not in metrics]
    if missing:
        raise ConfigError(
            f"task {chosen.name}: the score asks for {missing[0]!r}, expected one of: {', '.join(sorted(metrics))}"
        )
    return sum(metrics[name] for name in chosen.score) / len(chosen.score)


def recovery(
    chosen: Task,
    score: float,
    original: float,
    *,
    chance: float | None = None,
    interval: tuple[float, float] | None = None,
) -> float | None:
    """Return the share of the original's score above chance that is recovered, in percent.

    Args:
        chosen: the task.
        score: ours.
        original: the original's.
        chance: the score of guessing; None: 0, as papers have it.
        interval: the original's interval; None: its score alone.

    Returns:
        `(score - chance) / (original - chance)`; None where the original is not above chance. For perplexities the
        original's over ours, so that more is better there too.
    """
    if chosen.lower_is_better:
        return None if score == 0 else 100.0 * (original / score)
    floor = chance or 0.0
    if original == floor or not above_chance(chosen, original, chance=chance, interval=interval):
        return None
    return 100.0 * (score - floor) / (original - floor)


def above_chance(
    chosen: Task, score: float, *, chance: float | None, interval: tuple[float, float] | None = None
) -> bool:
    """Tell whether a score is better than guessing, with its whole interval if it has one; True without a chance."""
    if chance is None:
        return True
    low, high = interval or (score, score)
    return bool(high < chance if chosen.lower_is_better else low > chance)
