"""The data sets that are made here, by name."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.data.local import place_of
from linearize.errors import ConfigError, DataError, unknown_name
from linearize.registry import KINDS
from linearize.synthetic import articles, documents, listops, pixels, recall, retrieval
from linearize.synthetic.tokenizers import fixed_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from linearize.finetune.tables import Splits, View


@dataclass(frozen=True)
class Made:
    """A data set made here.

    Attributes:
        tables: `datasets.Dataset` by the name of the split.
        tokenizer: for its vocabulary; None where any tokenizer will do.
        description: one line.
    """

    tables: dict[str, Dataset]
    tokenizer: PreTrainedTokenizerBase | None
    description: str


@dataclass(frozen=True)
class Maker:
    """How one is made.

    Attributes:
        config: dataclass of its options.
        make: (options, source) -> the data set; `source` is a Hub name, file or folder, or None.
        reads: what the source must be; empty if it is made of nothing.
    """

    config: type
    make: Callable[[Any, str | None], Made]
    reads: str = ""


def make(name: str, options: Mapping[str, object] | None = None, source: str | None = None) -> Made:
    """Make a data set.

    Args:
        name: a key of `SETS`.
        options: its options.
        source: what it is made of, where it is made of something.

    Raises:
        UnknownNameError: for an unknown name or option.
        ConfigError: for a value of the wrong type.
        DataError: if it needs a source and there is none, or that cannot be read.
    """
    config = make_options(name, options or {})
    maker = SETS[name]
    if maker.reads and source is None:
        raise DataError(f"{name} is made of {maker.reads}; name it (data=PATH)")
    return maker.make(config, source)


def make_options(name: str, options: Mapping[str, object]) -> Any:
    """Check a set's options and return them as its dataclass.

    Raises:
        UnknownNameError: for an unknown set or option.
        ConfigError: for a value of the wrong type.
    """
    if name not in SETS:
        raise unknown_name("made data set", name, SETS)
    config = SETS[name].config
    hints = typing.get_type_hints(config)
    known = {field.name for field in dataclasses.fields(config)}
    for key, value in options.items():
        if key not in known:
            raise unknown_name(f"option of {name}", key, known)
        kinds = typing.get_args(hints[key]) or (hints[key],)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ConfigError(f"{name}, {key}: got {value!r}, expected {KINDS[kinds[0]]}")
    return config(**options)


def _tables(rows: Mapping[str, Iterable[Mapping[str, object]]]) -> dict[str, Dataset]:
    from datasets import Dataset

    return {split: Dataset.from_list(list(found)) for split, found in rows.items()}


def _said(rows: Mapping[str, Sized]) -> str:
    return ", ".join(f"{len(found):,} {split} rows" for split, found in rows.items())


def _listops(config: listops.ListOps, source: str | None) -> Made:
    found = listops.tables(config)
    description = f"ListOps of {config.shortest} to {config.longest} tokens, seed {config.seed}: {_said(found)}"
    return Made(_tables(found), fixed_tokenizer(listops.TOKENS), description)


def _recall(config: recall.AssociativeRecall, source: str | None) -> Made:
    found = recall.tables(config)
    description = (
        f"associative recall, {config.vocabulary} tokens, length {config.length}, seed {config.seed}: {_said(found)}"
    )
    return Made(_tables(found), fixed_tokenizer(recall.tokens(config), framed=False), description)


def _pathfinder(config: pixels.Pathfinder, source: str | None) -> Made:
    found = pixels.read_pathfinder(str(source), config)
    return Made(_tables(found), fixed_tokenizer(pixels.tokens()), f"Pathfinder's released files: {_said(found)}")


def _released(config: retrieval.Released, source: str | None) -> Made:
    found = retrieval.read_released(str(source))
    return Made(_tables(found), None, f"Long Range Arena's released pairs of papers: {_said(found)}")


def _pixels(config: pixels.Pixels, source: str | None) -> Made:
    from linearize.finetune.tables import open_splits
    from linearize.finetune.tasks import task

    asked = task("image-classification", label=config.label_column)
    splits = open_splits(asked, str(source), limit=config.limit, seed=0)
    names = splits.train.names

    def rows(view: View) -> list[dict[str, object]]:
        made = []
        for place in range(len(view) if config.limit is None else min(config.limit, len(view))):
            example = view.fetch([place])[0]
            label = example.label
            # Rows without one are left out when they are read.
            assert label is not None
            number = (names or ()).index(label) if isinstance(label, str) else int(label)
            made.append({"text": pixels.pixel_text(example.value, config.side), "label": number})
        return made

    found = {"train": rows(splits.train), "validation": rows(splits.validation)}
    return Made(_tables(found), fixed_tokenizer(pixels.tokens()), f"pixels of {splits.description}")


def _halves(config: retrieval.Halves, source: str | None) -> Made:
    splits = _lines(source, config.text_column, config.seed)
    found = {
        split: retrieval.halves(config, [text for text in table[config.text_column] if text])
        for split, table in (("train", splits.train), ("validation", splits.validation))
    }
    return Made(_tables(found), None, f"halves of the texts of {splits.description}")


def _articles(config: articles.Articles, source: str | None) -> Made:
    splits = _lines(source, config.text_column, 0)
    found = {
        split: articles.articles(config, table[config.text_column])
        for split, table in (("train", splits.train), ("validation", splits.validation))
    }
    found = articles.open_alike(config, articles.split_anew(config, found))
    alike = f", both halves behind the same {config.opening} words" if config.opening else ""
    return Made(_tables(found), None, f"articles of {config.shortest} words or more{alike}: {_said(found)}")


def _documents(config: documents.Documents, source: str | None) -> Made:
    from linearize.finetune.tables import open_splits
    from linearize.finetune.tasks import task

    asked = task("text-classification", columns=(config.text_column,), label=config.label_column)
    splits = open_splits(asked, str(source), limit=None, seed=config.seed, raw=True)
    other: Splits[Dataset] | None = None
    if config.filler:
        beside = place_of(config.filler, str(Path(str(source)).parent), called="documents: filler")
        other = _lines(beside, config.filler_column, config.seed)
    found = {
        split: documents.documents(
            config,
            table[config.text_column],
            table[config.label_column],
            count,
            seed,
            None if other is None else getattr(other, split)[config.filler_column],
        )
        for split, table, count, seed in (
            ("train", splits.train, config.train, config.seed),
            ("validation", splits.validation, config.validation, config.seed + 1),
        )
    }
    between = "" if other is None else f", the others of {other.description}"
    description = (
        f"documents of {config.parts} texts, {documents.DECIDES[config.decides]}, of {splits.description}{between}: "
    )
    description += _said(found)
    return Made(_tables(found), None, description)


def _lines(source: str | None, column: str, seed: int) -> Splits[Dataset]:
    """Open the splits of a corpus as they are."""
    from linearize.finetune.tables import open_splits
    from linearize.finetune.tasks import task

    return open_splits(task("causal-lm", columns=(column,)), str(source), limit=None, seed=seed, raw=True)


SETS: dict[str, Maker] = {
    "listops": Maker(listops.ListOps, _listops),
    "associative-recall": Maker(recall.AssociativeRecall, _recall),
    "pixels": Maker(pixels.Pixels, _pixels, "an image data set"),
    "pathfinder": Maker(pixels.Pathfinder, _pathfinder, "Pathfinder's released files"),
    "articles": Maker(articles.Articles, _articles, "a corpus of lines under headings"),
    "documents": Maker(documents.Documents, _documents, "a data set of texts with classes"),
    "retrieval": Maker(retrieval.Released, _released, "Long Range Arena's released files"),
    "retrieval-halves": Maker(retrieval.Halves, _halves, "a data set of long texts"),
}
