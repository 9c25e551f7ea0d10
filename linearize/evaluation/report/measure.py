"""A converted checkpoint on inputs: its layers against its own softmax, the whole model against its original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from linearize.checkpoint.loading import Loaded, load_model
from linearize.checkpoint.provenance import Provenance
from linearize.conversion.positions import current_length
from linearize.core.errors import LinearizeError
from linearize.core.events import Callback, Started, ignore
from linearize.evaluation.report.inputs import Inputs, load_inputs
from linearize.evaluation.report.options import InputOptions
from linearize.fidelity.measure import (
    Fidelity,
    OutputDifference,
    check_original,
    measure_layers,
    output_difference,
)

FIGURES = ("kl", "total_variation", "output_error")
"""Figures of a layer that are measured on each input alone, in addition to the cosine of whole outputs."""


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        inputs: the inputs.
        fidelity: each layer against its own softmax.
        original: the model that was converted, or None.
        missing: why there is no original.
        outputs: whole outputs against the original's; None without an original, or if the outputs are not comparable.
        notes: what a reader should know.
    """

    inputs: Inputs
    fidelity: Fidelity
    original: Loaded | None
    missing: str | None
    outputs: OutputDifference | None
    notes: list[str]


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
        options: which inputs.
        original: name of the original; None: what the checkpoint records.
        provenance: as in `linearize.evaluation.report.inputs.load_inputs`.
        on_event: called with what happens.

    Raises:
        LinearizeError: one of its children, for everything the user can correct.
    """
    inputs = load_inputs(loaded, options, provenance)
    first, missing = find_original(original, loaded, str(loaded.model.device))
    on_event(Started(f"measuring on {inputs.description}"))
    fidelity = measure_layers(loaded.model, inputs.batches)
    outputs = None if first is None else output_difference(first.model, loaded.model, inputs.batches)
    return Measured(inputs, fidelity, first, missing, outputs, [*inputs.notes, *cut_notes(first, inputs.batches)])


def measure_each_input(loaded: Loaded, measured: Measured) -> dict[str, list[float]]:
    """Return `FIGURES` and the cosine on each input alone, by name; without figures that an input does not have."""
    figures: dict[str, list[float | None]] = {name: [] for name in (*FIGURES, "cosine")}
    for batch in measured.inputs.batches:
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
    """Load the original model: the one that was asked for, else the one that the checkpoint records.

    Returns:
        The model, or None and the reason.

    Raises:
        CheckpointError: if one was asked for and cannot be loaded.
        ConfigError: if one was asked for and is another kind of model.
    """
    made = Provenance.from_dict(loaded.model.config.linearize.get("provenance"))
    if asked is None and not made.base_model:
        return None, "the checkpoint does not say what it was made from, and no --original was given"
    if asked is None and made.base_is_local and not Path(str(made.base_model)).exists():
        return None, f"the original was the local checkpoint {made.base_model!r}, which is not here"
    try:
        original = load_model(str(asked or made.base_model), device=device)
        check_original(original.model, loaded.model, original.name)
    except LinearizeError as error:
        if asked is not None:
            raise
        return None, f"the original was not reached ({error})"
    return original, None


def cut_notes(original: Loaded | None, batches: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Return a note if whole outputs are compared on shorter texts, because the original takes no longer ones."""
    if original is None or original.modality != "text":
        return []
    limit, length = current_length(original.model), max(batch["input_ids"].shape[1] for batch in batches)
    if limit is None or length <= limit:
        return []
    return [
        f"Whole outputs were compared on the first {limit:,} tokens of an input, the most that the original takes; "
        f"everything else on up to {length:,}."
    ]
