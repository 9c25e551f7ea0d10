"""A handful of inputs for a report: of a data set's held-out part where it is large enough to have had one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from linearize.errors import ConfigError
from linearize.loading import Loaded
from linearize.report.options import InputOptions

if TYPE_CHECKING:
    from linearize.data.config import DataConfig
    from linearize.data.encode import ImageEncoder, TextEncoder
    from linearize.data.load import Part
    from linearize.data.records import Records

HOLDOUT = 64
"""What conversion holds out unless asked otherwise: the same examples are looked at here."""
BATCH = 8


@dataclass(frozen=True)
class Inputs:
    """What was chosen.

    Attributes:
        description: the data, in one line.
        batches: model inputs.
        notes: what a reader has to know, such as a length that was lowered.
    """

    description: str
    batches: list[dict[str, Tensor]]
    notes: list[str] = field(default_factory=list)

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


def load_inputs(loaded: Loaded, options: InputOptions, *, seed: int = 0) -> Inputs:
    """Read the inputs for a model.

    Args:
        loaded: the model with its tokenizer or image processor.
        options: which inputs.
        seed: the one of the conversion, which decides what it held out.

    Raises:
        ConfigError: if the model takes neither text nor images, or has no tokenizer or image processor.
        DataError: if the data cannot be found, read or used.
    """
    from linearize.data.config import DataConfig
    from linearize.data.encode import make_encoder
    from linearize.data.feeds import StreamPart
    from linearize.data.load import load_source, open_records
    from linearize.surgery.positions import current_length

    modality, processor = loaded.modality, loaded.processor
    if modality == "other" or processor is None:
        raise ConfigError(
            f"{loaded.name!r} has no tokenizer or image processor, which a report needs to make inputs; save one in "
            "the folder"
        )
    notes: list[str] = []
    limit = current_length(loaded.model) if modality == "text" else None
    length = options.max_length
    if limit is not None and length > limit:
        notes.append(f"Inputs were cut to {limit:,} tokens, the most that this checkpoint takes (asked: {length:,}).")
        length = limit
    config = DataConfig(
        dataset=options.dataset,
        text_column=options.text_column,
        image_column=options.image_column,
        max_length=length,
        batch_size=min(BATCH, options.inputs),
        seed=seed,
        holdout=max(HOLDOUT, options.inputs),
    )
    if config.sources and len(config.sources) == 1:
        part = open_records(config.sources[0][0], config, modality)
        if not isinstance(part.data, StreamPart) and len(part.data.sizes) < 2 * config.holdout:
            encoder = make_encoder(processor, modality, config.max_length, part.data.names, False)
            return _all_of(part, part.data, config, encoder, options.inputs, notes)
    source = load_source(config, processor, modality)
    batches, left = [], options.inputs
    for batch in source.holdout_batches():
        if left > 0:
            batches.append({name: value[:left] for name, value in batch.items() if name != "labels"})
            left -= len(next(iter(batch.values())))
    description = _without_folder(source.description.partition(": ")[0], options.dataset)
    return Inputs(f"{options.inputs} held-out examples of {description}", batches, notes)


def _without_folder(description: str, dataset: str | None) -> str:
    """A report travels: where a file lies on somebody's disk is nobody's business, its name says what it is."""
    return description if not dataset else description.replace(dataset, Path(dataset).name or dataset)


def _all_of(
    part: Part, records: Records, config: DataConfig, encoder: TextEncoder | ImageEncoder, most: int, notes: list[str]
) -> Inputs:
    """Take the first examples of a data set that is too small to have a held-out part."""
    count = min(most, len(records.sizes))
    places = list(range(count))
    batches = []
    for begin in range(0, count, config.batch_size):
        examples = [example._replace(label=None) for example in records.fetch(places[begin : begin + BATCH])]
        batches.append(encoder(examples, slice(None)))
    return Inputs(f"the first {count} examples of {_without_folder(part.origin, config.sources[0][0])}", batches, notes)


def token_labels(processor: Any, ids: Tensor) -> list[str]:
    """Return what stands for each token on an axis: its text, without the tokenizer's own marks for spaces."""
    tokenizer = processor if hasattr(processor, "convert_ids_to_tokens") else processor.tokenizer
    found = []
    for number, token in zip(ids.tolist(), tokenizer.convert_ids_to_tokens(ids.tolist()), strict=True):
        text = tokenizer.decode([number]).strip() if "Ġ" in str(token) or "▁" in str(token) else str(token)
        found.append(text or str(token))
    return found
