"""Inputs to measure a converted checkpoint on; of a large data set they are from the part that was held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from linearize.checkpoint.loading import Loaded
from linearize.checkpoint.provenance import Provenance
from linearize.conversion.positions import current_length
from linearize.core.errors import ConfigError
from linearize.data.config import HOLDOUT, DataConfig
from linearize.data.encode import make_encoder
from linearize.data.feeds import StreamPart
from linearize.data.load import load_source, open_records
from linearize.data.records import Example
from linearize.evaluation.report.options import InputOptions

BATCH = 8
LENGTH, LONGEST = 128, 512
"""Tokens per input if the checkpoint records no length, and the most unless the user asks for more."""


@dataclass(frozen=True)
class Inputs:
    """Inputs for a model.

    Attributes:
        description: the data, in one line.
        batches: model inputs.
        notes: what a reader should know, such as a length that was lowered.
        length: most tokens of an input.
        texts: up to `HOLDOUT` examples of texts that were given, the inputs first; empty for the built-in data, and for
            images.
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


def load_inputs(loaded: Loaded, options: InputOptions, provenance: Provenance | None = None) -> Inputs:
    """Read the inputs for a model.

    Args:
        loaded: the model with its tokenizer or image processor.
        options: which inputs.
        provenance: the checkpoint's record, for its length and its held-out rows; None: 128 tokens, seed 0.

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
    made = provenance or Provenance()
    length = _input_length(loaded, options, made.row_length, notes)
    config = DataConfig(
        dataset=options.dataset,
        text_column=options.text_column,
        image_column=options.image_column,
        max_length=length,
        batch_size=min(BATCH, options.inputs),
        seed=made.seed if made.seed is not None and made.seed >= 0 else 0,
        # The conversion's own number, so that these are the examples that it held out, unless more are asked for.
        holdout=options.inputs if options.inputs > HOLDOUT else None,
    )
    examples, description = _examples(loaded, options, config)
    if options.dataset is None and made.options.dataset:
        notes.append(
            "The inputs are built-in ones, not of the data that the checkpoint learned from; name it: --dataset."
        )
    texts = () if options.dataset is None or loaded.modality == "image" else examples
    return Inputs(description, encode(loaded, examples[: options.inputs], length), notes, length, texts)


def encode(loaded: Loaded, examples: Sequence[Example], length: int) -> list[dict[str, Tensor]]:
    """Make batches of examples, without their labels."""
    modality: Any = loaded.modality
    encoder = make_encoder(loaded.processor, modality, length, None, False)
    bare = [example._replace(label=None) for example in examples]
    return [encoder(bare[begin : begin + BATCH], slice(None)) for begin in range(0, len(bare), BATCH)]


def _input_length(loaded: Loaded, options: InputOptions, taught: int | None, notes: list[str]) -> int:
    """Return the tokens per input: as asked for, else as in training; never more than the model takes."""
    limit = current_length(loaded.model) if loaded.modality == "text" else None
    length = options.max_length
    if length is None:
        taught = taught or LENGTH
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


def _examples(loaded: Loaded, options: InputOptions, config: DataConfig) -> tuple[Sequence[Example], str]:
    """Take examples of the held-out part, or the first ones of data that is too small to have had one.

    Returns:
        The examples, and in words the data that they are of.
    """
    modality: Any = loaded.modality
    processor: Any = loaded.processor
    # Texts beyond the inputs are for predictions alone, which are quick.
    most = options.inputs if modality == "image" else max(HOLDOUT, options.inputs)
    if len(config.sources) == 1:
        part = open_records(config.sources[0][0], config, modality)
        if not isinstance(part.data, StreamPart):
            total = len(part.data.sizes)
            if config.held_out(total) < options.inputs or total < 2 * options.inputs:
                examples = part.data.fetch(list(range(min(most, total))))
                named = _without_folder(part.origin, options.dataset)
                return examples, f"the first {min(options.inputs, total)} examples of {named}"
    source = load_source(config, processor, modality)
    named = _without_folder(source.description.partition(": ")[0], options.dataset)
    return source.holdout_examples(most), f"{options.inputs} held-out examples of {named}"


def _without_folder(text: str, path: str | None) -> str:
    """Shorten a path to its name: a report is shared, and the layout of somebody's disk is private."""
    return text.replace(path, Path(path).name or path) if path else text


def token_labels(processor: Any, ids: Tensor) -> list[str]:
    """Return a label per token for an axis: its text, without the tokenizer's marks for spaces."""
    tokenizer = processor if hasattr(processor, "convert_ids_to_tokens") else processor.tokenizer
    labels = []
    for number, token in zip(ids.tolist(), tokenizer.convert_ids_to_tokens(ids.tolist()), strict=True):
        text = tokenizer.decode([number]).strip() if "Ġ" in str(token) or "▁" in str(token) else str(token)
        labels.append(text or str(token))
    return labels
