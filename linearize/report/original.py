"""The original model beside the converted one: found where it can be, and how far the whole outputs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linearize.errors import ConfigError, LinearizeError
from linearize.loading import Loaded, load_model


@dataclass(frozen=True)
class OutputDifference:
    """Whole models on the same inputs, at their last hidden states.

    Attributes:
        cosine: mean cosine of the two vectors of a token.
        relative_error: norm of the difference over the norm of the original's states.
        tokens: how many tokens were compared.
    """

    cosine: float
    relative_error: float
    tokens: int


def find_original(asked: str | None, loaded: Loaded, device: str) -> tuple[Loaded | None, str | None]:
    """Load the original model: the one asked for, else the one that the checkpoint says it was made from.

    Returns:
        The model, or None and why there is none.

    Raises:
        CheckpointError: if one was asked for and cannot be loaded.
        ConfigError: if one was asked for and is another kind of model.
    """
    section = loaded.model.config.linearize
    named = (section.get("provenance") or {}).get("base_model")
    if asked is None and not named:
        return None, "the checkpoint does not say what it was made from, and no --original was given"
    try:
        original = load_model(str(asked or named), device=device)
        _check_kind(original, section["base_model_type"])
    except LinearizeError as error:
        if asked is not None:
            raise
        return None, f"the original was not reached ({error})"
    return original, None


def _check_kind(original: Loaded, expected: str) -> None:
    got = original.model.config.model_type
    if got != expected:
        raise ConfigError(
            f"original {original.name!r}: got a model of type {got!r}, expected {expected!r}; give the model that the "
            "checkpoint was made from"
        )


@torch.no_grad()
def output_difference(
    original: Loaded, converted: Loaded, batches: Sequence[Mapping[str, Tensor]]
) -> OutputDifference | None:
    """Compare last hidden states at all tokens that are no padding; None where the models give none.

    Inputs are cut to what the original takes.
    """
    from linearize.fidelity.observe import run_body
    from linearize.surgery.positions import current_length

    limit = current_length(original.model) if original.modality == "text" else None
    device = next(converted.model.parameters()).device
    cosine = error = power = 0.0
    count = 0
    for batch in batches:
        inputs = {name: (value if limit is None else value[:, :limit]).to(device) for name, value in batch.items()}
        first, second = (_states(run_body(side.model, inputs)) for side in (original, converted))
        if first is None or second is None or first.shape != second.shape:
            return None
        mask = inputs.get("attention_mask")
        keep = torch.ones(first.shape[:2], dtype=torch.bool, device=device) if mask is None else mask.bool()
        one, two = first.double()[keep], second.double()[keep]
        cosine += float(torch.nn.functional.cosine_similarity(one, two, dim=-1).sum())
        error += float((one - two).square().sum())
        power += float(one.square().sum())
        count += len(one)
    if not count:
        return None
    return OutputDifference(cosine / count, (error / max(power, 1e-30)) ** 0.5, count)


def _states(output: Any) -> Tensor | None:
    states = getattr(output, "last_hidden_state", None)
    return states if torch.is_tensor(states) and states.ndim == 3 else None
