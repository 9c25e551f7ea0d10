"""How long a task's rows are by default, and whether a model takes rows of a length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from linearize.conversion.gguf import located
from linearize.conversion.positions import current_length, extend_positions, extend_processor, runs_beyond_limit
from linearize.core.errors import ConfigError
from linearize.training.stage_two.load import explained, read_config_dict, read_record
from linearize.training.stage_two.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.core.types import Processor

NO_LIMIT = 1_000_000
"""Tokens that no row reaches."""


def usual_length(name: str, most: int = 128) -> int:
    """Return the default length of rows: as the checkpoint was tuned, else `most`, or what a shorter model takes.

    Raises:
        CheckpointError: if the checkpoint has no config that can be read.
    """
    return tuned_length(name) or min(most, length_limit(name) or most)


def length_limit(name: str) -> int | None:
    """Return the most tokens that a checkpoint's model and tokenizer take, by their configs; None: no known limit.

    Raises:
        CheckpointError: if the checkpoint has no config that can be read.
    """
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    values = read_config_dict(name)
    longest = values.get("max_position_embeddings") or values.get("n_positions")
    kind = (values.get("linearize") or {}).get("base_model_type") or values.get("model_type") or ""
    # RoBERTa and its relatives count positions from the padding token's number + 1.
    reserved = (values.get("pad_token_id") or 0) + 1 if "roberta" in kind else 0
    with explained(name, "its tokenizer_config.json"):
        tokenizer = get_tokenizer_config(located(name)[0]).get("model_max_length")
    # transformers writes a number of thirty digits for a tokenizer without a limit.
    known = [number for number in (tokenizer,) if isinstance(number, int) and 1 < number < NO_LIMIT]
    known += [longest - reserved] if isinstance(longest, int) else []
    return min(known, default=None)


def whole_length(name: str, task: Task) -> int:
    """Return the default length of rows that are measured whole.

    As the checkpoint was tuned, else what its model and tokenizer take, and at most `TaskType.most_tokens`: a language
    model's windows could be as long as the text.

    Raises:
        CheckpointError: if the checkpoint has no config that can be read.
    """
    return usual_length(name, task.type.most_tokens or NO_LIMIT)


def tuned_length(name: str) -> int | None:
    """Return the tokens per row that a folder was tuned with, by its record; None if it has none."""
    try:
        length = (read_record(name) or {}).get("max_length")
    except (OSError, ValueError):
        return None
    return length if type(length) is int and length > 1 else None


def beyond_training(model: PreTrainedModel, task: Task, length: int) -> str | None:
    """Refuse rows to measure on that a model cannot read; return a note if they are longer than it was trained on.

    Raises:
        ConfigError: if rows are longer than the model's positions, and these are not rotary.
    """
    most = _exceeded(model, task, length)
    if most is None:
        return None
    return (
        f"Rows have up to {length:,} tokens, but {type(model).__name__} was made for {most:,}: its rotary positions "
        "continue, but it was never trained on those after that."
    )


def fit_positions(model: PreTrainedModel, processor: Processor, task: Task, length: int) -> str | None:
    """Let a model with rotary positions be tuned on longer rows than it was made for; refuse those of other models.

    Returns:
        What was changed, in one line; None if nothing had to be.

    Raises:
        ConfigError: if rows are longer than the model's positions, and these are a table.
        UnsupportedModelError: if they are scaled by the length.
    """
    most = _exceeded(model, task, length)
    if most is None:
        return None
    report = extend_positions(model, length)
    extend_processor(processor, report, model)
    return f"Rows have up to {length:,} tokens, {type(model).__name__} was made for {most:,}: {report.note}."


def _exceeded(model: PreTrainedModel, task: Task, length: int) -> int | None:
    """Return the tokens that a model with rotary positions was made for if rows are longer; refuse those of others."""
    most = current_length(model) if task.modality == "text" else None
    if most is not None and length > most and runs_beyond_limit(model):
        return most
    check_length(model, task, length)
    return None


def check_length(
    model: PreTrainedModel, task: Task, length: int, *, called: str = "", otherwise: str = "convert with --max-length"
) -> None:
    """Refuse rows of text that are longer than the model's positions.

    Args:
        model: the model.
        task: the task; only text has a length.
        length: tokens of the longest row.
        called: how the message names the model; by default its class.
        otherwise: advice besides lowering the length.

    Raises:
        ConfigError: if they are.
    """
    most = current_length(model) if task.modality == "text" else None
    if most is not None and length > most:
        name = called or type(model).__name__
        raise ConfigError(
            f"max_length: {name} takes at most {most} tokens, but rows have up to {length}; lower it, or {otherwise}"
        )
