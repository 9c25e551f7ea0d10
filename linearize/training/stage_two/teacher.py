"""The teacher of stage two: the softmax model, tuned for the same task, loaded and compared with its student."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.checkpoint.loading import load_processor, move, read_config
from linearize.core.errors import CheckpointError, ConfigError
from linearize.modeling.model import is_linearized
from linearize.training.alignment.pair import check_teacher as check_original_of
from linearize.training.stage_two.load import RECORD, check_length, check_trained, load_for_task, read_record
from linearize.training.stage_two.prepared import TaskData

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.core.heads import Processor

PROBE = "Linear attention reads A Text, twice: 1,024 tokens!"
"""A text that tokenizers with the same vocabulary and different rules cut differently."""


def load_teacher(
    name: str, data: TaskData, student: PreTrainedModel, processor: Processor, max_length: int
) -> PreTrainedModel:
    """Load a tuned softmax model as the teacher of a student.

    Args:
        name: folder or Hub name.
        data: the task's rows.
        student: the model that is tuned, converted or not.
        processor: the student's tokenizer or image processor.
        max_length: tokens per row.

    Returns:
        The teacher, frozen, in evaluation mode, on the student's device.

    Raises:
        ConfigError: if it is converted itself, was not tuned for the task, has another architecture, size, tokenizer or
            label set, or takes fewer tokens than the rows have.
        CheckpointError: if it cannot be loaded.
    """
    check_tuned(name, data)
    check_processor(name, load_processor(name, data.task.modality), processor)
    teacher = load_for_task(name, data)
    check_teacher(teacher, student)
    check_length(teacher, data.task, max_length, called="the teacher", otherwise="tune without a teacher")
    if getattr(teacher.config, "pad_token_id", 0) is None:
        teacher.config.pad_token_id = student.config.pad_token_id
    return freeze(teacher, student)


def freeze(teacher: PreTrainedModel, student: PreTrainedModel) -> PreTrainedModel:
    """Return the teacher in evaluation mode, without gradients, with its student's device and type of numbers."""
    like = next(student.parameters())
    if getattr(teacher.config, "use_cache", False):
        teacher.config.use_cache = False
    return move(teacher, like.device, like.dtype).eval().requires_grad_(False)


def check_tuned(name: str, data: TaskData) -> None:
    """Refuse a checkpoint that cannot teach a task, by its config and its record alone.

    Raises:
        ConfigError: if it is converted, has no trained head for the task, or was tuned for another task.
    """
    values = read_config(name)
    called, task = f"teacher {Path(name).name!r}", data.task
    if values.get("model_type") == "linearize":
        raise ConfigError(
            f"{called}: got a converted model, expected a softmax one; tune the original: linearize finetune ORIGINAL "
            f"--task {task.name}"
        )
    check_trained(name, task)
    try:
        record = read_record(name)
        tuned_for = task.name if record is None else str(record["task"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{str(Path(name).expanduser() / RECORD)!r} cannot be read ({type(error).__name__}); tune the teacher again"
        ) from None
    if tuned_for != task.name:
        raise ConfigError(
            f"{called}: got a model tuned for task {tuned_for}, expected one tuned for {task.name}; tune it first: "
            f"linearize finetune ORIGINAL --task {task.name}"
        )


def check_teacher(teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    """Refuse a teacher whose hidden states and logits cannot be compared with the student's.

    Raises:
        ConfigError: if it is converted, or has another architecture, size, head or label set, or if the student is not
            converted.
    """
    if not is_linearized(student):
        raise ConfigError(
            f"teacher: got a {type(student).__name__} to tune, expected a converted model; convert it first: linearize "
            "convert, or tune it without a teacher"
        )
    check_original_of(student, teacher)


def check_processor(name: str, teacher: Any, student: Any) -> None:
    """Refuse a teacher with another tokenizer or image processor than the student's.

    Raises:
        ConfigError: if they differ.
    """
    called = f"teacher {Path(name).name!r}"
    if hasattr(student, "get_vocab"):
        if teacher.get_vocab() != student.get_vocab() or teacher(PROBE)["input_ids"] != student(PROBE)["input_ids"]:
            raise ConfigError(
                f"{called}: got another tokenizer than the student's, expected the same; use its original"
            )
        return
    for key in ("size", "crop_size", "image_mean", "image_std", "rescale_factor", "do_normalize", "do_resize"):
        got, expected = getattr(teacher, key, None), getattr(student, key, None)
        if got != expected:
            raise ConfigError(
                f"{called}: got images with {key} {got}, expected the student's {expected}; use its original"
            )
