"""Measure a converted checkpoint: its layers against their own softmax, the whole model against the original.

If the data set is large enough, the inputs are held-out rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from linearize.checkpoint.loading import Loaded, load_model
from linearize.checkpoint.provenance import Provenance
from linearize.conversion.positions import current_length
from linearize.core.errors import ConfigError, LinearizeError
from linearize.core.events import Callback, Started, ignore
from linearize.core.heads import Modality, Processor
from linearize.core.options import name_of
from linearize.core.parsing import user_path
from linearize.data.config import HOLDOUT, DataConfig
from linearize.data.encode import make_encoder
from linearize.data.load import load_source, open_records
from linearize.data.records import Example
from linearize.evaluation.options import InputOptions
from linearize.fidelity.measure import Fidelity, OutputDifference, check_original, measure_layers, output_difference

BATCH = 8
LENGTH, LONGEST = 128, 512
"""Tokens per input if the checkpoint records no length, and the maximum unless the user asks for more."""


def load_inputs(
    loaded: Loaded, options: InputOptions, provenance: Provenance | None = None
) -> tuple[str, list[dict[str, Tensor]], list[str]]:
    """Read the inputs for a model.

    Args:
        loaded: the model with its tokenizer or image processor.
        options: the inputs to use.
        provenance: the checkpoint's record, for the length of its rows and the seed of the held-out choice; None: 128
            tokens, seed 0.

    Returns:
        A description of the data in one line, the batches, and caveats for the reader, such as a reduced length.

    Raises:
        ConfigError: if the model takes neither text nor images, or has no tokenizer or image processor.
        DataError: if the data cannot be found, read or used.
    """
    modality = loaded.modality
    if modality == "other":
        raise ConfigError(f"a report reads texts or images, but {loaded.name!r} takes {loaded.model.main_input_name}")
    if loaded.processor is None:
        raise ConfigError(
            f"{loaded.name!r} has no tokenizer or image processor, which a report needs to make inputs; save one in "
            "the folder"
        )
    notes: list[str] = []
    made = provenance or Provenance()
    # The length is as requested, or else as in training; never more than the model takes.
    limit = current_length(loaded.model) if loaded.modality == "text" else None
    trained = made.row_length or LENGTH
    length = options.max_length or min(trained, LONGEST, limit or LONGEST)
    if options.max_length is None and trained > LONGEST and loaded.modality == "text":
        notes.append(
            f"Inputs were cut to {LONGEST:,} tokens, though the model was trained on rows of up to {trained:,}, "
            "because measuring takes time quadratic in the length; --max-length N raises this."
        )
    if limit is not None and length > limit:
        most = f"{limit:,} tokens, the most that this checkpoint takes"
        notes.append(f"Inputs were cut to {most} (requested: {length:,}).")
        length = limit
    config = DataConfig(
        dataset=options.dataset,
        text_column=options.text_column,
        image_column=options.image_column,
        max_length=length,
        batch_size=min(BATCH, options.inputs),
        seed=max(0, made.whole("seed") or 0),
        # By default as many rows are held out as in a conversion, and so the same ones, unless more are requested.
        holdout=options.inputs if options.inputs > HOLDOUT else None,
    )
    examples, description = _examples(loaded.processor, modality, options, config)
    if options.dataset is None and made.part("options").values.get("dataset"):
        notes.append("These inputs are built in, not the checkpoint's training data; name that with --dataset.")
    encoder = make_encoder(loaded.processor, modality, length, False)
    batches = [encoder(examples[begin : begin + BATCH], slice(None)) for begin in range(0, len(examples), BATCH)]
    return description, batches, notes


def _examples(
    processor: Processor, modality: Modality, options: InputOptions, config: DataConfig
) -> tuple[Sequence[Example], str]:
    """Return held-out examples, or the first examples of data that is too small to hold any out.

    Returns:
        The examples, and a description of their data.
    """
    if len(config.sources) == 1:
        records, origin = open_records(config.sources[0][0], config, modality)
        total = len(records.sizes)
        if config.held_out(total) < options.inputs or total < 2 * options.inputs:
            count, named = min(options.inputs, total), _without_folders(origin, config)
            return records.fetch(range(count)), f"the first {count} examples of {named}"
    source = load_source(config, processor, modality)
    named = _without_folders(source.description, config).partition(": ")[0]
    return source.holdout_examples(options.inputs), f"{options.inputs} held-out examples of {named}"


def _without_folders(text: str, config: DataConfig) -> str:
    """Shorten the paths of the data to their names: reports are shared, and the layout of a user's disk is private."""
    for path in sorted((name for name, _ in config.sources), key=len, reverse=True):
        text = text.replace(path, name_of(str(user_path(path))))
    return text


FIGURES = ("kl", "total_variation", "output_error")
"""Figures of a layer that are measured on each input alone, in addition to the cosine of whole outputs."""


@dataclass
class Measured:
    """The measurements of a converted checkpoint.

    Attributes:
        inputs: the inputs in one line.
        batches: the inputs.
        fidelity: each layer compared with its own softmax.
        original: the model that was converted, or None.
        missing: why there is no original.
        outputs: whole outputs compared with the original's; None without an original, or if they are not comparable.
        notes: caveats for the reader.
    """

    inputs: str
    batches: list[dict[str, Tensor]]
    fidelity: Fidelity
    original: Loaded | None
    missing: str | None
    outputs: OutputDifference | None
    notes: list[str]

    def first(self, tokens: int) -> dict[str, Tensor]:
        """Return the first input alone, without padding and labels; a text is cut to `tokens` tokens."""
        row = {name: value[:1] for name, value in self.batches[0].items() if name != "labels"}
        if "input_ids" not in row:
            return row
        mask = row.get("attention_mask")
        if mask is not None:
            # Padding may be on either side.
            row = {name: value[:, mask[0].bool()] for name, value in row.items() if value.shape == mask.shape}
        return {name: value[:, :tokens] for name, value in row.items()}


def measure_checkpoint(
    loaded: Loaded,
    options: InputOptions,
    original: str | None,
    provenance: Provenance | None = None,
    on_event: Callback = ignore,
) -> Measured:
    """Measure a converted checkpoint.

    Args:
        loaded: the checkpoint.
        options: the inputs to use.
        original: name of the original; None: the one that the checkpoint records.
        provenance: passed to `load_inputs`.
        on_event: called with every event.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    inputs, batches, notes = load_inputs(loaded, options, provenance)
    first, missing = find_original(original, loaded, str(loaded.model.device))
    on_event(Started(f"measuring on {inputs}"))
    fidelity = measure_layers(loaded.model, batches)
    outputs = None if first is None else output_difference(first.model, loaded.model, batches)
    if first is not None and first.modality == "text":
        limit, length = current_length(first.model), max(batch["input_ids"].shape[1] for batch in batches)
        if limit is not None and length > limit:
            notes.append(
                f"Whole outputs were compared on the first {limit:,} tokens of an input, the most that the original "
                f"takes; everything else on up to {length:,}."
            )
    return Measured(inputs, batches, fidelity, first, missing, outputs, notes)


def measure_each_input(loaded: Loaded, measured: Measured) -> dict[str, list[float]]:
    """Return `FIGURES` and the cosine on each input alone, by name; figures that some input lacks are left out."""
    figures: dict[str, list[float | None]] = {name: [] for name in (*FIGURES, "cosine")}
    for batch in measured.batches:
        for row in range(len(next(iter(batch.values())))):
            alone = [{name: value[row : row + 1] for name, value in batch.items()}]
            fidelity = measure_layers(loaded.model, alone)
            for name in FIGURES:
                figures[name].append(fidelity.mean(name))
            original = measured.original
            outputs = None if original is None else output_difference(original.model, loaded.model, alone)
            figures["cosine"].append(None if outputs is None else outputs.cosine)
    known = {name: [value for value in values if value is not None] for name, values in figures.items()}
    return {name: values for name, values in known.items() if len(values) == len(figures[name])}


def find_original(asked: str | None, loaded: Loaded, device: str) -> tuple[Loaded | None, str | None]:
    """Load the original model: the one requested, or else the one that the checkpoint records.

    Returns:
        The model, or None and the reason.

    Raises:
        CheckpointError: if the requested model cannot be loaded.
        ConfigError: if the requested model is of another kind.
    """
    made = Provenance(loaded.model.config.linearize.get("provenance"))
    base = made.text("base_model")
    if asked is None and not base:
        return None, "the checkpoint does not say what it was made from, and no --original was given"
    if asked is None and made.is_true("base_is_local") and not Path(str(base)).exists():
        return None, f"the original was the local checkpoint {base!r}, which was not found"
    try:
        original = load_model(str(asked or base), device=device)
        check_original(original.model, loaded.model, original.name)
    except LinearizeError as error:
        if asked is not None:
            raise
        return None, f"the original could not be loaded ({error})"
    return original, None
