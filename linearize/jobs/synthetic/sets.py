"""The data sets that are made here, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.core.errors import DataError, UnknownNameError, unknown_name
from linearize.core.options import make as make_config
from linearize.data.local import place_of
from linearize.jobs.synthetic import articles, documents, listops, pixels, recall, retrieval
from linearize.jobs.synthetic.tokenizers import fixed_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from linearize.training.stage_two.prepare import Splits, View

Rows = Mapping[str, Iterable[Mapping[str, object]]]
"""Rows by the name of their split."""


@dataclass(frozen=True)
class Made:
    """A data set made here.

    Attributes:
        tables: `datasets.Dataset` by the name of the split.
        tokenizer: for its vocabulary; None if any tokenizer will do.
        description: one line.
    """

    tables: dict[str, Dataset]
    tokenizer: PreTrainedTokenizerBase | None
    description: str


@dataclass(frozen=True)
class Maker:
    """How a data set is made.

    Attributes:
        config: dataclass of its options.
        make: (options, source) -> (rows by split, description); `source` is a Hub name, file or folder, or None.
        reads: what the source must be; empty if it needs none.
        tokenizer: options -> the tokenizer for its vocabulary; None if any tokenizer will do.
    """

    config: type
    make: Callable[[Any, str | None], tuple[Rows, str]]
    reads: str = ""
    tokenizer: Callable[[Any], PreTrainedTokenizerBase] | None = None


def make(name: str, options: Mapping[str, object] | None = None, source: str | None = None) -> Made:
    """Make a data set.

    Args:
        name: a key of `SETS`.
        options: its options.
        source: what it is made from, if it needs a source.

    Raises:
        UnknownNameError: for an unknown name or option.
        ConfigError: for a value of the wrong type.
        DataError: if it needs a source that is not given or cannot be read.
    """
    from datasets import Dataset

    config = make_options(name, options or {})
    maker = SETS[name]
    if maker.reads and source is None:
        raise DataError(f"{name} is made from {maker.reads}; name it (data=PATH)")
    rows, description = maker.make(config, source)
    tables = {split: Dataset.from_list(list(found)) for split, found in rows.items()}
    counts = ", ".join(f"{len(table):,} {split} rows" for split, table in tables.items())
    tokenizer = None if maker.tokenizer is None else maker.tokenizer(config)
    return Made(tables, tokenizer, f"{description}: {counts}")


def make_options(name: str, options: Mapping[str, object]) -> Any:
    """Check a set's options and return them as its dataclass.

    Raises:
        UnknownNameError: for an unknown set or option.
        ConfigError: for a value that is not allowed.
    """
    if name not in SETS:
        raise unknown_name("made data set", name, SETS)
    try:
        return make_config(SETS[name].config, options)
    except UnknownNameError as error:
        raise UnknownNameError(f"{name}: {error}") from error


def _listops(config: listops.ListOps, source: str | None) -> tuple[Rows, str]:
    return listops.tables(config), f"ListOps of {config.shortest} to {config.longest} tokens, seed {config.seed}"


def _recall(config: recall.AssociativeRecall, source: str | None) -> tuple[Rows, str]:
    description = f"associative recall, {config.vocabulary} tokens, length {config.length}, seed {config.seed}"
    return recall.tables(config), description


def _pathfinder(config: pixels.Pathfinder, source: str | None) -> tuple[Rows, str]:
    return pixels.read_pathfinder(str(source), config), "Pathfinder's released files"


def _released(config: retrieval.Released, source: str | None) -> tuple[Rows, str]:
    return retrieval.read_released(str(source)), "Long Range Arena's released pairs of papers"


def _pixels(config: pixels.Pixels, source: str | None) -> tuple[Rows, str]:
    from linearize.training.stage_two.prepare import open_splits
    from linearize.training.stage_two.tasks import task

    asked = task("image-classification", label=config.label_column)
    splits = open_splits(asked, str(source), limit=config.limit, seed=0)
    names = splits.train.records.names or ()

    def rows(view: View) -> Iterable[dict[str, object]]:
        for place in range(len(view) if config.limit is None else min(config.limit, len(view))):
            example = view.fetch([place])[0]
            # Reading leaves rows without a label out.
            assert example.label is not None
            number = names.index(example.label) if isinstance(example.label, str) else int(example.label)
            yield {"text": pixels.pixel_text(example.value, config.side), "label": number}

    return {"train": rows(splits.train), "validation": rows(splits.validation)}, f"pixels of {splits.description}"


def _halves(config: retrieval.Halves, source: str | None) -> tuple[Rows, str]:
    splits = _lines(source, config.text_column, config.seed)
    texts = {"train": splits.train[config.text_column], "validation": splits.validation[config.text_column]}
    rows = {split: retrieval.halves(config, [text for text in column if text]) for split, column in texts.items()}
    return rows, f"halves of the texts of {splits.description}"


def _articles(config: articles.Articles, source: str | None) -> tuple[Rows, str]:
    splits = _lines(source, config.text_column, 0)
    lines = {"train": splits.train[config.text_column], "validation": splits.validation[config.text_column]}
    joined = {split: articles.articles(config, column) for split, column in lines.items()}
    alike = f", both halves beginning with the same {config.opening} words" if config.opening else ""
    rows = articles.open_alike(config, articles.resplit(config, joined))
    return rows, f"articles of {config.shortest} words or more{alike}"


def _documents(config: documents.Documents, source: str | None) -> tuple[Rows, str]:
    from linearize.training.stage_two.prepare import open_splits
    from linearize.training.stage_two.tasks import task

    asked = task("text-classification", columns=(config.text_column,), label=config.label_column)
    splits = open_splits(asked, str(source), limit=None, seed=config.seed, raw=True)
    fillers: Splits | None = None
    if config.filler:
        place = place_of(config.filler, str(Path(str(source)).parent), called="documents: filler")
        fillers = _lines(place, config.filler_column, config.seed)
    rows = {
        split: documents.documents(
            config,
            table[config.text_column],
            table[config.label_column],
            count,
            seed,
            None if fillers is None else getattr(fillers, split)[config.filler_column],
        )
        for split, table, count, seed in (
            ("train", splits.train, config.train, config.seed),
            ("validation", splits.validation, config.validation, config.seed + 1),
        )
    }
    others = "" if fillers is None else f", the others of {fillers.description}"
    decides = documents.DECIDES[config.decides]
    return rows, f"documents of {config.parts} texts, {decides}, of {splits.description}{others}"


def _lines(source: str | None, column: str, seed: int) -> Splits:
    """Open the splits of a corpus unchanged."""
    from linearize.training.stage_two.prepare import open_splits
    from linearize.training.stage_two.tasks import task

    return open_splits(task("causal-lm", columns=(column,)), str(source), limit=None, seed=seed, raw=True)


SETS: dict[str, Maker] = {
    "listops": Maker(listops.ListOps, _listops, tokenizer=lambda config: fixed_tokenizer(listops.TOKENS)),
    "associative-recall": Maker(
        recall.AssociativeRecall,
        _recall,
        tokenizer=lambda config: fixed_tokenizer(recall.tokens(config), framed=False),
    ),
    "pixels": Maker(
        pixels.Pixels, _pixels, "an image data set", tokenizer=lambda config: fixed_tokenizer(pixels.tokens())
    ),
    "pathfinder": Maker(
        pixels.Pathfinder,
        _pathfinder,
        "Pathfinder's released files",
        tokenizer=lambda config: fixed_tokenizer(pixels.tokens()),
    ),
    "articles": Maker(articles.Articles, _articles, "a corpus of lines under headings"),
    "documents": Maker(documents.Documents, _documents, "a data set of texts with classes"),
    "retrieval": Maker(retrieval.Released, _released, "Long Range Arena's released files"),
    "retrieval-halves": Maker(retrieval.Halves, _halves, "a data set of long texts"),
}
