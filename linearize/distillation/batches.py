"""Batches for a loaded model, as stage one and the alignment take them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from linearize.data import DataConfig, Source, load_source
from linearize.distillation.config import DISTILL_LENGTH
from linearize.errors import ConfigError
from linearize.surgery.positions import current_length

if TYPE_CHECKING:
    from linearize.loading import Loaded


def within(loaded: Loaded, length: int) -> int:
    """Return a number of tokens per row, or as many as the model takes now where these are fewer."""
    most = current_length(loaded.model) if loaded.modality == "text" else None
    return min(length, most or length)


def usual_length(loaded: Loaded) -> int:
    """Return the tokens of a training row where nobody says: `DISTILL_LENGTH`, or what the model takes now."""
    return within(loaded, DISTILL_LENGTH)


def batches_for(loaded: Loaded, data: DataConfig, length: int | None, skip: str) -> Source:
    """Open a data set for a model.

    Args:
        loaded: what `linearize.loading` gave: model, processor, modality and name.
        data: which data; its `max_length` is replaced.
        length: tokens per row; None: `usual_length`. Never more than the model takes.
        skip: the option that does without data, for the errors.

    Raises:
        ConfigError: if the model reads neither text nor images, or has no tokenizer or image processor.
        DataError: if the data cannot be found, read or used.
    """
    if loaded.modality == "other":
        raise ConfigError(
            f"stage one knows text and images, but {type(loaded.model).__name__} takes "
            f"{loaded.model.main_input_name}; pass {skip}, or call linearize.distill with your own batches"
        )
    if loaded.processor is None:
        kind = "tokenizer" if loaded.modality == "text" else "image processor"
        raise ConfigError(
            f"{loaded.name!r} has no {kind}, which stage one needs; add one to the folder, or pass {skip}"
        )
    tokens = within(loaded, length or DISTILL_LENGTH)
    return load_source(dataclasses.replace(data, max_length=tokens), loaded.processor, loaded.modality)
