"""The original model beside the converted one: found where it can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from linearize.errors import LinearizeError
from linearize.fidelity.whole import check_original
from linearize.loading import Loaded, load_model


def find_original(asked: str | None, loaded: Loaded, device: str) -> tuple[Loaded | None, str | None]:
    """Load the original model: the one asked for, else the one that the checkpoint says it was made from.

    Returns:
        The model, or None and why there is none.

    Raises:
        CheckpointError: if one was asked for and cannot be loaded.
        ConfigError: if one was asked for and is another kind of model.
    """
    provenance = loaded.model.config.linearize.get("provenance") or {}
    named = provenance.get("base_model")
    if asked is None and not named:
        return None, "the checkpoint does not say what it was made from, and no --original was given"
    if asked is None and provenance.get("base_is_local") and not Path(str(named)).exists():
        return None, f"the original was the local checkpoint {named!r}, which is not here"
    try:
        original = load_model(str(asked or named), device=device)
        check_original(original.model, loaded.model, original.name)
    except LinearizeError as error:
        if asked is not None:
            raise
        return None, f"the original was not reached ({error})"
    return original, None


def cut_notes(original: Loaded | None, batches: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Say that whole outputs are compared on shorter texts than the rest, where the original takes no longer ones."""
    from linearize.surgery.positions import current_length

    if original is None or original.modality != "text":
        return []
    limit, length = current_length(original.model), max(batch["input_ids"].shape[1] for batch in batches)
    if limit is None or length <= limit:
        return []
    return [
        f"Whole outputs were compared on the first {limit:,} tokens of an input, the most that the original takes; "
        f"everything else on up to {length:,}."
    ]
