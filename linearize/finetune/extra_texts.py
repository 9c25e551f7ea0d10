"""Texts without a label beside a task's rows: read from other data sets, for a teacher to say something about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from linearize.data.columns import column_kinds, find_column, find_pair, listed, uniform
from linearize.data.config import DataConfig
from linearize.data.local import place_of
from linearize.data.records import Example, TextRecords, text_digest
from linearize.errors import DataError
from linearize.finetune.config import DataOptions
from linearize.finetune.tables import Given, raw_table
from linearize.finetune.task import Task
from linearize.options import name_of

if TYPE_CHECKING:
    from datasets import Dataset

FETCH_ROWS = 1_000
_STREAM = 0x7E87
"""Keeps this choice apart from other random numbers of the same seed."""


@dataclass(frozen=True)
class ExtraTexts:
    """Texts (or pairs of texts) without a label.

    Attributes:
        examples: [N] the texts.
        sources: [N] of each the training rows that it shares a text with: it is left out where one of them is held out.
        description: how many there are, and of which data sets.
    """

    examples: list[Example]
    sources: list[tuple[int, ...]]
    description: str


def texts_at(name: str, data: Given | None) -> str:
    """Return where a data set of texts lies: in the folder that the task is read from, or where its name says.

    Args:
        name: as the user wrote it.
        data: what the task itself is read from.

    Raises:
        DataError: if it is nowhere, as far as can be told without asking the Hub.
    """
    return place_of(name, data if isinstance(data, str) else None, called="extra_texts")


def extra_texts(task: Task, train: Sequence[Example], measured: Sequence[Example], options: DataOptions) -> ExtraTexts:
    """Choose texts of the data sets that the options name: those that are new to the task, by the seed.

    More of them keep those of fewer. Columns are the task's, where a data set has them, or else found as those of any
    text; where the task reads one text, both texts of a pair are texts.

    Args:
        task: says the columns and the split.
        train: the task's training rows; each data set gives its number of texts per such row, or all that it has.
        measured: the rows that are measured on. No text of theirs is chosen, alone or in a pair.
        options: what to read, and the seed.

    Raises:
        DataError: if a data set cannot be read, has no clear column of text or no pairs for a task that reads them, or
            has no text that is new.
    """
    known = {text_digest(row.value, row.pair) for row in (*train, *measured)}
    kept_away = {text for row in measured for text in _texts(row)}
    owners: dict[str, list[int]] = {}
    for place, row in enumerate(train):
        for text in _texts(row):
            owners.setdefault(text, []).append(place)
    found: list[Example] = []
    counts: list[str] = []
    pairs = train[0].pair is not None
    for number, (name, share) in enumerate(options.text_sources):
        records = _open(task, name, pairs)
        wanted = max(1, round(min(share * len(train), 2 * len(records.sizes))))
        chance = np.random.default_rng([options.seed, _STREAM, number])
        before = len(found)
        for example in _shuffled(records, chance, pairs):
            if len(found) - before == wanted:
                break
            key = text_digest(example.value, example.pair)
            if key in known or not kept_away.isdisjoint(_texts(example)):
                continue
            known.add(key)
            found.append(example)
        count = len(found) - before
        if not count:
            raise DataError(
                f"extra_texts: got no text in {name!r} that is not among the task's rows already, expected others; "
                "name another data set, or leave it out"
            )
        counts.append(f"{'all ' if count < wanted else ''}{count:,} of {name_of(name)}")
    sources = [tuple(sorted({place for text in _texts(row) for place in owners.get(text, ())})) for row in found]
    called = "pairs" if pairs else "texts"
    return ExtraTexts(found, sources, f"{len(found):,} {called} without a label ({', '.join(counts)})")


def _texts(row: Example) -> list[str]:
    """Return the texts of a row; white space around a text does not make it another one."""
    return [text.strip() for text in (row.value, row.pair) if text is not None]


def _shuffled(records: TextRecords, chance: np.random.Generator, pairs: bool) -> Iterator[Example]:
    """Give all rows in an order that the seed decides; unless pairs are read, both texts of a pair by themselves."""
    order = chance.permutation(len(records.sizes)).tolist()
    for begin in range(0, len(order), FETCH_ROWS):
        for row in records.fetch(order[begin : begin + FETCH_ROWS]):
            if pairs:
                yield row
            else:
                yield from (Example(text) for text in (row.value, row.pair) if text is not None)


def _open(task: Task, name: str, pairs: bool) -> TextRecords:
    """Open a data set's training split with its columns of text.

    Raises:
        DataError: see `extra_texts`.
    """
    try:
        table: Dataset = raw_table(name, task.train)
        first, second = _columns(task, column_kinds(table, repr(name)), name, pairs)
        config = DataConfig(text_column=first, text_pair_column=second)
        records = TextRecords(uniform(table, config, "text", repr(name)))
    except DataError as error:
        if str(error).startswith("extra_texts"):
            raise
        raise DataError(f"extra_texts: {error}") from error
    if not len(records.sizes):
        raise DataError(f"extra_texts: got {records.skipped} rows in {name!r}, all blank, expected texts; repair it")
    return records


def _columns(task: Task, kinds: dict[str, str], name: str, pairs: bool) -> tuple[str, str | None]:
    if task.columns and all(kinds.get(column) == "text" for column in task.columns):
        first, second = (*task.columns, None)[:2]
        return str(first), second
    pair = find_pair(kinds)
    if pair is not None:
        return pair
    if pairs:
        raise DataError(
            f"extra_texts: got no pairs of texts in {name!r}, expected some for task {task.name}; call the two columns "
            f"as the task's or sentence1 and sentence2; its columns are: {listed(kinds)}"
        )
    try:
        return find_column(kinds, None, "text", name), None
    except DataError:
        wanted = task.columns[0] if task.columns else "text"
        raise DataError(
            f"extra_texts: got no clear column of text in {name!r}, expected one; call it {wanted!r}; its columns are: "
            f"{listed(kinds)}"
        ) from None
