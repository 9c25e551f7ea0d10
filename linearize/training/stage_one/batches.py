"""Batches of a loaded model for stage one and the alignment."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from linearize.conversion.positions import current_length
from linearize.core.errors import ConfigError
from linearize.data import DataConfig, Source, load_source
from linearize.training.stage_one.config import DISTILL_LENGTH

if TYPE_CHECKING:
    from linearize.checkpoint.loading import Loaded


def within(loaded: Loaded, length: int) -> int:
    """Return `length` tokens per row, or the model's current limit if that is smaller."""
    most = current_length(loaded.model) if loaded.modality == "text" else None
    return min(length, most or length)


def usual_length(loaded: Loaded) -> int:
    """Return the default tokens of a training row: `DISTILL_LENGTH`, or the model's current limit if smaller."""
    return within(loaded, DISTILL_LENGTH)


def batches_for(loaded: Loaded, data: DataConfig, length: int | None, skip: str) -> Source:
    """Open a data set for a model.

    Args:
        loaded: model, processor, modality and name from `linearize.checkpoint.loading`.
        data: the data; its `max_length` is replaced.
        length: tokens per row, at most the model's limit; None: `usual_length`.
        skip: the option that avoids reading data, for error messages.

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
