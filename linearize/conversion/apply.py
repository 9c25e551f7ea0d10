"""Convert a model: put kernels into it, in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from linearize.conversion.check import check, record, why_not_built
from linearize.conversion.config import ConversionConfig
from linearize.conversion.plan import make_plan
from linearize.conversion.probe import probe
from linearize.conversion.timm import is_timm, wrap
from linearize.core.errors import UnsupportedModelError
from linearize.modeling.compat import forget_renamings
from linearize.modeling.config import FORMAT_VERSION, base_config_class, config_class
from linearize.modeling.implementations import use_linear_attention
from linearize.modeling.model import attach, change_class
from linearize.modeling.plan import Plan

if TYPE_CHECKING:
    from linearize.conversion.positions import PositionReport


def convert(
    model: PreTrainedModel,
    kernel: str | None = "hedgehog",
    kernel_args: Mapping[str, object] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Replace the softmax self-attentions of a model by linear ones, in place.

    The kernels start untrained: `linearize.distill` teaches them to imitate softmax.

    Args:
        model: any transformers model whose attention goes through the attention interface; or what `timm.create_model`
            returned, which comes back wrapped as a transformers model.
        kernel: name of the kernel, or of a preset, for all layers that `layers` does not name.
        kernel_args: arguments of that kernel.
        **options: `layers`, `keep_softmax`, `window`, `max_length` and the other fields of `ConversionConfig`.

    Returns:
        The same model, still an instance of its original class.

    Raises:
        UnsupportedModelError: if no attention can be reached; says which of the cases it is.
        ConfigError: for an unknown kernel or argument, a wrong value, or layers that do not exist.

    Example:
        >>> model = AutoModelForMaskedLM.from_pretrained("roberta-base")
        >>> model = linearize.convert(model, kernel="hedgehog", max_length=4096)
    """
    config = ConversionConfig(kernel, kernel_args, **options)
    if is_timm(model):
        model = wrap(model)
    convert_model(
        model,
        make_plan(model, config),
        max_length=config.max_length,
        positions=config.positions,
        example_inputs=config.example_inputs,
    )
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
        max_length: longest input that it shall take, in tokens; None: as before.
        positions: how learned positions are extended, "tile" or "interpolate".
        example_inputs: inputs for the trial run, if they cannot be made up from the config.

    Returns:
        How positions were extended; None if they were not.
    """
    report = None
    _own_config(model)
    if max_length is not None:
        from linearize.conversion.positions import extend_positions

        report = extend_positions(model, max_length, method=positions)
    apply(model, plan, example_inputs)
    return report


def apply(model: PreTrainedModel, plan: Plan, example_inputs: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """Carry out a plan that was made for this model, in place, and return the model.

    Raises:
        UnsupportedModelError: if the model, with softmax in place of the kernels, computes something else.
    """
    _own_config(model)
    longest = _shortest_window(model, example_inputs) if plan.local_as_full else None
    recorded = record(model, example_inputs, longest)
    could_be_built = not why_not_built(model)
    config = model.config
    made = config_class(base_config_class(plan.base_model_type))
    # Submodules hold the same config object, so it changes its class in place.
    config.__class__ = made
    config.linearize = {"format_version": FORMAT_VERSION, **plan.to_dict()}
    use_linear_attention(config)
    attach(model, plan)
    change_class(model, made)
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "linear_attention"}
    forget_renamings(model)
    if could_be_built and (why := why_not_built(model)):
        raise UnsupportedModelError(
            f"{plan.architecture} cannot be built any more with an attention implementation of another name ({why}), "
            "so a converted one could not be loaded; it is not converted: load it again, this object was changed"
        )
    check(model, recorded)
    return model


def _own_config(model: PreTrainedModel) -> None:
    """Give a model and its parts copies of their configs: the caller may build another model from the original."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])


def _shortest_window(model: PreTrainedModel, inputs: Mapping[str, Tensor] | None) -> int | None:
    """Return the length up to which local layers, converted as full attention, compute what they did before."""
    return min((call.window for call in probe(model, inputs) if call.window is not None), default=None)
