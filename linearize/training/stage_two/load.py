"""Load a checkpoint, softmax or converted, with the head that a task needs.

This module also chooses the default length of rows, checks that a model can read them, and loads the teacher of stage
two: the softmax model, tuned for the same task, which is compared with its student.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearize.checkpoint.loading import explained, load_processor, model_type, move, read_config
from linearize.checkpoint.ownership import check_links, read_mapping
from linearize.conversion.gguf import in_safetensors, load_weights, located, read_config_values, timm_options
from linearize.conversion.positions import current_length, extend_positions, extend_processor, runs_beyond_limit
from linearize.core.errors import CheckpointError, ConfigError, some, unknown_name
from linearize.core.heads import Processor, fit_tokenizer, head_of_class
from linearize.core.parsing import user_path
from linearize.core.registry import ReadOnlyValues, Values
from linearize.fidelity.teacher import run_module
from linearize.modeling import offload
from linearize.modeling.model import evaluating, is_linearized
from linearize.modeling.weights import check_numbers, device_of, is_offloaded
from linearize.training.alignment.pair import check_teacher
from linearize.training.stage_two.task_types.base import TaskData, is_named
from linearize.training.stage_two.tasks import Task, several_labels

RECORD = "finetuning.json"
"""The file of a tuned checkpoint that records what it was tuned for, and how."""


def recorded(name: str | Path) -> Values:
    """Return a folder's record of how it was tuned; {} if it has none that can be read.

    Raises:
        CheckpointError: if a link leads out of the folder.
    """
    check_links(name)
    return read_mapping(user_path(name) / RECORD)


def load_for_task(
    name: str,
    data: TaskData,
    *,
    new_head: bool = False,
    seed: int = 0,
    changes: Mapping[str, object] | None = None,
    in_files: bool = False,
) -> PreTrainedModel:
    """Load a checkpoint with the head of a task; a missing head is drawn from the seed, a missing padding token is set.

    The names of a trained head's outputs decide what they mean: if they are the task's labels in another order, they
    are put into the task's order; if the data has only numbers, the head keeps its names.

    Args:
        name: Hub name, folder or GGUF file, softmax or converted.
        data: the task's data, which decides the number of labels.
        new_head: whether a trained head of another size is replaced.
        seed: seed of a new head.
        changes: changes to the checkpoint's config, such as dropout.
        in_files: whether blocks, embedding and head stay in their files, where that is possible.

    If the data lacks some of the classes that the head has names for, these become the last of the task's.

    Raises:
        ConfigError: if the checkpoint has a trained head with another number of labels, or its config lacks a name in
            `changes`.
        CheckpointError: if it cannot be loaded.
        DataError: if it refuses the size of the task's images.
    """
    import transformers

    task, head_labels, raw = data.task, None, read_config(name)
    options: dict[str, object] = timm_options(raw)
    if data.num_labels is not None:
        head_labels = None if new_head else _head_labels(name, data)
        named = task = data.task
        if head_labels and is_named(head_labels) and task.labels is not None and not is_named(task.labels):
            named = dataclasses.replace(task, labels=head_labels)
        options |= label_options(named, data.num_labels) | {"ignore_mismatched_sizes": new_head}
    if changes:
        with explained(name, "its config"):
            place, where = located(name)
            known = transformers.AutoConfig.from_pretrained(place, **where).to_dict()
        for key in changes:
            if key not in known:
                raise ConfigError(f"model.config: {unknown_name('key', key, known)}")
        options |= changes
    auto: Any = getattr(transformers, task.head.auto_class)
    order = None if head_labels is None else label_order(head_labels, task.labels or ())

    def load(**places: object) -> PreTrainedModel:
        transformers.set_seed(seed)
        return load_weights(auto, name, **options, **places)

    with explained(name, f"as {task.head.auto_class}"):
        # The weights of a head whose outputs change places are changed in memory.
        if in_files and order is None and in_safetensors(name, raw):
            known = {key: value for key, value in options.items() if key != "ignore_mismatched_sizes"}
            config = transformers.AutoConfig.from_pretrained(name, **known)
            model = offload.load_in_files(offload.without_weights(auto.from_config, config), load, "cpu")
            check_numbers(model, repr(name))
        else:
            model = load()
    if getattr(model.config, "label_names", None) is not None and task.labels is not None:
        # Those of the file, which timm's config would write again.
        model.config.label_names = list((model.config.id2label or {}).values())
    if order is not None:
        reorder_outputs(model, order)
    fit_tokenizer(model, data.type.processor)
    if task.modality == "image" and len(data.validation):
        with torch.no_grad(), evaluating(model):
            run_module(model, model.config, data.collate([data.validation[0]]))
    return ready(model)


SEVERAL = "multi_label_classification"
"""The `problem_type` of a head whose outputs are separate choices."""


def task_of_head(name: str, task: Task) -> Task:
    """Return the task as a checkpoint's trained head decides it: rows have several labels if the head gives several.

    Raises:
        CheckpointError: if the checkpoint has no config that can be read.
    """
    if task.several_kind is None or task.type.several:
        return task
    values = read_config(name)
    if values.get("problem_type") != SEVERAL or not _has_head(values, task):
        return task
    names = values.get("id2label") or {}
    own = [names[key] for key in sorted(names, key=int)] if isinstance(names, dict) else []
    return several_labels(task, list(map(str, own)))


def _has_head(values: ReadOnlyValues, task: Task) -> bool:
    """Tell from a checkpoint's config whether it has a trained head for a task."""
    # timm's configs have other names, and no class of transformers if timm wrote them.
    of_timm = task.modality == "image" and values.get("architecture") and not values.get("architectures")
    return task.head.is_of((values.get("architectures") or [""])[0]) or bool(of_timm and values.get("num_classes"))


def _trained_labels(name: str, task: Task, count: int) -> tuple[str, ...] | None:
    """Return the names of the outputs of a checkpoint's trained head, in order, also numbers; None if it has none.

    Raises:
        ConfigError: if it has a head for the task with another number of labels, unless the data's are some of them by
            name.
        CheckpointError: if the checkpoint has no config that can be read.
    """
    values = read_config(name)
    if not _has_head(values, task):
        return None
    if task.several_kind is not None and task.type.several != (values.get("problem_type") == SEVERAL):
        got, expected = ("one label", "several") if task.type.several else ("several labels", "one")
        raise ConfigError(
            f"{Path(name).name!r} has a trained head that gives {got} per row, but rows of task {task.name} have "
            f"{expected}; choose data that fits the head, or tune a new head (finetune --new-head)"
        )
    names = values.get("id2label") or dict(enumerate(values.get("label_names") or ()))
    has = len(names) or values.get("num_labels") or values.get("num_classes") or 2
    own = [str(label).casefold() for label in names.values()] if isinstance(names, dict) else []
    wanted = task.labels or ()
    # Each of the data's classes is one of the head's, by name.
    fewer = count < has and is_named(wanted) and all(own.count(label.casefold()) == 1 for label in wanted)
    if has != count and not fewer:
        raise ConfigError(
            f"{Path(name).name!r} has a trained head with {has} labels, but task {task.name} has {count}; choose the "
            "task that it was trained for, name all its labels (--labels A,B), or tune a new head (finetune --new-head)"
        )
    if task.type.numeric or not names or not isinstance(names, dict):
        return None
    return tuple(str(names[key]) for key in sorted(names, key=int))


def _head_labels(name: str, data: TaskData) -> tuple[str, ...] | None:
    """Return `_trained_labels`, and add those of which the data has no row to the task's classes."""
    labels = data.task.labels or ()
    own = _trained_labels(name, data.task, data.num_labels or 0)
    if own is not None and len(own) > len(labels):
        # In an order that does not depend on the head, so that a teacher and its student have the same.
        data.type.absent = tuple(sorted(without(own, labels)))
        data.type.task = dataclasses.replace(data.task, labels=(*labels, *data.type.absent))
    return own


def without(labels: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the labels that are not among others; case is ignored."""
    known = {label.casefold() for label in others}
    return [label for label in labels if label.casefold() not in known]


def other_classes(name: str, data: TaskData) -> str | None:
    """Return a note if the outputs of a trained head have other names than the data's classes; None if not."""
    own = (_head_labels(name, data) if data.task.labels else None) or ()
    labels = data.task.labels or ()
    if data.type.absent:
        return f"The data has no row of {len(data.type.absent)} of the head's classes: {some(data.type.absent)}."
    if not is_named(own) or {label.casefold() for label in own} == {label.casefold() for label in labels}:
        return None
    pairs = ", ".join(f"{head} for {label}" for head, label in zip(own[:20], labels, strict=False))
    if not is_named(labels):
        return f"The data has class numbers; they are matched by place with the head of {Path(name).name!r}: {pairs}."
    return f"The head of {Path(name).name!r} has other class names than the data; they are matched by place: {pairs}."


def label_order(own: Sequence[str], wanted: Sequence[str]) -> list[int] | None:
    """Return which output of a head belongs to each wanted label; None if the order is right.

    Case is ignored. If the names differ otherwise, the head's outputs keep their order.
    """
    places = {label.casefold(): number for number, label in enumerate(own)}
    order = [places.get(label.casefold(), -1) for label in wanted]
    return None if sorted(order) != list(range(len(own))) or order == sorted(order) else order


@torch.no_grad()
def reorder_outputs(model: PreTrainedModel, order: Sequence[int]) -> None:
    """Change the order of a classifier's outputs, in place.

    Args:
        model: a model with a head.
        order: for each output, its previous place.

    Raises:
        ConfigError: if it is not clear which layer makes the outputs.
    """
    body = {id(module) for module in model.base_model.modules()} if model.base_model is not model else set()
    layers = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features == len(order) and id(module) not in body
    ]
    if len(layers) != 1:
        raise ConfigError(
            f"{type(model).__name__} has labels in another order than the task, and {len(layers)} layers that could "
            "make them; name the labels in its own order (--labels A,B), or replace the head (--new-head)"
        )
    for tensor in (layers[0].weight, layers[0].bias):
        if tensor is not None:
            tensor.copy_(tensor[list(order)])


def label_options(task: Task, count: int) -> dict[str, object]:
    """Return the config values of a head with `count` outputs."""
    names = task.labels or tuple(f"LABEL_{number}" for number in range(count))
    numbers = {name: number for number, name in enumerate(names)}
    # timm's config takes the number from its file unless it is given.
    options: dict[str, object] = {"id2label": dict(enumerate(names)), "label2id": numbers, "num_labels": count}
    if task.head.name in ("text-classification", "image-classification"):
        # It decides the loss; a head for several labels per row would keep its own.
        one = "regression" if task.type.numeric else "single_label_classification"
        options["problem_type"] = SEVERAL if task.type.several else one
    return options


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """Record the class of a converted model, which may have a new head, in its config, and return the model."""
    if is_linearized(model):
        name = type(model).__name__
        model.config.linearize = {**model.config.linearize, "base_architecture": name}
    return model


def check_trained(name: str, task: Task) -> None:
    """Refuse a checkpoint whose head was never trained for a task.

    Raises:
        ConfigError: if the checkpoint's class has no head for the task.
    """
    try:
        saved = (read_config_values(name).get("architectures") or [""])[0]
    except OSError:
        return
    other = head_of_class(saved)
    # A bare body may share its embedding with a causal head; the body of another head was trained for something else.
    needed = task.head.own_weights or (task.head.name == "text-generation" and other is not None and other.own_weights)
    if needed and saved and not task.head.is_of(saved):
        raise ConfigError(
            f"{Path(name).name!r} is a {saved}, which has no trained head for task {task.name}; tune it first: "
            f"linearize finetune {name} --task {task.name}"
        )


NO_LIMIT = 1_000_000
"""Tokens that no row reaches."""


def usual_length(name: str, most: int) -> int:
    """Return the default length of rows: as the checkpoint was tuned, else `most` or the limit of a shorter model.

    Raises:
        CheckpointError: if the checkpoint has no config that can be read.
    """
    tuned = recorded(name).get("max_length")
    return tuned if type(tuned) is int and tuned > 1 else min(most, length_limit(name) or most)


def length_limit(name: str) -> int | None:
    """Return the most tokens that a checkpoint's model and tokenizer take, by their configs; None if no limit is known.

    Raises:
        CheckpointError: if the checkpoint has no config that can be read.
    """
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    values = read_config(name)
    longest = values.get("max_position_embeddings") or values.get("n_positions")
    kind = (values.get("linearize") or {}).get("base_model_type") or values.get("model_type") or ""
    # RoBERTa and its relatives count positions from the padding token's id + 1.
    reserved = (values.get("pad_token_id") or 0) + 1 if "roberta" in kind else 0
    with explained(name, "its tokenizer_config.json"):
        tokenizer = get_tokenizer_config(located(name)[0]).get("model_max_length")
    # transformers writes a number of thirty digits for a tokenizer without a limit.
    known = [number for number in (tokenizer,) if isinstance(number, int) and 1 < number < NO_LIMIT]
    known += [longest - reserved] if isinstance(longest, int) else []
    return min(known, default=None)


def whole_length(name: str, task: Task) -> int:
    """Return the default length of rows that are measured whole.

    This is the length it was tuned with, else the limit of its model and tokenizer, and at most `TaskType.most_tokens`:
    a language model's windows could be as long as the text.

    Raises:
        CheckpointError: if the checkpoint has no config that can be read.
    """
    return usual_length(name, task.type.most_tokens or NO_LIMIT)


def beyond_training(model: PreTrainedModel, task: Task, length: int) -> str | None:
    """Refuse rows to measure on that a model cannot read; return a note if they are longer than it was trained on.

    Raises:
        ConfigError: if rows are longer than the model's positions, and these are not rotary.
    """
    most = check_length(model, task, length, rotary=True)
    if most is None:
        return None
    return (
        f"Rows have up to {length:,} tokens, but {type(model).__name__} was made for {most:,}: its rotary positions "
        "continue, but it was never trained beyond that."
    )


def fit_positions(model: PreTrainedModel, processor: Processor, task: Task, length: int) -> str | None:
    """Let a model with rotary positions be tuned on longer rows than it was made for; refuse other models.

    Returns:
        What was changed, in one line; None if nothing needed to change.

    Raises:
        ConfigError: if rows are longer than the model's positions, and these are a table.
        UnsupportedModelError: if they are scaled by the length.
    """
    most = check_length(model, task, length, rotary=True)
    if most is None:
        return None
    report = extend_positions(model, length)
    extend_processor(processor, report, model)
    return f"Rows have up to {length:,} tokens, {type(model).__name__} was made for {most:,}: {report.note}."


def check_length(
    model: PreTrainedModel, task: Task, length: int, *, advice: str = "convert with --max-length", rotary: bool = False
) -> int | None:
    """Refuse rows of text that are longer than the model's positions.

    Args:
        model: the model.
        task: the task; only text has a length.
        length: tokens of the longest row.
        advice: advice in addition to lowering the length.
        rotary: whether a model with rotary positions may read longer rows.

    Returns:
        The tokens that a model with rotary positions was made for if rows are longer; else None.

    Raises:
        ConfigError: if rows are longer.
    """
    most = current_length(model) if task.modality == "text" else None
    if most is None or length <= most:
        return None
    if rotary and runs_beyond_limit(model):
        return most
    raise ConfigError(
        f"max_length: {type(model).__name__} takes at most {most} tokens, but rows have up to {length}; lower it, or "
        f"{advice}"
    )


PROBE = "Linear attention reads A Text, twice: 1,024 tokens!"
"""A text that tokenizers with the same vocabulary but different rules split differently."""


def load_teacher(name: str, data: TaskData, student: PreTrainedModel) -> PreTrainedModel:
    """Load a tuned softmax model as the teacher of a student.

    Args:
        name: folder or Hub name.
        data: the task's rows, made with the student's tokenizer or image processor.
        student: the model that is tuned, converted or not.

    Returns:
        The teacher, frozen, in evaluation mode, on the student's device.

    Raises:
        ConfigError: if it is itself converted, was not tuned for the task, has another architecture, size, tokenizer or
            label set, or takes fewer tokens than the rows have.
        CheckpointError: if it cannot be loaded.
    """
    check_tuned(name, data)
    check_processor(name, load_processor(name, data.task.modality), data.type.processor)
    teacher = load_for_task(name, data, in_files=is_offloaded(student))
    check_teacher(student, teacher)
    length = data.type.options.max_length
    check_length(teacher, data.task, length, advice="name a teacher that takes more")
    return freeze(teacher, student)


def freeze(teacher: PreTrainedModel, student: PreTrainedModel) -> PreTrainedModel:
    """Return the teacher in evaluation mode, without gradients, on its student's device and in its dtype."""
    teacher.config.use_cache = False
    return move(teacher, device_of(student), next(student.parameters()).dtype).eval().requires_grad_(False)


def check_tuned(name: str, data: TaskData) -> None:
    """Refuse a checkpoint that cannot teach a task, by its config and its record alone.

    Raises:
        ConfigError: if it is converted, has no trained head for the task, or was tuned for another task.
    """
    called, task = f"teacher {Path(name).name!r}", data.task
    if model_type(name) == "linearize":
        raise ConfigError(
            f"{called}: got a converted model, expected a softmax one; tune the original: linearize finetune ORIGINAL "
            f"--task {task.name}"
        )
    check_trained(name, task)
    record, file = recorded(name), user_path(name) / RECORD
    if file.is_file() and "task" not in record:
        raise CheckpointError(f"{str(file)!r} cannot be read as the record of a tuning; tune the teacher again")
    tuned_for = record.get("task", task.name)
    if tuned_for != task.name:
        raise ConfigError(
            f"{called}: got a model tuned for task {tuned_for}, expected one tuned for {task.name}; tune it first: "
            f"linearize finetune ORIGINAL --task {task.name}"
        )


def check_processor(name: str, teacher: Any, student: Any) -> None:
    """Refuse a teacher with another tokenizer or image processor than the student's.

    Raises:
        ConfigError: if they differ.
    """
    called = f"teacher {Path(name).name!r}"
    if hasattr(student, "get_vocab"):
        if teacher.get_vocab() != student.get_vocab() or teacher(PROBE)["input_ids"] != student(PROBE)["input_ids"]:
            raise ConfigError(f"{called}: got another tokenizer than the student, expected the same; use its original")
        return
    for key in ("size", "crop_size", "image_mean", "image_std", "rescale_factor", "do_normalize", "do_resize"):
        got, expected = getattr(teacher, key, None), getattr(student, key, None)
        if got != expected:
            raise ConfigError(f"{called}: got {key} {got}, expected the student's {expected}; use its original")
