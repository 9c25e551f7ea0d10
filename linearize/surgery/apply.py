"""Carry a plan out: put kernels into a model, in place."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from linearize.errors import UnsupportedModelError
from linearize.modeling.config import FORMAT_VERSION, base_config_class, config_class
from linearize.modeling.implementations import use_linear_attention
from linearize.modeling.model import attach, change_class
from linearize.modeling.plan import Plan
from linearize.surgery.check import check, record, why_not_built
from linearize.surgery.plan import plan as make_plan
from linearize.surgery.probe import probe
from linearize.surgery.timm import is_timm, wrap

if TYPE_CHECKING:
    from linearize.surgery.positions import PositionReport


def convert(
    model: PreTrainedModel,
    kernel: str | None = "hedgehog",
    kernel_args: Mapping[str, object] | None = None,
    *,
    layers: Mapping[int, str | tuple[str, Mapping[str, object]]] | str | None = None,
    keep_softmax: Iterable[int] | str = (),
    window: int | None = None,
    sinks: int = 0,
    exact_keys: int = 0,
    scale: str | None = None,
    softmax_heads: Mapping[int, Iterable[int]] | str | None = None,
    max_length: int | None = None,
    positions: str = "tile",
    seed: int = 0,
    example_inputs: Mapping[str, Tensor] | None = None,
    local_as_full: bool = False,
) -> PreTrainedModel:
    """Replace the softmax self-attentions of a model by linear ones, in place.

    The kernels start untrained: `linearize.distill` teaches them to imitate softmax.

    Args:
        model: any transformers model whose attention goes through the attention interface; or what `timm.create_model`
            gave, which comes back wrapped as a transformers model.
        kernel: name of the kernel for all layers that `layers` does not name, or of a preset.
        kernel_args: its arguments.
        layers: kernels by layer number, `{0: "hedgehog", 1: ("luna", {...})}` or "0-5=hedgehog,6-11=elu".
        keep_softmax: numbers of layers to leave as they are; or "1/4" for the last layer of every four.
        window: W of a softmax window joined to the kernels (see `linearize.ops.window`); None: none.
        sinks: first tokens that get softmax's weights too (attention sinks).
        exact_keys: keys per head, outside the window, that get softmax's weights too: those with the largest learned
            scale (see `linearize.ops.exact_keys`).
        scale: learned log-scales of queries and keys: "none", "linear" or "network"; None: linear with a window, else
            none (see `linearize.attention.scale`).
        softmax_heads: query heads that stay softmax, by layer number: `{4: [0]}` or "4:0,11:7". Their keys are cached.
        max_length: longest input it shall take, in tokens; None: as before.
        positions: how learned positions are extended, "tile" or "interpolate".
        seed: for the kernels' starting values.
        example_inputs: inputs for the trial run, where they cannot be made up from the config.
        local_as_full: whether layers with a sliding window or chunks are converted too, as full attention: they see
            everything then, and equal the original at most up to the window's length.

    Returns:
        The same model, still an instance of its original class.

    Raises:
        UnsupportedModelError: if no attention can be reached; says which of the cases it is.
        ConfigError: for an unknown kernel or argument, a wrong value, or layers that do not exist.

    Example:
        >>> model = AutoModelForMaskedLM.from_pretrained("roberta-base")
        >>> model = linearize.convert(model, kernel="hedgehog", max_length=4096)
    """
    if is_timm(model):
        model = wrap(model)
    decided = make_plan(
        model,
        kernel,
        kernel_args,
        layers=layers,
        keep_softmax=keep_softmax,
        window=window,
        sinks=sinks,
        exact_keys=exact_keys,
        scale=scale,
        softmax_heads=softmax_heads,
        max_length=max_length,
        seed=seed,
        example_inputs=example_inputs,
        local_as_full=local_as_full,
    )
    convert_model(model, decided, max_length=max_length, positions=positions, example_inputs=example_inputs)
    return model


def convert_model(
    model: PreTrainedModel,
    plan: Plan,
    *,
    max_length: int | None = None,
    positions: str = "tile",
    example_inputs: Mapping[str, Tensor] | None = None,
) -> PositionReport | None:
    """Carry out a plan that was made for this model, in place: longer inputs first, then kernels.

    Args:
        model: the model.
        plan: its plan.
        max_length: longest input it shall take, in tokens; None: as before.
        positions: how learned positions are extended, "tile" or "interpolate".
        example_inputs: inputs for the trial run, where they cannot be made up from the config.

    Returns:
        How positions were extended; None where that was not asked for.
    """
    report = None
    _own_config(model)
    if max_length is not None:
        from linearize.surgery.positions import extend_positions

        report = extend_positions(model, max_length, method=positions)
    apply(model, plan, example_inputs)
    return report


def apply(model: PreTrainedModel, plan: Plan, example_inputs: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """Carry out a plan that was made for this model, in place, and return the model.

    Raises:
        UnsupportedModelError: if the model, with softmax in place of the kernels, is no longer what it was.
    """
    _own_config(model)
    longest = _shortest_window(model, example_inputs) if plan.local_as_full else None
    recorded = record(model, example_inputs, longest)
    could_be_built = not why_not_built(model)
    config = model.config
    made = config_class(base_config_class(plan.base_model_type))
    # The same config object is held by every submodule: it changes class where it stands.
    config.__class__ = made
    config.linearize = {"format_version": FORMAT_VERSION, **plan.to_dict()}
    use_linear_attention(config)
    attach(model, plan)
    change_class(model, made)
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "linear_attention"}
    # Weights are saved and read under the names that they have now.
    for attribute in ("_weight_conversions",):
        if hasattr(model, attribute):
            setattr(model, attribute, None)
    if could_be_built and (why := why_not_built(model)):
        raise UnsupportedModelError(
            f"{plan.architecture} cannot be built any more with an attention implementation of another name ({why}), "
            "so that a converted one could not be loaded; it is not converted: load it again, this object was changed"
        )
    check(model, recorded)
    return model


def _own_config(model: PreTrainedModel) -> None:
    """Give a model and its parts a copy of their config: the caller's may build another model."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])


def _shortest_window(model: PreTrainedModel, inputs: Mapping[str, Tensor] | None) -> int | None:
    """Return the length up to which local layers, converted as full attention, are still what they were."""
    return min((call.window for call in probe(model, inputs) if call.window is not None), default=None)
