"""Conversations: the next token of the assistant's turns, one row per conversation.

The tokenizer's chat template writes the text of a conversation; the loss is computed on the assistant's turns alone, as
in `trl`. To find these turns, the template is also applied to the conversation up to each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from linearize.core.errors import ConfigError, DataError
from linearize.training.stage_two.rows import IGNORED, Row, row_facts
from linearize.training.stage_two.splits import Given, need_columns, open_splits
from linearize.training.stage_two.task_types.base import TaskData
from linearize.training.stage_two.task_types.language import CausalType

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"

Message = dict[str, Any]


class Chat(CausalType):
    """Conversations: lists of messages with `role` and `content`."""

    lists = True

    def prepare(self, given: Given) -> TaskData:
        """Read conversations.

        Raises:
            DataError: if the column is missing, holds something else, or the assistant says nothing in any row.
            ConfigError: if the tokenizer has no chat template, or does not map tokens to places in the text.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                "chat: got a tokenizer without a chat template, expected one that can write conversations down; use "
                "the tokenizer of a chat model, or write the conversations as text and use task causal-lm"
            )
        self.fast_tokenizer("chat", "which maps tokens to places in the text")
        splits = open_splits(self.task, given, self.options, raw=True)
        need_columns(splits, self.task.columns, "chat")
        train, _, left_out = self._rows(splits.train) if self.options.trains else ([], [], 0)
        validation, lengths, left_out_too = self._rows(splits.validation)
        silent = left_out + left_out_too
        note = f"; {silent:,} left out, as no answer of the assistant fits" if silent else ""
        facts = row_facts(lengths, self.options)
        return TaskData(self, train, validation, splits.description + note, facts=facts)

    def _rows(self, table: Dataset) -> tuple[list[Row], list[int], int]:
        """Return the rows, their lengths before the cut, and how many conversations have nothing to learn."""
        column, most = self.task.columns[0], self.options.max_length
        rows, lengths, silent = [], [], 0
        for messages in table[column]:
            listed = messages if isinstance(messages, list) else []
            good = all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") is not None for m in listed
            )
            if not good or not listed:
                raise DataError(
                    f"chat: got {str(messages)[:60]!r} in column {column!r}, expected a list of messages with 'role' "
                    "and 'content'; repair the row, or name another column (--columns)"
                )
            # Tables give every message all the fields that any message has.
            given = [{name: value for name, value in m.items() if value is not None} for m in listed]
            ids, spoken = encode(self.tokenizer, given)
            labels = [token if own else IGNORED for token, own in zip(ids[:most], spoken, strict=False)]
            # The first token has nothing before it to be predicted from.
            if not any(label != IGNORED for label in labels[1:]):
                silent += 1
                continue
            lengths.append(len(ids))
            rows.append({"input_ids": ids[:most], "attention_mask": [1] * len(labels), "labels": labels})
        if not rows:
            raise DataError(
                f"chat: got {silent:,} conversations in which the assistant says nothing within {most} tokens, "
                f"expected messages with the role {ASSISTANT!r}; raise max_length, or check column {column!r}"
            )
        return rows, lengths, silent


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Tokenise a conversation as its chat template writes it.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: messages with `role` and `content`.

    Returns:
        The tokens, and whether each of them is the assistant's: from the end of the template's generation prompt to the
        end of the turn, including its end token.

    Raises:
        ConfigError: if the template writes earlier turns differently once later ones follow.
    """
    text = _written(tokenizer, messages)
    spans = []
    for place, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            until = _written(tokenizer, messages[: place + 1])
            before = _written(tokenizer, messages[: place or 1], add_generation_prompt=True)
            if not place:
                # No template writes an empty conversation, but the generation prompt also stands before a first turn.
                opening = before.removeprefix(until)
                before = until[: until.find(opening) + len(opening)] if opening in until else ""
            if not (until.startswith(before) and text.startswith(until)):
                raise ConfigError(
                    "chat: got a chat template that writes a turn differently once others follow it, expected one that "
                    "only adds to what it wrote; set another chat_template in the tokenizer"
                )
            spans.append((len(before), len(until)))
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spoken = [any(begin < end and low <= begin < high for low, high in spans) for begin, end in coded["offset_mapping"]]
    return list(coded["input_ids"]), spoken


def _written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except (TemplateError, TypeError) as error:
        raise DataError(
            f"chat: the chat template refuses a conversation ({error}), expected roles and contents that it supports; "
            "repair the row"
        ) from None
