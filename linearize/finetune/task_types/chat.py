"""Conversations: next token of what the assistant says, a row for each conversation.

The tokenizer's chat template writes a conversation down; the loss is taken on the assistant's turns alone, as `trl` has
it. Where they are in the text follows from the template itself: it is asked for the conversation up to each turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from linearize.errors import ConfigError, DataError
from linearize.finetune.prepared import (
    IGNORED,
    DataOptions,
    Rows,
    TaskData,
    copy_tokenizer,
    pad_with_labels,
    row_facts,
)
from linearize.finetune.tables import Given, need_columns, open_splits
from linearize.finetune.task import Task
from linearize.finetune.task_types.language import causal_by_position, causal_sums, perplexity_of_sums

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"

Message = dict[str, Any]


def prepare(task: Task, given: Given, processor: PreTrainedTokenizerBase, options: DataOptions) -> TaskData:
    """Read conversations: lists of messages with `role` and `content`.

    Raises:
        DataError: if the column is missing, holds something else, or the assistant says nothing in any row.
        ConfigError: if the tokenizer has no chat template, or cannot tell where a token stands in the text.
    """
    tokenizer = copy_tokenizer(processor)
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "chat: got a tokenizer without a chat template, expected one that can write conversations down; take the "
            "tokenizer of a chat model, or write the conversations as text and use task causal-lm"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("chat: got a slow tokenizer, expected a fast one, which knows where in the text a token is")
    splits = open_splits(task, given, limit=options.limit, seed=options.seed, raw=True, most=options.validation_limit)
    column = task.columns[0]
    train, _, left_out = _rows(splits.train, column, tokenizer, options)
    validation, lengths, left_out_too = _rows(splits.validation, column, tokenizer, options)
    silent = left_out + left_out_too
    said = f"; {silent:,} left out, in which the assistant says nothing that fits" if silent else ""
    return TaskData(
        task,
        train,
        validation,
        partial(pad_with_labels, tokenizer),
        perplexity_of_sums,
        splits.description + said,
        reduce=causal_sums,
        by_position=causal_by_position,
        facts=row_facts(lengths, options),
    )


def _rows(
    table: Dataset, column: str, tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> tuple[Rows, list[int], int]:
    """Return the rows, the lengths of the whole conversations, and how many have nothing to learn from."""
    need_columns(table, [column], "chat")
    rows, lengths, silent = [], [], 0
    for messages in table[column]:
        ids, spoken = encode(tokenizer, _checked(messages, column))
        kept = ids[: options.max_length]
        labels = [token if own else IGNORED for token, own in zip(kept, spoken, strict=False)]
        # The first token has nothing before it to be predicted from.
        if not any(label != IGNORED for label in labels[1:]):
            silent += 1
            continue
        lengths.append(len(ids))
        rows.append({"input_ids": kept, "attention_mask": [1] * len(kept), "labels": labels})
    if not rows:
        raise DataError(
            f"chat: got {silent:,} conversations in which the assistant says nothing within {options.max_length} "
            f"tokens, expected messages with the role {ASSISTANT!r}; raise max_length, or check column {column!r}"
        )
    return Rows(rows), lengths, silent


def _checked(messages: object, column: str) -> list[Message]:
    found = messages if isinstance(messages, list) else []
    good = all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and one.get("content") is not None for one in found
    )
    if not good or not found:
        raise DataError(
            f"chat: got {str(messages)[:60]!r} in column {column!r}, expected a list of messages with 'role' and "
            "'content'; repair the row, or name another column (--columns)"
        )
    # Tables give every message all the fields that any has.
    return [{name: value for name, value in one.items() if value is not None} for one in found]


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Write a conversation down and tokenise it.

    Args:
        tokenizer: fast, with a chat template.
        messages: with `role` and `content`.

    Returns:
        Its tokens, and of each whether it is the assistant's: from behind what the template puts before an answer, to
        the end of the turn, its end token included.

    Raises:
        ConfigError: if the template writes earlier turns differently once later ones follow.
    """
    text = _written(tokenizer, messages)
    spans = []
    for place, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before = _written(tokenizer, messages[:place], add_generation_prompt=True) if place else ""
            until = _written(tokenizer, messages[: place + 1])
            if not (until.startswith(before) and text.startswith(until)):
                raise ConfigError(
                    "chat: got a chat template that writes a turn differently once others follow it, expected one that "
                    "only adds to what it wrote; set another chat_template in the tokenizer"
                )
            spans.append((len(before), len(until)))
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spoken = [any(begin < end and low <= begin < high for low, high in spans) for begin, end in coded["offset_mapping"]]
    return list(coded["input_ids"]), spoken


def _written(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> str:
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
        )
    except TemplateError as error:
        raise DataError(
            f"chat: the chat template refuses a conversation ({error}), expected roles as it knows them; repair the row"
        ) from None
