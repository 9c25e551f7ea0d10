"""The original beside the converted model: every layer's attention, and the whole models' outputs, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.errors import ConfigError
from linearize.fidelity.measure import Fidelity, OutputDifference, measure_layers
from linearize.modeling.modes import evaluating
from linearize.teacher.observe import run_body


def measure(
    original: PreTrainedModel | None, converted: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]
) -> Fidelity:
    """Measure how close a converted model is to its original.

    Layer by layer the kernels are compared with the converted model's own softmax, on the hidden states of that softmax
    model (in a model that was not tuned since, it is the original's); then the whole models with each other.

    Args:
        original: the model that was converted, loaded anew: `convert` changes a model in place. None: layers only.
        converted: the converted model. Both are left as they were.
        batches: model inputs; they are moved to the models' devices.

    Returns:
        The figures per layer and head, and in `outputs` how far the last hidden states differ. `to_dict` makes plain
        data of it, `linearize.fidelity.plots.fidelity_heatmaps` a picture.

    Raises:
        ConfigError: if the original is converted itself, or another kind of model.
        DataError: if there is no batch.
    """
    if original is not None:
        check_original(original, converted)
    batches = list(batches)
    found = measure_layers(converted, batches)
    if original is None:
        return found
    return dataclasses.replace(found, outputs=output_difference(original, converted, batches))


def check_original(original: PreTrainedModel, converted: PreTrainedModel, name: str = "") -> None:
    """Refuse an original that cannot be the one that was converted.

    Raises:
        ConfigError: if it is converted itself, or another kind of model.
    """
    called = f"original {name!r}" if name else "original"
    if getattr(original.config, "linearize", None):
        raise ConfigError(f"{called}: got a converted model, expected the one it was made from; load that one anew")
    got, expected = original.config.model_type, converted.config.linearize["base_model_type"]
    if got != expected:
        raise ConfigError(
            f"{called}: got a model of type {got!r}, expected {expected!r}; give the model that the checkpoint was "
            "made from"
        )


@torch.no_grad()
def output_difference(
    original: PreTrainedModel, converted: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]]
) -> OutputDifference | None:
    """Compare last hidden states at all tokens that are no padding; None where the models give none.

    Texts are cut to what the original takes.
    """
    from linearize.surgery.positions import current_length

    cosine = error = power = 0.0
    count = 0
    for batch in batches:
        limit = current_length(original) if "input_ids" in batch else None
        cut = {name: value if limit is None else value[:, :limit] for name, value in batch.items()}
        first, second = (_states(model, cut) for model in (original, converted))
        if first is None or second is None or first.shape != second.shape:
            return None
        mask = cut.get("attention_mask")
        keep = torch.ones(first.shape[:2], dtype=torch.bool) if mask is None else mask.bool().cpu()
        one, two = first[keep], second[keep]
        cosine += float(torch.nn.functional.cosine_similarity(one, two, dim=-1).sum())
        error += float((one - two).square().sum())
        power += float(one.square().sum())
        count += len(one)
    if not count:
        return None
    return OutputDifference(cosine / count, (error / max(power, 1e-30)) ** 0.5, count)


def _states(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor | None:
    device = next(model.parameters()).device
    with evaluating(model):
        output = run_body(model, {name: value.to(device) for name, value in batch.items()})
    states = getattr(output, "last_hidden_state", None)
    return states.double().cpu() if torch.is_tensor(states) and states.ndim == 3 else None
