"""Plan a conversion: look at every attention of a model, decide, and say why. Nothing is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from linearize.attention.factory import build_mixer
from linearize.conversion.attentions import CROSS, LOCAL_KEPT, find_attentions, find_unreached
from linearize.conversion.call import Call
from linearize.conversion.config import ConversionConfig
from linearize.conversion.layers import choose, complete
from linearize.conversion.probe import trial_runs
from linearize.core.errors import ConfigError, UnsupportedModelError
from linearize.core.registry import HYBRID, Hybrid, KernelInfo, kernel_info, make_config
from linearize.modeling.model import is_linearized
from linearize.modeling.plan import SOFTMAX, LayerPlan, Plan


def plan(
    model: PreTrainedModel,
    kernel: str | None = "hedgehog",
    kernel_args: Mapping[str, object] | None = None,
    **options: Any,
) -> Plan:
    """Plan the conversion of a model.

    Args:
        model: any transformers model whose attention goes through the attention interface.
        kernel: name of the kernel, or of a preset, for all layers that `layers` does not name.
        kernel_args: arguments of that kernel.
        **options: `layers`, `keep_softmax`, `window` and the other fields of `ConversionConfig`.

    Returns:
        The plan; `apply` carries it out.

    Raises:
        UnsupportedModelError: if no attention can be reached; says which of the cases it is.
        ConfigError: for an unknown kernel or argument, a wrong value, or layers that do not exist.
    """
    return make_plan(model, ConversionConfig(kernel, kernel_args, **options))


def make_plan(model: PreTrainedModel, config: ConversionConfig) -> Plan:
    """Plan the conversion of a model, as `plan` does."""
    if config.kernel is not None:
        kernel_info(config.kernel)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"got {type(model).__name__}, expected a transformers model (PreTrainedModel)")
    if is_linearized(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is converted already; start from the original checkpoint (or distil it further)"
        )
    runs, calls = trial_runs(model, config.example_inputs)
    layers = find_attentions(model, runs, calls, config.local_as_full)
    unreached = find_unreached(model, calls)
    count = sum(layer.index is not None for layer in layers)
    if not count:
        raise UnsupportedModelError(_why_none(model, [*layers, *unreached] if layers else [], calls))
    chosen = choose(model, config, count)
    decided = [layer if layer.index is None else _decide(layer, *chosen[layer.index]) for layer in layers]
    return Plan(type(model).__name__, model.config.model_type, (*decided, *unreached), config.seed)


def replan(
    model: PreTrainedModel,
    base: Plan,
    chosen: Mapping[int, tuple[str, Mapping[str, Any]]],
    *,
    max_length: int | None = None,
) -> Plan:
    """Return a plan with other kernels in some layers; the model is not run again.

    Args:
        model: the model that `base` was made for, not converted.
        base: its plan.
        chosen: kernel and arguments (a window among them), or "softmax" and none, by layer number.
        max_length: as in `plan`.

    Raises:
        ConfigError: for an unknown kernel or argument, a wrong value, or a layer that does not exist.
    """
    known = {layer.index for layer in base.layers if layer.index is not None}
    for index in chosen:
        if index not in known:
            raise ConfigError(f"layer {index} does not exist: this model has {len(known)} that can be converted")
    layers = []
    for layer in base.layers:
        if layer.index is not None and layer.index in chosen:
            kernel, arguments = chosen[layer.index]
            arguments = complete(model, kernel, dict(arguments), {}, max_length)[1]
            layer = _decide(layer.bare(), kernel, arguments)
        layers.append(layer)
    return dataclasses.replace(base, layers=tuple(layers))


def _decide(layer: LayerPlan, kernel: str, arguments: dict[str, Any]) -> LayerPlan:
    if kernel == SOFTMAX:
        return dataclasses.replace(layer, reason="kept on request")
    own = {name: value for name, value in arguments.items() if name not in HYBRID}
    hybrid = Hybrid.of(arguments)
    # Building it checks name, arguments, direction and sizes before the model is touched.
    mixer = build_mixer(kernel, own, layer.shape, hybrid)
    defaults = {f.name: f.default for f in dataclasses.fields(mixer.config)}
    legacy_defaults = mixer.info.legacy_defaults
    changed = {
        name: value
        for name, value in dataclasses.asdict(mixer.config).items()
        if value != defaults[name] or name in legacy_defaults
    }
    return dataclasses.replace(layer, kernel=kernel, arguments=changed, hybrid=hybrid)


def expectations(plan: Plan) -> list[str]:
    """Return lines on what to expect of layers without their window, and of kernels with negative weights."""
    found = []
    if count := len(plan.local_as_full):
        found.append(
            f"{count} of {len(plan.converted)} converted layers attended inside a window; without it they see all "
            "tokens, which is what the original computes only up to the window's length"
        )
    for layer in plan.converted:
        info = kernel_info(layer.kernel)
        config = make_config(info, layer.arguments)
        if info.is_positive(config) or not info.normalized:
            continue
        ways_out = [f"--kernel-arg {choice} avoids it" for choice in _positive_choices(info, config)]
        found.append(
            f"{layer.kernel}: weights can be negative, so it stays further from softmax than kernels whose weights "
            f"cannot; {ways_out[0] if ways_out else '`linearize kernels` says which those are'}"
        )
    return list(dict.fromkeys(found))


def _positive_choices(info: KernelInfo, config: Any) -> list[str]:
    """List NAME=VALUE of the arguments that would make a kernel positive."""
    return [
        f"{field.name}={choice}"
        for field in dataclasses.fields(config)
        for choice in field.metadata.get("choices") or ()
        if info.is_positive(dataclasses.replace(config, **{field.name: choice}))
    ]


def _why_none(model: PreTrainedModel, found: list[LayerPlan], calls: list[Call]) -> str:
    """Return why no attention can be converted."""
    name = type(model).__name__
    if not found:
        if calls:
            return (
                f"{name} has attention in its head only ({type(calls[0].module).__name__}), outside of the body "
                f"({type(model.base_model).__name__}) by whose names a plan goes, so it cannot be converted"
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
    more = ""
    if LOCAL_KEPT in reasons:
        more = "; local_as_full=True (--local-as-full) converts it all the same, as attention without its window"
    return f"{name} has no attention that can be converted: {'; '.join(reasons)}{more}"
