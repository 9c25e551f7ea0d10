"""A handful of inputs for a report: of the data a model was taught on, where nobody names other data.

Of data that is large enough to have a held-out part they are of that part, of a task's data of what it is measured on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from linearize.checkpoint.taught import taught_length
from linearize.data.config import HOLDOUT, DataConfig
from linearize.errors import ConfigError, DataError
from linearize.loading import Loaded
from linearize.options import name_of
from linearize.report.options import InputOptions
from linearize.report.recorded import RecordedData, recorded_data

if TYPE_CHECKING:
    from linearize.data.records import Example

BATCH = 8
LENGTH, LONGEST = 128, 512
"""Tokens per input where nothing is known of the checkpoint, and the most where nobody asks for more."""


@dataclass(frozen=True)
class Inputs:
    """What was chosen.

    Attributes:
        description: the data, in one line.
        batches: model inputs.
        notes: what a reader has to know, such as a length that was lowered.
        length: tokens that an input may have.
        texts: up to `HOLDOUT` examples of texts that were given or recorded, the inputs first; empty for the built-in
            data, and for images.
    """

    description: str
    batches: list[dict[str, Tensor]]
    notes: list[str] = field(default_factory=list)
    length: int = LENGTH
    texts: Sequence[Example] = ()

    def first(self, tokens: int | None = None) -> dict[str, Tensor]:
        """Return the first input alone, without padding; a text's first `tokens` tokens."""
        one = {name: value[:1] for name, value in self.batches[0].items() if name != "labels"}
        if "input_ids" not in one:
            return one
        mask = one.get("attention_mask")
        if mask is not None:
            # Padding may lie on either side.
            one = {name: value[:, mask[0].bool()] for name, value in one.items() if value.shape == mask.shape}
        return one if tokens is None else {name: value[:, :tokens] for name, value in one.items()}


@dataclass(frozen=True)
class _Chosen:
    """Examples as read, and the data they are of; `own` where it was given or recorded."""

    examples: Sequence[Example]
    description: str
    own: bool


def load_inputs(
    loaded: Loaded, options: InputOptions, *, seed: int = 0, provenance: Mapping[str, object] | None = None
) -> Inputs:
    """Read the inputs for a model.

    Args:
        loaded: the model with its tokenizer or image processor.
        options: which inputs.
        seed: the one of the conversion, which decides what it held out.
        provenance: what the checkpoint says of its making, whose data is read where the options name none; None: the
            built-in data is.

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
    length = _length(loaded, options, provenance, notes)
    config = _config(options, length, seed)
    chosen = None
    if options.dataset is None and provenance is not None:
        chosen = _recorded(loaded, options, config, provenance, notes)
    if chosen is None:
        chosen = _examples(loaded, options, config, [options.dataset] if options.dataset else [])
    texts = chosen.examples if chosen.own and loaded.modality == "text" else ()
    return Inputs(chosen.description, encode(loaded, chosen.examples[: options.inputs], length), notes, length, texts)


def encode(loaded: Loaded, examples: Sequence[Example], length: int) -> list[dict[str, Tensor]]:
    """Make batches of examples, without their labels."""
    from linearize.data.encode import make_encoder

    modality: Any = loaded.modality
    encoder = make_encoder(loaded.processor, modality, length, None, False)
    bare = [example._replace(label=None) for example in examples]
    return [encoder(bare[begin : begin + BATCH], slice(None)) for begin in range(0, len(bare), BATCH)]


def _length(loaded: Loaded, options: InputOptions, provenance: Mapping[str, object] | None, notes: list[str]) -> int:
    """Return the tokens per input: as asked, else as many as the model was taught on; no more than it takes."""
    from linearize.surgery.positions import current_length

    limit = current_length(loaded.model) if loaded.modality == "text" else None
    length = options.max_length
    if length is None:
        taught = taught_length(provenance or {}) or LENGTH
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


def _config(options: InputOptions, length: int, seed: int) -> DataConfig:
    return DataConfig(
        dataset=options.dataset,
        text_column=options.text_column,
        image_column=options.image_column,
        max_length=length,
        batch_size=min(BATCH, options.inputs),
        seed=seed,
        # The conversion's own where that has enough: the same examples are looked at here.
        holdout=options.inputs if options.inputs > HOLDOUT else None,
    )


def _recorded(
    loaded: Loaded, options: InputOptions, config: DataConfig, provenance: Mapping[str, object], notes: list[str]
) -> _Chosen | None:
    """Read the data that the checkpoint names; None, and a note, where it cannot be read now."""
    known = recorded_data(provenance, loaded.name)
    if known is None:
        return None
    reason = "is not here" if known.missing is not None else None
    called = known.missing or " and ".join(name_of(name) for name, _ in known.names)
    if reason is None:
        try:
            chosen = _read_recorded(loaded, options, config, known)
            return dataclasses.replace(chosen, description=f"{chosen.description}, which {known.stage} learned from")
        except (DataError, ConfigError) as error:
            reason = f"cannot be read now ({_bare(str(error), [name for name, _ in known.names])})"
    notes.append(
        f"The inputs are of the built-in data: {called!r}, which the checkpoint names as the data of {known.stage}, "
        f"{reason}; name data with --dataset."
    )
    return None


def _read_recorded(loaded: Loaded, options: InputOptions, config: DataConfig, known: RecordedData) -> _Chosen:
    if known.task is not None:
        return _of_task(loaded, options, known)
    config = dataclasses.replace(
        config,
        dataset=known.names,
        text_column=options.text_column or (known.text_column if loaded.modality == "text" else None),
        image_column=options.image_column or (known.image_column if loaded.modality == "image" else None),
        text_pair_column=None,
    )
    return _examples(loaded, options, config, [name for name, _ in known.names])


def _of_task(loaded: Loaded, options: InputOptions, known: RecordedData) -> _Chosen:
    """Read the rows that stage two's task is measured on.

    Raises:
        DataError: if the record names no task that is known.
    """
    from linearize.finetune.prepare import located
    from linearize.finetune.tables import open_splits
    from linearize.finetune.tasks import TASKS, task

    record = dict(known.task or {})
    name = record.get("task")
    if not isinstance(name, str) or name not in TASKS or TASKS[name].modality != loaded.modality:
        raise DataError(f"its task {name!r} is not known")
    named = options.text_column or options.image_column
    listed = record.get("columns")
    recorded = listed if isinstance(listed, list | tuple) else ()
    columns = named.split(",") if named else [column for column in recorded if column]
    label, split, seed = (record.get(key) for key in ("label_column", "split", "seed"))
    chosen = task(
        name,
        columns=[str(column) for column in columns],
        label=label if isinstance(label, str) and TASKS[name].label is not None else None,
        validation=split if isinstance(split, str) and split else None,
    )
    if chosen.type.labels not in ("class", "number"):
        # Spans and tags are not read here, and are no labels of a row.
        chosen = dataclasses.replace(chosen, label=None)
    given = located(chosen, known.names[0][0])
    seed = seed if type(seed) is int and seed >= 0 else 0
    rows = open_splits(chosen, given, limit=None, seed=seed).validation
    count = min(len(rows), _most(loaded, options))
    shown = min(options.inputs, count)
    called = _without_folder(str(given), str(given))
    return _Chosen(rows.fetch(range(count)), f"{shown} rows to measure on of {called}", True)


def _most(loaded: Loaded, options: InputOptions) -> int:
    """Return how many examples are read: texts beyond the inputs are for predictions alone, which are quick."""
    return options.inputs if loaded.modality == "image" else max(HOLDOUT, options.inputs)


def _examples(loaded: Loaded, options: InputOptions, config: DataConfig, folders: Sequence[str]) -> _Chosen:
    """Take examples of the held-out part, or the first ones of data that is too small to have had one."""
    from linearize.data.feeds import StreamPart
    from linearize.data.load import load_source, open_records

    modality: Any = loaded.modality
    processor: Any = loaded.processor
    most = _most(loaded, options)
    if len(config.sources) == 1:
        part = open_records(config.sources[0][0], config, modality)
        if not isinstance(part.data, StreamPart):
            total = len(part.data.sizes)
            if config.held_out(total) < options.inputs or total < 2 * options.inputs:
                examples = part.data.fetch(list(range(min(most, total))))
                count = min(options.inputs, total)
                return _Chosen(examples, f"the first {count} examples of {_bare(part.origin, folders)}", True)
    source = load_source(config, processor, modality)
    called = _bare(source.description.partition(": ")[0], folders)
    examples = source.holdout_examples(most)
    return _Chosen(examples, f"{options.inputs} held-out examples of {called}", bool(config.sources))


def _bare(description: str, folders: Sequence[str]) -> str:
    for folder in folders:
        description = _without_folder(description, folder)
    return description


def _without_folder(description: str, dataset: str) -> str:
    """A report travels: where a file lies on somebody's disk is nobody's business, its name says what it is."""
    return description.replace(dataset, Path(dataset).name or dataset)


def token_labels(processor: Any, ids: Tensor) -> list[str]:
    """Return what stands for each token on an axis: its text, without the tokenizer's own marks for spaces."""
    tokenizer = processor if hasattr(processor, "convert_ids_to_tokens") else processor.tokenizer
    found = []
    for number, token in zip(ids.tolist(), tokenizer.convert_ids_to_tokens(ids.tolist()), strict=True):
        text = tokenizer.decode([number]).strip() if "Ġ" in str(token) or "▁" in str(token) else str(token)
        found.append(text or str(token))
    return found
