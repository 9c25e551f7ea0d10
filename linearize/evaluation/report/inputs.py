"""Inputs to measure a converted checkpoint on: by default of the data that it was taught on.

Large data sets have a held-out part, and the inputs are of that part; a task's inputs are rows that it is measured on.

A checkpoint's record comes from whoever made the checkpoint. Of files on this machine it may name only those in the
current folder or next to the checkpoint; a name with a folder in it is read from the Hub, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from linearize.checkpoint.loading import Loaded
from linearize.checkpoint.provenance import DataOptions, Provenance, StageTwo
from linearize.conversion.positions import current_length
from linearize.core.errors import ConfigError, DataError
from linearize.core.options import name_of, on_disk
from linearize.data.config import HOLDOUT, DataConfig
from linearize.data.encode import make_encoder
from linearize.data.feeds import StreamPart
from linearize.data.load import load_source, open_records
from linearize.data.local import looks_local
from linearize.data.records import Example
from linearize.evaluation.report.options import InputOptions
from linearize.training.stage_two.prepare import located, open_splits
from linearize.training.stage_two.task_types.base import LabelledRows
from linearize.training.stage_two.tasks import TASKS, task

BATCH = 8
LENGTH, LONGEST = 128, 512
"""Tokens per input if the checkpoint records no length, and the most unless the user asks for more."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
"""Name of a data set on the Hub, with its owner and configuration: a bare name may have been that of a folder."""


@dataclass(frozen=True)
class Inputs:
    """Inputs for a model.

    Attributes:
        description: the data, in one line.
        batches: model inputs.
        notes: what a reader should know, such as a length that was lowered.
        length: most tokens of an input.
        texts: up to `HOLDOUT` examples of texts that were given or recorded, the inputs first; empty for the built-in
            data, and for images.
    """

    description: str
    batches: list[dict[str, Tensor]]
    notes: list[str] = field(default_factory=list)
    length: int = LENGTH
    texts: Sequence[Example] = ()

    def first(self, tokens: int) -> dict[str, Tensor]:
        """Return the first input alone, without padding and labels; of a text its first `tokens` tokens."""
        row = {name: value[:1] for name, value in self.batches[0].items() if name != "labels"}
        if "input_ids" not in row:
            return row
        mask = row.get("attention_mask")
        if mask is not None:
            # Padding may be on either side.
            row = {name: value[:, mask[0].bool()] for name, value in row.items() if value.shape == mask.shape}
        return {name: value[:, :tokens] for name, value in row.items()}


@dataclass(frozen=True)
class RecordedData:
    """Data that a checkpoint's record names.

    Attributes:
        stage: which stage read it.
        names: of the data sets, with their weights; a name on the Hub, or a path here.
        missing: the first name that cannot be found here; None if all may be found.
        columns: the options that name columns.
        task: the record of stage two, for its rows; None for the other stages.
    """

    stage: str
    names: tuple[tuple[str, float], ...]
    missing: str | None
    columns: DataOptions = field(default_factory=DataOptions)
    task: StageTwo | None = None


Chosen = tuple[Sequence[Example], str]
"""Examples, and the data that they are of, in words."""


def load_inputs(
    loaded: Loaded, options: InputOptions, *, seed: int = 0, provenance: Provenance | None = None
) -> Inputs:
    """Read the inputs for a model.

    Args:
        loaded: the model with its tokenizer or image processor.
        options: which inputs.
        seed: of the conversion, which decides what it held out.
        provenance: the checkpoint's record, whose data is read if the options name none; None: the built-in data.

    Raises:
        ConfigError: if the model takes neither text nor images, or has no tokenizer or image processor.
        DataError: if the data cannot be found, read or used.
    """
    if loaded.modality not in ("text", "image") or loaded.processor is None:
        raise ConfigError(
            f"{loaded.name!r} has no tokenizer or image processor, which a report needs to make inputs; save one in "
            "the folder"
        )
    notes: list[str] = []
    length = _input_length(loaded, options, provenance, notes)
    config = DataConfig(
        dataset=options.dataset,
        text_column=options.text_column,
        image_column=options.image_column,
        max_length=length,
        batch_size=min(BATCH, options.inputs),
        seed=seed,
        # The conversion's own number, so that these are the examples that it held out, unless more are asked for.
        holdout=options.inputs if options.inputs > HOLDOUT else None,
    )
    recorded = None
    if options.dataset is None and provenance is not None:
        recorded = _recorded_examples(loaded, options, config, provenance, notes)
    examples, description = recorded or _examples(loaded, options, config, [options.dataset or ""])
    built_in = options.dataset is None and recorded is None
    texts = () if built_in or loaded.modality == "image" else examples
    return Inputs(description, encode(loaded, examples[: options.inputs], length), notes, length, texts)


def encode(loaded: Loaded, examples: Sequence[Example], length: int) -> list[dict[str, Tensor]]:
    """Make batches of examples, without their labels."""
    modality: Any = loaded.modality
    encoder = make_encoder(loaded.processor, modality, length, None, False)
    bare = [example._replace(label=None) for example in examples]
    return [encoder(bare[begin : begin + BATCH], slice(None)) for begin in range(0, len(bare), BATCH)]


def _input_length(loaded: Loaded, options: InputOptions, provenance: Provenance | None, notes: list[str]) -> int:
    """Return the tokens per input: as asked for, else as in training; never more than the model takes."""
    limit = current_length(loaded.model) if loaded.modality == "text" else None
    length = options.max_length
    if length is None:
        taught = (provenance.row_length if provenance is not None else None) or LENGTH
        if taught > LONGEST and loaded.modality == "text":
            notes.append(
                f"Inputs were cut to {LONGEST:,} tokens, though the model was taught on rows of up to {taught:,}, as "
                "the time that this takes is quadratic in the length; --max-length N asks for more."
            )
        return min(taught, LONGEST, limit or LONGEST)
    if limit is not None and length > limit:
        notes.append(f"Inputs were cut to {limit:,} tokens, the most that this checkpoint takes (asked: {length:,}).")
        return limit
    return length


def recorded_data(provenance: Provenance, checkpoint: str) -> RecordedData | None:
    """Return the data of the last stage whose record names some; None if no stage does, as with the built-in data.

    Args:
        provenance: the checkpoint's record.
        checkpoint: its folder or Hub name.
    """
    tuned = provenance.finetuning
    name = "" if tuned is None else (tuned.data or "").partition(": ")[0]
    if name and name != "tables":
        return RecordedData("stage two", *_find({name: 1.0}, checkpoint), task=tuned)
    stages = (("alignment", provenance.alignment), ("stage one", provenance.distillation), ("stage one", provenance))
    for stage, record in stages:
        named = None if record is None else record.options.dataset
        weights = {named: 1.0} if isinstance(named, str) else named or {}
        if record is not None and weights and all(weight > 0 for weight in weights.values()):
            return RecordedData(stage, *_find(weights, checkpoint), columns=record.options)
    return None


def _find(weights: Mapping[str, float], checkpoint: str) -> tuple[tuple[tuple[str, float], ...], str | None]:
    places = {name: _place(name, checkpoint) for name in weights}
    missing = next((name for name, place in places.items() if place is None), None)
    return tuple((places[name] or name, weight) for name, weight in weights.items()), missing


def _place(name: str, checkpoint: str) -> str | None:
    """Return where a data set of this name is: a path here, or its name on the Hub; None if it can be neither."""
    if Path(name).name == name and name not in (".", ".."):
        for folder in (Path(), Path(checkpoint).absolute().parent):
            if on_disk(str(folder / name)):
                return str(folder / name)
    on_hub = HUB_NAME.fullmatch(name) is not None and not looks_local(name) and not on_disk(name)
    return name if on_hub else None


def _recorded_examples(
    loaded: Loaded, options: InputOptions, config: DataConfig, provenance: Provenance, notes: list[str]
) -> Chosen | None:
    """Read the data that the checkpoint names; None, and a note, if it cannot be read now."""
    data = recorded_data(provenance, loaded.name)
    if data is None:
        return None
    folders = [name for name, _ in data.names]
    if data.missing is not None:
        named, reason = data.missing, "is not here"
    else:
        try:
            if data.task is not None:
                examples, description = _task_rows(loaded, options, data.task, folders[0])
            else:
                column = f"{loaded.modality}_column"
                named_column = getattr(options, column) or getattr(data.columns, column)
                config = replace(config, dataset=data.names, text_pair_column=None, **{column: named_column})
                examples, description = _examples(loaded, options, config, folders)
            return examples, f"{description}, which {data.stage} learned from"
        except (DataError, ConfigError) as error:
            named = " and ".join(map(name_of, folders))
            reason = f"cannot be read now ({_without_folders(str(error), folders)})"
    notes.append(
        f"The inputs are of the built-in data: {named!r}, which the checkpoint names as the data of {data.stage}, "
        f"{reason}; name data with --dataset."
    )
    return None


def _task_rows(loaded: Loaded, options: InputOptions, record: StageTwo, dataset: str) -> Chosen:
    """Read the rows that stage two's task is measured on.

    Raises:
        DataError: if the record names no known task.
    """
    kind = TASKS.get(record.task or "")
    if kind is None or kind.modality != loaded.modality:
        raise DataError(f"its task {record.task!r} is not known")
    columns = options.text_column or options.image_column
    chosen = task(
        str(record.task),
        columns=columns.split(",") if columns else [column for column in record.columns if column],
        label=record.label_column if kind.label is not None else None,
        validation=record.split or None,
    )
    if not issubclass(chosen.type, LabelledRows):
        # Spans and tags are not labels of a whole row, and predictions of them are not compared.
        chosen = replace(chosen, label=None)
    given = located(chosen, dataset)
    seed = record.seed if record.seed is not None and record.seed >= 0 else 0
    rows = open_splits(chosen, given, limit=None, seed=seed).validation
    count = min(len(rows), _most(loaded, options))
    named = _without_folders(str(given), [str(given)])
    return rows.fetch(range(count)), f"{min(options.inputs, count)} rows to measure on of {named}"


def _most(loaded: Loaded, options: InputOptions) -> int:
    """Return how many examples are read: texts beyond the inputs are for predictions alone, which are quick."""
    return options.inputs if loaded.modality == "image" else max(HOLDOUT, options.inputs)


def _examples(loaded: Loaded, options: InputOptions, config: DataConfig, folders: Sequence[str]) -> Chosen:
    """Take examples of the held-out part, or the first ones of data that is too small to have had one."""
    modality: Any = loaded.modality
    processor: Any = loaded.processor
    most = _most(loaded, options)
    if len(config.sources) == 1:
        part = open_records(config.sources[0][0], config, modality)
        if not isinstance(part.data, StreamPart):
            total = len(part.data.sizes)
            if config.held_out(total) < options.inputs or total < 2 * options.inputs:
                examples = part.data.fetch(list(range(min(most, total))))
                named = _without_folders(part.origin, folders)
                return examples, f"the first {min(options.inputs, total)} examples of {named}"
    source = load_source(config, processor, modality)
    named = _without_folders(source.description.partition(": ")[0], folders)
    return source.holdout_examples(most), f"{options.inputs} held-out examples of {named}"


def _without_folders(text: str, paths: Sequence[str]) -> str:
    """Shorten paths to their names: a report is shared, and the layout of somebody's disk is private."""
    for path in paths:
        text = text.replace(path, Path(path).name or path) if path else text
    return text


def token_labels(processor: Any, ids: Tensor) -> list[str]:
    """Return a label per token for an axis: its text, without the tokenizer's marks for spaces."""
    tokenizer = processor if hasattr(processor, "convert_ids_to_tokens") else processor.tokenizer
    labels = []
    for number, token in zip(ids.tolist(), tokenizer.convert_ids_to_tokens(ids.tolist()), strict=True):
        text = tokenizer.decode([number]).strip() if "Ġ" in str(token) or "▁" in str(token) else str(token)
        labels.append(text or str(token))
    return labels
