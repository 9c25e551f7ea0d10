"""Plan a conversion: look at every attention of a model, decide, and say why. Nothing is changed."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.attention.factory import build_mixer, check_hybrid, default_scale
from linearize.attention.redirect import REDIRECTED
from linearize.attention.shape import HeadShape
from linearize.errors import ConfigError, UnsupportedModelError
from linearize.modeling.model import is_linearized
from linearize.modeling.plan import CALLED, LOCAL, MASKED, OWN, SOFTMAX, UNKNOWN, LayerPlan, Plan, host_facts
from linearize.registry import HYBRID, Hybrid, KernelInfo, kernel_info, make_config
from linearize.surgery.call import Call
from linearize.surgery.check import why_part_differs
from linearize.surgery.layers import assign, parse_heads
from linearize.surgery.positions import current_length
from linearize.surgery.probe import Run, trial_runs


def plan(
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
    seed: int = 0,
    example_inputs: Mapping[str, Tensor] | None = None,
    local_as_full: bool = False,
) -> Plan:
    """Plan the conversion of a model.

    Args:
        model: any transformers model whose attention goes through the attention interface.
        kernel: name of the kernel for all layers that `layers` does not name, or of a preset.
        kernel_args: its arguments.
        layers: kernels by layer number, `{0: "hedgehog", 1: ("luna", {...})}` or "0-5=hedgehog,6-11=elu".
        keep_softmax: numbers of layers to leave as they are; or "1/4" for the last layer of every four.
        window: W of a softmax window joined to the kernels, in all layers whose kernel has a feature map and a
            denominator (see `linearize.ops.window`); single layers take it among their arguments in `layers`.
        sinks: first tokens that get softmax's weights too.
        exact_keys: keys per head, outside the window, that get softmax's weights too (`linearize.ops.exact_keys`).
        scale: learned log-scales: "none", "linear" or "network"; None: linear with a window, else none.
        softmax_heads: query heads that stay softmax, by layer number: `{4: [0]}` or "4:0,11:7".
        max_length: longest input that the model shall take, for kernels that depend on it; None: what it takes now.
        seed: for the kernels' starting values.
        example_inputs: inputs for the trial run, where they cannot be made up from the config.
        local_as_full: whether layers with a sliding window or chunks are converted too, as full attention: they see
            everything then, and equal the original at most up to the window's length.

    Returns:
        The plan; `apply` carries it out.

    Raises:
        UnsupportedModelError: if no attention can be reached; says which of the cases it is.
        ConfigError: for an unknown kernel or argument, a wrong value, or layers that do not exist.
    """
    if kernel is not None:
        kernel_info(kernel)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"got {type(model).__name__}, expected a transformers model (PreTrainedModel)")
    if is_linearized(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is converted already; start from the original checkpoint (or distil it further)"
        )
    runs, calls = trial_runs(model, example_inputs)
    found = _keep_parts(model, _attentions(model, calls, local_as_full), runs)
    reachable = [layer for layer in found if layer.index is not None]
    if not reachable:
        raise UnsupportedModelError(_why_none(model, [*found, *_unreached(model, calls)] if found else [], calls))
    chosen = assign(len(reachable), kernel, kernel_args or {}, layers, keep_softmax)
    if all(name == SOFTMAX for name, _ in chosen):
        raise UnsupportedModelError(
            f"all {len(reachable)} attentions of {type(model).__name__} are kept as softmax, nothing is left to "
            "convert; name fewer layers in keep_softmax"
        )
    asked = {"window": window, "sinks": sinks, "exact_keys": exact_keys, "scale": scale}
    more = {name: value for name, value in asked.items() if value is not None and (name == "window" or value)}
    heads = parse_heads(softmax_heads) if isinstance(softmax_heads, str) else dict(softmax_heads or {})
    _check_used(more, heads, chosen)
    chosen = [
        _complete(model, name, arguments, more | _heads_of(heads, number), max_length)
        for number, (name, arguments) in enumerate(chosen)
    ]
    decided = [layer if layer.index is None else _decide(layer, *chosen[layer.index]) for layer in found]
    decided += _unreached(model, calls)
    return Plan(type(model).__name__, model.config.model_type, tuple(decided), seed)


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
            arguments = _complete(model, kernel, dict(arguments), {}, max_length)[1]
            layer = _decide(layer.bare(), kernel, arguments)
        layers.append(layer)
    return dataclasses.replace(base, layers=tuple(layers))


def _attentions(model: PreTrainedModel, calls: list[Call], local_as_full: bool) -> list[LayerPlan]:
    """Turn calls into undecided layers, one per module, numbered where they can be converted."""
    root = model.base_model
    names: dict[nn.Module, str] = {module: name for name, module in root.named_modules()}
    layers: list[LayerPlan] = []
    seen: set[int] = set()
    count = 0
    times = Counter(id(call.module) for call in calls)
    # BLT's local layers and its global ones have the same numbers: a cache keeps the keys of those that stay.
    kept = {
        getattr(call.module, "layer_idx", None)
        for call in calls
        if call.query[2] == call.key[2] and call.module in names
        if (reason := _why_kept(call, names[call.module], local_as_full)) and reason != _CROSS
    }
    for call in calls:
        if id(call.module) in seen or call.module not in names:
            continue
        seen.add(id(call.module))
        local = local_as_full and call.mask == "local"
        reason = _why_kept(call, names[call.module], local_as_full)
        shape = HeadShape(
            call.query[1], call.key[1], call.query[3], call.value[3], call.mask == "causal" or call.is_causal
        )
        if call.mask == "bidirectional":
            shape = dataclasses.replace(shape, causal=False)
        cache_index = getattr(call.module, "layer_idx", None)
        if cache_index is not None and (cache_index < 0 or times[id(call.module)] > 1):
            # One running state serves one call a token: of an attention that runs more often the keys are kept.
            cache_index = None
        if _shares_keys(call.module) or cache_index in kept:
            cache_index = None
        layers.append(
            LayerPlan(
                module=names[call.module],
                index=None if reason else count,
                kernel=SOFTMAX,
                shape=shape,
                reason=reason,
                cache_index=cache_index,
                host=(*_host(call, shape, cache_index), *((LOCAL,) if local else ())),
            )
        )
        count += not reason
    return layers


def _keep_parts(model: PreTrainedModel, layers: list[LayerPlan], runs: list[Run]) -> list[LayerPlan]:
    """Keep the layers of parts, run separately, that would compute something else: the other parts are converted."""
    for run in (run for run in runs if run.module is not model):
        inside = {name for name, module in model.base_model.named_modules() if module in set(run.module.modules())}
        chosen = [dataclasses.replace(layer, kernel=_ANY) if layer.index is not None else layer for layer in layers]
        if not any(layer.converted and layer.module in inside for layer in chosen):
            continue
        if why := why_part_differs(model, Plan("", model.config.model_type, tuple(chosen)), run):
            layers = [
                dataclasses.replace(layer, index=None, reason=why, host=(*layer.host, OWN))
                if layer.index is not None and layer.module in inside
                else layer
                for layer in layers
            ]
    numbers = itertools.count()
    return [layer if layer.index is None else dataclasses.replace(layer, index=next(numbers)) for layer in layers]


_ANY = "any"
"""Stands for a kernel that is not chosen yet."""


def _shares_keys(module: nn.Module) -> bool:
    """Tell attentions that read the keys of an earlier layer (Gemma 4), or whose keys later ones read."""
    return any(getattr(module, name, False) for name in ("is_kv_shared_layer", "store_full_length_kv"))


def _unreached(model: PreTrainedModel, calls: list[Call]) -> list[LayerPlan]:
    """List the attentions of the body that no trial run called, by their classes' names: they stay as they are."""
    if model.config.model_type in REDIRECTED:
        return []
    root = model.base_model
    named = {
        name: one
        for name, one in root.named_modules()
        if re.search(r"(attention|attn)(v?\d+)?$", type(one).__name__, re.I)
    }
    seen = [name for name, one in root.named_modules() if any(call.module is one for call in calls)]
    layers = []
    for name, one in named.items():
        around = any(other.startswith(f"{name}.") for other in (*named, *seen))
        inside = any(f"{name}.".startswith(f"{other}.") for other in seen)
        if around or inside or next(one.parameters(), None) is None:
            continue
        dispatches = "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(one).forward)
        reason, host = _why_unreached(one, dispatches), (MASKED,) if dispatches else (MASKED, OWN)
        layers.append(LayerPlan(name, None, SOFTMAX, UNKNOWN, reason=reason, host=host))
    return layers


def _why_unreached(host: nn.Module, dispatches: bool) -> str:
    kind = type(host)
    if dispatches:
        return f"did not run in the trial run ({kind.__name__}); pass example inputs that reach it (--example-inputs)"
    return f"attention code of its own ({kind.__name__}), which cannot be reached"


def _host(call: Call, shape: HeadShape, cache_index: int | None) -> tuple[str, ...]:
    """Write down what the host says of itself, and where its direction comes from: its module, its call or its mask."""
    facts = host_facts(call.module, shape, cache_index)
    if "is_causal" in facts:
        return facts
    return (CALLED if call.declared == shape.causal else MASKED, *facts)


_CROSS = "cross-attention"
_LOCAL_KEPT = "local attention (sliding window or chunks), linear already"


def _why_kept(call: Call, name: str, local_as_full: bool) -> str:
    """Say why an attention, which the model holds under a name, cannot be converted; empty if it can."""
    if call.refused:
        return call.refused
    if call.altered:
        return f"scores carry {call.altered}, which a kernel cannot honour"
    if call.mask == "bias":
        return "scores carry an additive bias or a mask of the model's own, which a kernel cannot honour"
    if _attends_across(call, name):
        return _CROSS
    if call.query[2] != call.key[2]:
        return "cross-attention, or queries or keys that are pooled or chosen (their numbers differ)"
    if call.mask == "local" and (not local_as_full or _shares_keys(call.module)):
        # A cache keeps no keys beyond the window for the layers that share them.
        return _LOCAL_KEPT
    if hasattr(call.module, "indexer"):
        return "an indexer chooses the keys of every query, which a kernel cannot honour"
    if call.mask == "own":
        return "a mask of the model's own (such as parts that see ahead), which a kernel cannot honour"
    if call.query[1] % call.key[1]:
        return f"{call.query[1]} query heads over {call.key[1]} key heads"
    return ""


def _attends_across(call: Call, name: str) -> bool:
    """Tell cross-attention between sequences that happen to be of one length, by what hosts call it."""
    own = name.split(".")[-2:]
    return bool(getattr(call.module, "is_cross_attention", False)) or any(
        "cross" in part or part.startswith("encoder_attn") for part in own
    )


def _complete(
    model: PreTrainedModel,
    kernel: str,
    arguments: dict[str, object],
    more: Mapping[str, object],
    max_length: int | None,
) -> tuple[str, dict[str, object]]:
    """Add to a layer's arguments what was asked of all layers, and the longest input."""
    if kernel == SOFTMAX:
        return kernel, arguments
    info = kernel_info(kernel)
    if info.windowed:
        arguments = {**more, **arguments}
        own = {name: value for name, value in arguments.items() if name not in HYBRID}
        arguments.setdefault("scale", default_scale(info, make_config(info, own), arguments.get("window")))
    if info.maximum_positions and arguments.get("max_positions") is None:
        arguments = arguments | {"max_positions": max_length or current_length(model)}
    return kernel, arguments


def _heads_of(heads: Mapping[int, Iterable[int]], number: int) -> dict[str, object]:
    return {"softmax_heads": tuple(sorted(heads[number]))} if number in heads else {}


def _check_used(
    more: Mapping[str, Any], heads: Mapping[int, Iterable[int]], chosen: list[tuple[str, dict[str, object]]]
) -> None:
    """Refuse additions that no layer can have, and heads of layers that do not exist or stay softmax."""
    used = [(name, arguments) for name, arguments in chosen if name != SOFTMAX]
    if more and not any(kernel_info(name).windowed for name, _ in used):
        info = kernel_info(used[0][0])
        check_hybrid(info, make_config(info, used[0][1]), Hybrid.of(more), HeadShape(1, 1, 1, 1, info.causal))
    for number in heads:
        if not 0 <= number < len(chosen):
            raise ConfigError(f"softmax-heads: layer {number} does not exist: this model has {len(chosen)}")
        if chosen[number][0] == SOFTMAX:
            raise ConfigError(f"softmax-heads: layer {number} stays softmax as a whole; name heads of other layers")


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
    """Say in a line each what to expect of layers without their window, and of kernels with negative weights."""
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
    """Say which of the cases it is."""
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
    if reasons == [_CROSS]:
        return f"{name} has only cross-attention behind the attention interface; only self-attention can be converted"
    more = ""
    if _LOCAL_KEPT in reasons:
        more = "; local_as_full=True (--local-as-full) converts it all the same, as attention without its window"
    return f"{name} has no attention that can be converted: {'; '.join(reasons)}{more}"
