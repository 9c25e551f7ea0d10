"""Conversations: the next token of the assistant's turns, one row per conversation.

The tokenizer's chat template writes the text of a conversation; the loss is computed on the assistant's turns alone, as
in `trl`. To find these turns, the template is also applied to the conversation up to each of them. A column `tools`
lists the functions that the assistant may call in a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from linearize.core.errors import ConfigError, DataError
from linearize.core.registry import Values
from linearize.training.stage_two.rows import IGNORED, Row, row_facts
from linearize.training.stage_two.splits import Given, need_columns, open_splits
from linearize.training.stage_two.task_types.base import TaskData
from linearize.training.stage_two.task_types.language import CausalType

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"

Message = Values


class Chat(CausalType):
    """Conversations: lists of messages with `role`, and `content` or `tool_calls`."""

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
        offered = table["tools"] if "tools" in table.column_names else [None] * len(table)
        rows: list[Row] = []
        lengths, silent = [], 0
        for number, (given, tools) in enumerate(zip(table[column], offered, strict=True)):
            learned = len(rows)
            for ids, spoken in encode(self.tokenizer, read_messages(given, column), read_tools(tools)):
                labels = [token if own else IGNORED for token, own in zip(ids[:most], spoken, strict=False)]
                # The first token has nothing before it to be predicted from.
                if any(label != IGNORED for label in labels[1:]):
                    lengths.append(len(ids))
                    mask = [1] * len(labels)
                    rows.append({"input_ids": ids[:most], "attention_mask": mask, "labels": labels, "owner": number})
            silent += learned == len(rows)
        if not rows:
            raise DataError(
                f"chat: got {silent:,} conversations in which the assistant says nothing within {most} tokens, "
                f"expected messages with the role {ASSISTANT!r}; raise max_length, or check column {column!r}"
            )
        if len({row["owner"] for row in rows}) == len(rows):
            for row in rows:
                del row["owner"]
        return rows, lengths, silent


def read_messages(given: object, column: str) -> list[Message]:
    """Return the messages of a conversation, without the empty fields that tables give every message.

    Raises:
        DataError: if one has no role, or neither content nor tool calls.
    """
    good = isinstance(given, list) and bool(given)
    for place, message in enumerate(given if isinstance(given, list) else ()):
        good = good and isinstance(message, dict) and isinstance(message.get("role"), str)
        if good and message.get("content") is None and not message.get("tool_calls"):
            raise DataError(
                f"chat: got a message of role {message['role']!r} (number {place}, from 0) without content and without "
                f"tool_calls in column {column!r}, expected one of them; repair the row"
            )
    if not good or not isinstance(given, list):
        raise DataError(
            f"chat: got {str(given)[:60]!r} in column {column!r}, expected a list of messages with 'role' and "
            "'content'; repair the row, or name another column (--columns)"
        )
    # Templates concatenate contents, or ask whether they are texts.
    return [{"content": "", **_filled(message)} for message in given]


def read_tools(given: object) -> list[object] | None:
    """Return the tools of a conversation, a list or its JSON; None without tools.

    Raises:
        DataError: if they are something else.
    """
    try:
        tools = json.loads(given) if given and isinstance(given, str) else given or []
    except ValueError:
        tools = given
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"chat: got {str(given)[:60]!r} in column 'tools', expected a list of JSON schemas; repair the row"
        )
    return [_filled(tool) for tool in tools] if tools else None


def _filled(value: object) -> Any:
    """Return nested data without empty fields: a table gives every mapping the fields of all."""
    if isinstance(value, dict):
        return {name: _filled(one) for name, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list) else value


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[object] | None = None
) -> list[tuple[list[int], list[bool]]]:
    """Tokenise a conversation as its chat template writes it.

    Some templates write an answer differently once others follow, such as without its thoughts. Such an answer is
    learned in a separate row that ends with it, as the model will have to write it.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: messages with `role` and `content`.
        tools: schemas of the functions that the assistant may call.

    Returns:
        Rows. For each, the tokens, and whether each of them is the assistant's: from the end of the template's
        generation prompt to the end of the turn, including its end token. Every answer is in one row.

    Raises:
        ConfigError: if the template writes what precedes an answer differently once the answer follows.
        DataError: if it refuses the conversation, or leaves out its tools or tool calls.
    """
    spans: dict[str, list[tuple[int, int]]] = {_written(tokenizer, messages, tools=tools): []}
    _check_functions(next(iter(spans)), messages, tools)
    for place in reversed(range(len(messages))):
        if messages[place]["role"] != ASSISTANT:
            continue
        until = _written(tokenizer, messages[: place + 1], tools=tools)
        before = _written(tokenizer, messages[: place or 1], tools=tools, add_generation_prompt=True)
        if not place:
            # No template writes an empty conversation, but the generation prompt also stands before a first turn.
            opening = before.removeprefix(until)
            before = until[: until.find(opening) + len(opening)] if opening in until else ""
        if not until.startswith(before):
            raise ConfigError(
                "chat: got a chat template that writes what precedes an answer differently once the answer follows, "
                "expected one that only adds the answer; set another chat_template in the tokenizer"
            )
        row = next((text for text in spans if text.startswith(until)), until)
        spans.setdefault(row, []).append((len(before), len(until)))
    rows = []
    for text, places in spans.items():
        if places or len(spans) == 1:
            coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            offsets = coded["offset_mapping"]
            spoken = [any(begin < end and low <= begin < high for low, high in places) for begin, end in offsets]
            rows.append((list(coded["input_ids"]), spoken))
    return rows


def _check_functions(text: str, messages: Sequence[Message], tools: Sequence[object] | None) -> None:
    """Refuse a template that does not write the names of the tools, and of those that are called."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for what, functions in (("tools", tools or ()), ("tool_calls", calls)):
        for function in functions:
            name = (function.get("function") or function).get("name") if isinstance(function, dict) else None
            if not isinstance(name, str) or name not in text:
                raise DataError(
                    f"chat: got {what} with the function {name!r}, which the chat template does not write, expected a "
                    "template for tools; set another chat_template in the tokenizer, or remove them from the data"
                )


def _written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"chat: the chat template refuses a conversation ({error}), expected roles and contents that it supports; "
            "repair the row"
        ) from None
