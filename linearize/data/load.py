"""Open a data set as a source of batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from linearize.core.errors import ConfigError, DataError, unknown_name
from linearize.core.heads import Modality, Processor
from linearize.core.parsing import user_path
from linearize.data.builtin import CROPS, DEFAULT_IMAGES, DEFAULT_TEXT, Crops, prose
from linearize.data.columns import column_kinds, find_pair, in_order, uniform
from linearize.data.config import DataConfig
from linearize.data.encode import TextEncoder, make_encoder
from linearize.data.hub import cause, load_hub, unreachable
from linearize.data.images import ImageFile, ImageFiles, ImageTable
from linearize.data.local import check_classes, exists, looks_local, open_local
from linearize.data.records import PackedRecords, Records, TextRecords
from linearize.data.source import Chosen, Source, split_off

if TYPE_CHECKING:
    from datasets import Dataset

Part = tuple[Records, str]
"""One opened data set, and its name for messages."""


def load_source(config: DataConfig, processor: Processor, modality: Modality) -> Source:
    """Open the data and set the held-out examples aside.

    Args:
        config: Which data, and how it becomes batches.
        processor: The model's tokenizer or image processor, or a processor that has one. It is not changed.
        modality: ``"text"`` or ``"image"``.

    Returns:
        The source of batches. Its description names the data that was chosen.

    Raises:
        ConfigError: If the modality, the processor and the config do not match.
        DataError: If the data cannot be found, read or used.
    """
    if modality not in ("text", "image"):
        raise unknown_name("modality", str(modality), ("text", "image"))
    if modality == "image":
        for name in ("packing", "text_column", "text_pair_column"):
            if getattr(config, name):
                raise ConfigError(f"data: got {name} for a model that reads images, expected it for text; drop it.")
    elif config.image_column:
        raise ConfigError("data: got image_column for a model that reads text; drop it.")
    encoder = make_encoder(processor, modality, config.max_length, config.packing)
    parts, fallback = [open_records(name, config, modality) for name, _ in config.sources], False
    weights = [weight for _, weight in config.sources]
    if not parts:
        part, fallback = _open_default(config, modality)
        parts, weights = [part], [1.0]
    records = [part for part, _ in parts]
    holdout = config.held_out(sum(len(part.sizes) for part in records))
    rows_held, rows_train, duplicates = split_off(records, weights, holdout, config.seed)
    train, held = Chosen(records, rows_train), Chosen(records, rows_held)
    if isinstance(encoder, TextEncoder) and config.packing:
        # The training texts are packed part by part, and all held-out ones together, in the order of the data.
        packed: list[Records] = []
        for own, rows in zip(records, rows_train, strict=True):
            full = list(encoder.pack(_texts(own, rows), keep_rest=False))
            packed.append(PackedRecords(full or list(encoder.pack(_texts(own, rows), keep_rest=True))))
        texts = chain.from_iterable(map(_texts, records, rows_held))
        together = PackedRecords(list(encoder.pack(texts, keep_rest=True)))
        train = Chosen(packed, [np.arange(len(part.sizes)) for part in packed])
        held = Chosen([together], [np.arange(len(together.sizes))])
    shares = [f"{weight / sum(weights):.0%} {origin}" for weight, (_, origin) in zip(weights, parts, strict=True)]
    origin = f"mixture of {' and '.join(shares)}" if len(parts) > 1 else parts[0][1]
    skipped = sum(part.skipped for part in records)
    return Source(config, encoder, train, held, origin, fallback=fallback, skipped=skipped, duplicates=duplicates)


def _open_default(config: DataConfig, modality: Modality) -> tuple[Part, bool]:
    """Open the default data set on the Hub, or the built-in data when offline; tell whether it is the built-in data."""
    name = DEFAULT_TEXT if modality == "text" else DEFAULT_IMAGES
    reason = unreachable(name.partition(":")[0])
    options = ("text_pair_column", "text_column", "image_column", "split")
    given = next((option for option in options if getattr(config, option) != getattr(DataConfig, option)), None)
    if reason is None:
        try:
            table = load_hub(name, config.split, config.rows_read)
            return make_part([table], config, modality, _hub_origin(name, config)), False
        except DataError as error:
            if given is not None:
                raise
            reason = str(error)
    if given is not None:
        raise DataError(f"got {given}, which the built-in data does not have, and {reason}; pass a dataset.")
    because = f", as no data set is given and {reason}"
    if modality == "text":
        from datasets import Dataset

        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        called = f"built-in English prose (manual topics and docstrings of Python {version})"
        return (TextRecords(Dataset.from_dict({"text": list(prose())})), called + because), True
    crops = Crops(CROPS + config.held_out(None), config.seed)
    called = "built-in random crops of scikit-learn's two sample photographs (held-out crops are from the same two)"
    return (crops, called + because), True


def open_records(name: str, config: DataConfig, modality: Modality, label: str | None = None) -> Part:
    """Open one data set as records with uniform columns, without holding examples out.

    Args:
        name: Hub name, file or folder.
        config: Names of the columns, and the split.
        modality: Whether the model reads text or images.
        label: Column of the label; for image folders any name makes the class folders the labels.

    Raises:
        DataError: If the data cannot be found, read or used.
    """
    path = user_path(name)
    if exists(path) or looks_local(name):
        origin = f"{'folder' if path.is_dir() else 'file'} {name}"
        opened: Sequence[Dataset | ImageFile] = open_local(path, config.split, modality, config.rows_read)
    else:
        origin = _hub_origin(name, config)
        opened = [load_hub(name, config.split, config.rows_read)]
    return make_part(opened, config, modality, origin, label)


def _hub_origin(name: str, config: DataConfig) -> str:
    return f"Hub data set {name} (split {config.split})"


def make_part(
    opened: Sequence[Dataset | ImageFile], config: DataConfig, modality: Modality, origin: str, label: str | None = None
) -> Part:
    """Turn tables or image files into records.

    Raises:
        DataError: If they lack a column, do not fit together, or have no usable row.
    """
    from datasets import concatenate_datasets

    if files := [one for one in opened if isinstance(one, ImageFile)]:
        if label is not None:
            check_classes(files, origin)
        return ImageFiles(files, label is not None, origin), origin
    given = [one for one in opened if not isinstance(one, ImageFile)]
    tables = [uniform(table, config, modality, origin, label) for table in given]
    if config.finds_pairs and modality == "text" and (pair := find_pair(column_kinds(given[0]))):
        origin += f" (pairs of {pair[0]} and {pair[1]})"
    try:
        table = tables[0] if len(tables) == 1 else concatenate_datasets(tables)
    except (ValueError, TypeError) as error:
        raise DataError(f"{origin}: got files with different columns: {cause(error)}") from error
    # Labels may also be numbers.
    names, labels = None, column_kinds(table).get("label")
    if labels == "class":
        names = tuple(table.features["label"].names)
    elif labels == "classes":
        names = tuple(table.features["label"].feature.names)
    elif labels == "text":
        names = in_order(name for name in table.unique("label") if name)
    elif labels == "words":
        names = in_order(name for row in table.select_columns("label")[:]["label"] for name in row or () if name)
    records = TextRecords(table, names) if modality == "text" else ImageTable(table, names)
    if not len(records.sizes):
        raise DataError(f"{origin} is empty: all {records.skipped} rows are blank or unlabelled, expected a usable one")
    return records, origin


def _texts(part: Records, rows: np.ndarray) -> Iterator[str]:
    return map(attrgetter("value"), part.each(np.sort(rows).tolist()))
