"""Plan a conversion (look at every attention of a model, decide, and say why), and carry it out in place."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from linearize.attention.factory import build_mixer
from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.attention.parts import can_fade
from linearize.conversion.attentions import (
    CROSS,
    LOCAL_KEPT,
    Trial,
    find_attentions,
    find_unreached,
    plan_names,
    trial_runs,
)
from linearize.conversion.check import check, keep_parts, record, why_not_built
from linearize.conversion.inputs import Call
from linearize.conversion.layers import Choice, ConversionConfig, choose, complete
from linearize.conversion.positions import PositionReport, current_length, extend_positions, tokens_of_image_size
from linearize.conversion.timm import is_timm, wrap
from linearize.core.errors import ConfigError, UnsupportedModelError
from linearize.core.registry import HYBRID, Hybrid, Values, kernel_info, make_config
from linearize.core.signatures import known_names, with_options
from linearize.modeling.compat import forget_renamings, use_linear_attention
from linearize.modeling.config import base_config_class, config_class
from linearize.modeling.model import attach, change_class, is_linearized
from linearize.modeling.plan import SOFTMAX, LayerPlan, Plan, contradiction
from linearize.modeling.weights import check_merged


@with_options(ConversionConfig)
def plan(model: PreTrainedModel, config: ConversionConfig) -> Plan:
    """Plan the conversion of a model, without changing it.

    Args:
        model: any transformers model whose attention goes through the attention interface.
        config: given as options: `kernel`, `kernel_args`, `layers`, `window` and the other fields of
            `ConversionConfig`.

    Returns:
        The plan; `apply` carries it out.

    Raises:
        UnsupportedModelError: if no attention can be converted; the message says why.
        UnknownNameError: for an unknown option.
        ConfigError: for an unknown kernel or argument, a wrong value, or layers that do not exist.
    """
    return plan_and_trial(model, with_length(model, config))[0]


def with_length(model: PreTrainedModel, config: ConversionConfig) -> ConversionConfig:
    """Return the config with `image_size`, if given, as `max_length` in tokens.

    Raises:
        ConfigError: if the size is smaller than the model's, or not a multiple of the patch size.
        UnsupportedModelError: if the model reads no images, or its positions are of an unknown kind.
    """
    if config.image_size is None:
        return config
    return dataclasses.replace(config, image_size=None, max_length=tokens_of_image_size(model, config.image_size))


def plan_and_trial(model: PreTrainedModel, config: ConversionConfig) -> tuple[Plan, Trial]:
    """Plan the conversion of a model, as `plan` does; also return its trial runs, for `convert_model`.

    Raises:
        UnsupportedModelError: as in `plan`.
        ConfigError: as in `plan`.
    """
    if config.kernel is not None:
        kernel_info(config.kernel)
    _check_original(model)
    runs, calls = trial_runs(model, config.example_inputs)
    layers = keep_parts(model, find_attentions(model, calls, config.local_as_full), runs)
    unreached = find_unreached(model, calls)
    convertible = [layer for layer in layers if not layer.reason]
    if not convertible:
        inside = [layer for layer in (*layers, *unreached) if layer.in_body]
        raise UnsupportedModelError(_why_none(model, inside if any(x.in_body for x in layers) else [], calls))
    _name_optional(model, layers, calls)
    chosen = choose(model, config, len(convertible))
    numbered = [dataclasses.replace(layer, index=index) for index, layer in enumerate(convertible)]
    found = Plan(type(model).__name__, model.config.model_type, (*layers, *unreached), config.seed)
    return found.with_layers(_decided(zip(numbered, chosen, strict=True))), (runs, calls)


def _name_optional(model: PreTrainedModel, layers: list[LayerPlan], calls: list[Call]) -> None:
    """Warn about optional arguments whose masks the converted layers will refuse."""
    hosts = {model.base_model.get_submodule(layer.module) for layer in layers if not layer.reason}
    names = sorted({call.optional for call in calls if call.optional and call.module in hosts})
    if names:
        warnings.warn(
            f"{type(model).__name__}: {', '.join(names)} can ask for a mask that linear attention cannot follow "
            "(such as images read in both directions); the converted model refuses such calls",
            stacklevel=4,
        )


def replan(model: PreTrainedModel, base: Plan, chosen: Mapping[int, Choice], *, max_length: int | None = None) -> Plan:
    """Return a plan with other kernels in some layers; the model is not run again.

    Args:
        model: the unconverted model that `base` was made for.
        base: its plan.
        chosen: kernel and arguments (including a window) by layer number; "softmax" takes no arguments.
        max_length: as in `plan`.

    Raises:
        ConfigError: for an unknown kernel or argument, or a wrong value.
    """
    longest = max_length or current_length(model)
    choices = [
        (layer.bare(), complete(chosen[layer.index], {}, longest))
        for layer in base.layers
        if layer.index is not None and layer.index in chosen
    ]
    return base.with_layers(_decided(choices))


def _decided(choices: Iterable[tuple[LayerPlan, Choice]]) -> Iterator[LayerPlan]:
    """Yield the layers with their kernels; neighbours with equal shapes and choices are checked once."""
    for (shape, (kernel, arguments)), layers in itertools.groupby(choices, lambda pair: (pair[0].shape, pair[1])):
        decided: Values = {"reason": "kept on request"}
        if kernel != SOFTMAX:
            own, hybrid = {x: value for x, value in arguments.items() if x not in HYBRID}, Hybrid.of(arguments)
            # Building it checks name, arguments, direction and sizes before the model is touched.
            mixer = build_mixer(kernel, own, shape, hybrid)
            values, legacy = dataclasses.asdict(mixer.config), mixer.info.legacy_defaults
            fields = dataclasses.fields(mixer.config)
            own = {f.name: values[f.name] for f in fields if values[f.name] != f.default or f.name in legacy}
            decided = {"kernel": kernel, "arguments": own, "hybrid": hybrid}
        for layer, _ in layers:
            yield dataclasses.replace(layer, **decided)


def expectations(plan: Plan) -> list[str]:
    """Return lines on what to expect of layers without their window, and of kernels with negative weights."""
    lines = []
    if count := len(plan.local_as_full):
        lines.append(
            f"{count} of {len(plan.converted)} converted layers attended inside a window; without it they see all "
            "tokens, so they match the original only up to the window's length"
        )
    for layer in plan.converted:
        info = kernel_info(layer.kernel)
        config = make_config(info, layer.arguments)
        if info.is_positive(config) or not info.normalized:
            continue
        choices = [(f.name, choice) for f in dataclasses.fields(config) for choice in f.metadata.get("choices") or ()]
        ways_out = [
            f"--kernel-arg {name}={choice} avoids it"
            for name, choice in choices
            if info.is_positive(dataclasses.replace(config, **{name: choice}))
        ]
        lines.append(
            f"{layer.kernel}: weights can be negative, so it stays further from softmax than kernels whose weights "
            f"cannot; {ways_out[0] if ways_out else '`linearize kernels` lists those'}"
        )
    return list(dict.fromkeys(lines))


def _why_none(model: PreTrainedModel, found: list[LayerPlan], calls: list[Call]) -> str:
    """Return why no attention can be converted."""
    name = type(model).__name__
    if not found:
        if calls:
            return (
                f"{name} has attention in its head only ({type(calls[0].module).__name__}), outside of the body "
                f"({type(model.base_model).__name__}) whose modules a plan names, so it cannot be converted"
            )
        if any("attention" in type(module).__name__.lower() for module in model.modules()):
            return (
                f"{name} has attention, but it does not dispatch through transformers' AttentionInterface, so it "
                "cannot be reached; use an architecture that does (BERT, RoBERTa, GPT-2, Llama, ViT ...)"
            )
        return f"{name} is not a Transformer: no attention ran in it, so there is nothing to convert"
    reasons = sorted({layer.reason for layer in found})
    if reasons == [CROSS]:
        return f"{name} dispatches only cross-attention; only self-attention can be converted"
    more = "; local_as_full=True (--local-as-full) converts it anyway, as attention without its window"
    more = more if LOCAL_KEPT in reasons else ""
    return f"{name} has no attention that can be converted: {'; '.join(reasons)}{more}"


@with_options(ConversionConfig)
def convert(model: PreTrainedModel, config: ConversionConfig) -> PreTrainedModel:
    """Replace the softmax self-attentions of a model with linear ones, in place.

    The kernels start untrained: `linearize.distill` trains them to imitate softmax.

    Args:
        model: any transformers model whose attention goes through the attention interface; or a model from
            `timm.create_model`, which is returned wrapped as a transformers model.
        config: given as options: `kernel`, `kernel_args`, `layers`, `window`, `max_length` and the other fields of
            `ConversionConfig`.

    Returns:
        The same model, still an instance of its original class.

    Raises:
        UnsupportedModelError: if no attention can be converted; the message says why.
        UnknownNameError: for an unknown option.
        ConfigError: for an unknown kernel or argument, a wrong value, or layers that do not exist.

    Example:
        >>> model = AutoModelForMaskedLM.from_pretrained("roberta-base")
        >>> model = linearize.convert(model, kernel="hedgehog", max_length=4096)
    """
    if is_timm(model):
        model = wrap(model)
    config = with_length(model, config)
    plan, trial = plan_and_trial(model, config)
    report = convert_model(model, plan, config, trial)
    if report is not None:
        # `linearize.save` lets the processor make inputs as long as these.
        vars(model)["extended_positions"] = report
    return model


def convert_model(
    model: PreTrainedModel, plan: Plan, config: ConversionConfig, trial: Trial | None = None
) -> PositionReport | None:
    """Carry out a plan made for this model, in place: extend its inputs first, then put in the kernels.

    Args:
        model: the model.
        plan: the plan.
        config: `max_length`, `positions` and `example_inputs` are read.
        trial: the model's trial runs, if it was neither changed nor moved since.

    Returns:
        How positions were extended; None if they were not.
    """
    _own_config(model)
    longest = config.max_length
    report = None if longest is None else extend_positions(model, longest, method=config.positions)
    if trial is None or report is not None:
        trial = _check_plan(model, plan, config.example_inputs)
    (runs, calls), same = trial, None
    if plan.local_as_full:
        # Up to this length, local layers converted as full attention compute the same as before.
        same = min((call.window for call in calls if call.window is not None), default=None)
    recorded = record(runs, same, padded=config.example_inputs is None)
    if any(output is not None and output.is_meta for _, _, outputs in recorded for output in outputs):
        raise UnsupportedModelError(f"{type(model).__name__} is on the meta device, without weights; load them first")
    kind, own, original = type(model), model.config, copy.deepcopy(model.config)
    linearized = config_class(base_config_class(plan.base_model_type))
    # Submodules hold the same config object, so it changes its class in place.
    own.__class__ = linearized
    own.linearize = {"format_version": 1, **plan.to_dict()}
    use_linear_attention(own)
    attach(model, plan)
    change_class(model, linearized)
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "linear_attention"}
    forget_renamings(model)
    if (why := why_not_built(type(model), own)) and not why_not_built(kind, original):
        raise UnsupportedModelError(
            f"{plan.architecture} can no longer be built with an attention implementation of another name ({why}), "
            "so a converted one could not be loaded; it is not converted: load it again, this object was changed"
        )
    check(model, recorded)
    return report


def change_hybrids(model: PreTrainedModel, hybrids: Mapping[str, Hybrid]) -> Plan:
    """Change the additions to the kernels of a converted model, by module, in place; return the new plan."""
    plan = Plan.from_dict(model.config.linearize)
    for module, hybrid in hybrids.items():
        layer = model.base_model.get_submodule(f"{module}.linear_attention")
        assert isinstance(layer, LinearAttention)
        # Mixers without a feature map have no additions to change.
        if hybrid != layer.hybrid:
            layer.map_mixer.change(hybrid)
    changed = [layer for layer in plan.layers if layer.module in hybrids]
    plan = plan.with_layers(dataclasses.replace(layer, hybrid=hybrids[layer.module]) for layer in changed)
    model.config.linearize = {**model.config.linearize, **plan.to_dict()}
    return plan


def set_trained_length(model: PreTrainedModel, tokens: int) -> None:
    """Make causal hybrids fade beyond the longest rows they were trained on, in place; this length never shrinks."""
    fading = {
        module: dataclasses.replace(layer.hybrid, trained_length=max(tokens, layer.hybrid.trained_length or 0))
        for module, layer in fading_layers(model).items()
    }
    if fading:
        change_hybrids(model, fading)


def fading_layers(model: PreTrainedModel) -> dict[str, LinearAttention]:
    """Return the layers of a converted model that can have a trained length, by module."""
    layers = linear_attentions(model.base_model).items()
    return {name: layer for name, layer in layers if can_fade(layer.hybrid, layer.shape.causal)}


@known_names()
def apply(model: PreTrainedModel, plan: Plan, example_inputs: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """Carry out a plan that was made for this model, in place, and return the model.

    Raises:
        ConfigError: if the plan was made for another model; this one is not changed then.
        UnsupportedModelError: if the model is already converted, has no weights, or, with softmax in place of the
            kernels, computes something else.
    """
    trial = _check_plan(model, plan, example_inputs)
    convert_model(model, plan, ConversionConfig(example_inputs=example_inputs), trial)
    return model


def _check_plan(model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor] | None) -> Trial:
    """Refuse what is not a plan for all attentions of this model; return the trial runs of the model, if it runs."""
    if not isinstance(plan, Plan):
        raise ConfigError(f"got a plan of type {type(plan).__name__}, expected one from linearize.plan")
    _check_original(model)
    Plan.from_dict(plan.to_dict())  # Checks types, numbers and names.
    names, checked = plan_names(model), []
    hosts = {name: module for module, name in names.items()}
    for layer in plan.layers:
        known = layer.module in hosts
        why = contradiction(hosts[layer.module], layer) if known else f"it has no module {layer.module!r}"
        if why or plan.base_model_type != model.config.model_type:
            raise _other_model(plan, model, why)
        if layer.converted and layer.mixer not in checked:
            build_mixer(*layer.mixer)
            checked.append(layer.mixer)
    trial: Trial = [], []
    with contextlib.suppress(UnsupportedModelError):
        trial = trial_runs(model, inputs)
    listed = {layer.module for layer in plan.layers}
    for call in trial[1]:
        if (name := names[call.module]) not in listed:
            raise _other_model(plan, model, f"it does not list {name!r}")
    return trial


def _other_model(plan: Plan, model: PreTrainedModel, why: str) -> ConfigError:
    made = f"{plan.architecture}, not for this {type(model).__name__}{f' ({why})' if why else ''}"
    return ConfigError(f"the plan was made for another model, {made}; make one for it with linearize.plan")


def _check_original(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        named = isinstance(model, str | os.PathLike)
        load = "; load it with an Auto class first, or convert the folder with linearize.jobs.verbs.convert"
        raise UnsupportedModelError(
            f"got {type(model).__name__}, expected a transformers model (PreTrainedModel){load if named else ''}"
        )
    check_merged(model)
    if is_linearized(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is already converted; start from the original checkpoint (or distil it further)"
        )


def _own_config(model: PreTrainedModel) -> None:
    """Give a model and its parts copies of their configs: the caller may build another model from the original."""
    copies: dict[int, object] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])
