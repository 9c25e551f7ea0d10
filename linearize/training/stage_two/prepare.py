"""Open a task's data set by the task's type, with texts of other data sets for a teacher to label."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linearize.core.errors import ConfigError, DataError
from linearize.core.options import name_of
from linearize.data.columns import column_kinds, find_column, find_pair, listed, uniform
from linearize.data.config import DataConfig
from linearize.data.local import looks_local, place_of
from linearize.data.records import Example, TextRecords, text_digest
from linearize.data.walk import exists
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.prepared import TaskData
from linearize.training.stage_two.tables import Given, local_folder, raw_table
from linearize.training.stage_two.task import Task

if TYPE_CHECKING:
    from linearize.core.types import Processor

FETCH_ROWS = 1_000
_STREAM = 0x7E87
"""Separates the choice of texts from other random numbers of the same seed."""


def prepare(
    task: Task, processor: Processor, options: DataOptions | None = None, *, data: Given | None = None
) -> TaskData:
    """Open a task's data set and make its rows, to train on and to measure on.

    Args:
        task: what to read, from `linearize.training.stage_two.tasks.task`.
        processor: the model's tokenizer or image processor; it is not changed.
        options: lengths, limits and seeds.
        data: what to read instead of the task's Hub data set: a Hub name, a file, a folder, a folder of data sets with
            one folder per task, or tables by the name of their split.

    Raises:
        DataError: if there is no data, or it does not fit the task.
        ConfigError: if the options do not fit the task.
    """
    options = options or DataOptions()
    check_unlabelled(task, options)
    given = task.dataset if data is None else data
    if given is None:
        raise DataError(f"task {task.name} has no data set; name one (--dataset NAME_OR_PATH)")
    if given == "":
        raise DataError("data: got an empty data set name, expected a Hub name, a file or a folder")
    # The recorded options keep the names as the user gave them: a resumed run may read the data at another place.
    texts = tuple((texts_at(name, given), share) for name, share in options.text_sources)
    rows = dataclasses.replace(options, extra_texts=texts) if texts else options
    return dataclasses.replace(task.type(task, processor, rows).prepare(located(task, given)), options=options)


def check_unlabelled(task: Task, options: DataOptions) -> None:
    """Refuse rows without a label if the task's rows do not have one label each for a teacher to give.

    Raises:
        ConfigError: naming the option.
    """
    if options.unlabelled and not task.type.row_labels:
        name = options.unlabelled[0]
        reads = "reads no pairs" if name == "extra_pairs" else "reads no texts with a class or a number each"
        raise ConfigError(f"data, {name}: got {getattr(options, name)!r}, but task {task.name} {reads}; drop it")


def located(task: Task, given: Given) -> Given:
    """Return the task's own folder if a folder of data sets is given; anything else unchanged.

    Raises:
        DataError: if a path does not exist, or the folder lacks the task's.
    """
    local = isinstance(given, str) and (looks_local(given) or exists(Path(given).expanduser()))
    return local_folder(task, str(given)) if local else given


def texts_at(name: str, data: Given | None) -> str:
    """Return where a data set of texts is: in the folder that the task is read from, or where its name says.

    Args:
        name: as the user wrote it.
        data: what the task itself is read from.

    Raises:
        DataError: if it is nowhere, as far as can be told without asking the Hub.
    """
    return place_of(name, data if isinstance(data, str) else None, called="extra_texts")


@dataclass(frozen=True)
class ExtraTexts:
    """Texts (or pairs of texts) without a label.

    Attributes:
        examples: [N] the texts.
        sources: [N] for each the training rows that share a text with it: it is left out if one of them is held out.
        description: how many there are, and of which data sets.
    """

    examples: list[Example]
    sources: list[tuple[int, ...]]
    description: str


def extra_texts(task: Task, train: Sequence[Example], measured: Sequence[Example], options: DataOptions) -> ExtraTexts:
    """Choose, by the seed, texts that are new to the task from the data sets that the options name.

    A larger number of texts keeps those of a smaller one. Columns are the task's, if a data set has them, or else found
    as those of any text; if the task reads one text, both texts of a pair are used.

    Args:
        task: says the columns and the split.
        train: the task's training rows; each data set gives its number of texts per such row, or all that it has.
        measured: the rows that are measured on. None of their texts is chosen, alone or in a pair.
        options: what to read, and the seed.

    Raises:
        DataError: if a data set cannot be read, has no clear column of text or no pairs for a task that reads them, or
            has no new text.
    """
    known = {text_digest(row.value, row.pair) for row in (*train, *measured)}
    kept_away = {text for row in measured for text in _texts(row)}
    owners: dict[str, list[int]] = {}
    for place, row in enumerate(train):
        for text in _texts(row):
            owners.setdefault(text, []).append(place)
    chosen: list[Example] = []
    counts: list[str] = []
    pairs = train[0].pair is not None
    for number, (name, share) in enumerate(options.text_sources):
        records = _open(task, name, pairs)
        wanted = max(1, round(min(share * len(train), 2 * len(records.sizes))))
        before = len(chosen)
        for example in _shuffled(records, np.random.default_rng([options.seed, _STREAM, number]), pairs):
            if len(chosen) - before == wanted:
                break
            key = text_digest(example.value, example.pair)
            if key not in known and kept_away.isdisjoint(_texts(example)):
                known.add(key)
                chosen.append(example)
        count = len(chosen) - before
        if not count:
            raise DataError(
                f"extra_texts: got no text in {name!r} that is not among the task's rows already, expected others; "
                "name another data set, or leave it out"
            )
        counts.append(f"{'all ' if count < wanted else ''}{count:,} of {name_of(name)}")
    sources = [tuple(sorted({place for text in _texts(row) for place in owners.get(text, ())})) for row in chosen]
    called = "pairs" if pairs else "texts"
    return ExtraTexts(chosen, sources, f"{len(chosen):,} {called} without a label ({', '.join(counts)})")


def _texts(row: Example) -> list[str]:
    """Return the texts of a row, without white space around them, which does not make a text new."""
    return [text.strip() for text in (row.value, row.pair) if text is not None]


def _shuffled(records: TextRecords, chance: np.random.Generator, pairs: bool) -> Iterator[Example]:
    """Give all rows in random order; unless pairs are read, both texts of a pair separately."""
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
        DataError: if it cannot be read, or its columns are not clear.
    """
    try:
        table = raw_table(name, task.train)
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
