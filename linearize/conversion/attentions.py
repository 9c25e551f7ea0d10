"""Find a model's attentions: which can be converted, which stay softmax, and why."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections import Counter

from torch import nn
from transformers import PreTrainedModel

from linearize.attention.redirect import REDIRECTED
from linearize.attention.shape import HeadShape
from linearize.conversion.check import why_part_differs
from linearize.conversion.inputs import Call
from linearize.conversion.probe import Run
from linearize.modeling.plan import CALLED, LOCAL, MASKED, OWN, SOFTMAX, UNKNOWN, LayerPlan, Plan, host_facts

CROSS = "cross-attention"
LOCAL_KEPT = "local attention (sliding window or chunks), already linear"


def find_attentions(model: PreTrainedModel, runs: list[Run], calls: list[Call], local_as_full: bool) -> list[LayerPlan]:
    """List the attentions called in trial runs, one per module; those that can be converted get a number.

    Args:
        model: the model.
        runs: its trial runs.
        calls: their attention calls, in order.
        local_as_full: whether layers with a sliding window or chunks can be converted.

    Returns:
        The layers, with no kernel chosen yet, in the order of their first calls.
    """
    names: dict[nn.Module, str] = {module: name for name, module in model.base_model.named_modules()}
    first: dict[nn.Module, Call] = {}
    for call in calls:
        if call.module in names:
            first.setdefault(call.module, call)
    times = Counter(call.module for call in calls)
    reasons = {module: _why_kept(call, names[module], local_as_full) for module, call in first.items()}
    # A cache keeps the keys of layers that stay softmax, and BLT numbers its global layers like its local ones.
    kept = {
        getattr(module, "layer_idx", None)
        for module, call in first.items()
        if reasons[module] not in ("", CROSS) and call.query[2] == call.key[2]
    }
    layers = []
    for module, call in first.items():
        cache_index = getattr(module, "layer_idx", None)
        # One running state serves one call per token: if an attention runs more often, its keys are kept.
        if cache_index in kept or times[module] > 1 or _shares_keys(module) or (cache_index or 0) < 0:
            cache_index = None
        causal = call.mask != "bidirectional" and (call.mask == "causal" or call.is_causal)
        shape = HeadShape(call.query[1], call.key[1], call.query[3], call.value[3], causal)
        facts = host_facts(module, shape, cache_index)
        if "is_causal" not in facts:
            # The direction comes from the call, or from the mask.
            facts = (CALLED if call.declared == causal else MASKED, *facts)
        host = (*facts, LOCAL) if local_as_full and call.mask == "local" else facts
        # For now, any number means that the layer can be converted.
        index, why = None if reasons[module] else 0, reasons[module]
        layers.append(LayerPlan(names[module], index, SOFTMAX, shape, {}, why, cache_index, host=host))
    numbers = itertools.count()
    layers = _keep_parts(model, layers, runs)
    return [layer if layer.index is None else dataclasses.replace(layer, index=next(numbers)) for layer in layers]


def _keep_parts(model: PreTrainedModel, layers: list[LayerPlan], runs: list[Run]) -> list[LayerPlan]:
    """Keep softmax in separately run parts whose outputs would change; the other parts are converted."""
    for run in runs:
        modules = set(run.module.modules())
        inside = {name for name, module in model.base_model.named_modules() if module in modules}
        chosen = [layer if layer.index is None else dataclasses.replace(layer, kernel=_ANY) for layer in layers]
        if run.module is model or not any(layer.converted and layer.module in inside for layer in chosen):
            continue
        if why := why_part_differs(model, Plan("", model.config.model_type, tuple(chosen)), run):
            layers = [
                dataclasses.replace(layer, index=None, reason=why, host=(*layer.host, OWN))
                if layer.index is not None and layer.module in inside
                else layer
                for layer in layers
            ]
    return layers


_ANY = "any"
"""Stands for a kernel that is not chosen yet."""


def _shares_keys(module: nn.Module) -> bool:
    """Tell whether an attention reads the keys of an earlier layer (Gemma 4), or later ones read its keys."""
    return any(getattr(module, name, False) for name in ("is_kv_shared_layer", "store_full_length_kv"))


def find_unreached(model: PreTrainedModel, calls: list[Call]) -> list[LayerPlan]:
    """List the attentions of the body that no trial run called, found by class name; they stay softmax."""
    if model.config.model_type in REDIRECTED:
        return []
    root = model.base_model
    named = {
        name: module
        for name, module in root.named_modules()
        if re.search(r"(attention|attn)(v?\d+)?$", type(module).__name__, re.I)
    }
    seen = [name for name, module in root.named_modules() if any(call.module is module for call in calls)]
    layers = []
    for name, module in named.items():
        around = any(other.startswith(f"{name}.") for other in (*named, *seen))
        inside = any(f"{name}.".startswith(f"{other}.") for other in seen)
        if around or inside or next(module.parameters(), None) is None:
            continue
        kind = type(module)
        host: tuple[str, ...] = (MASKED, OWN)
        reason = f"its own attention code ({kind.__name__}), which cannot be reached"
        if "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(kind.forward):
            host = (MASKED,)
            reason = (
                f"did not run in the trial run ({kind.__name__}); pass example inputs that reach it (--example-inputs)"
            )
        layers.append(LayerPlan(name, None, SOFTMAX, UNKNOWN, reason=reason, host=host))
    return layers


def _why_kept(call: Call, name: str, local_as_full: bool) -> str:
    """Return why an attention cannot be converted; empty if it can."""
    if call.refused:
        return call.refused
    if call.altered:
        return f"scores carry {call.altered}, which a kernel cannot honour"
    if call.mask == "bias":
        return "scores carry an additive bias or the model's own mask, which a kernel cannot honour"
    # The name tells cross-attention between sequences of equal length.
    across = any("cross" in part or part.startswith("encoder_attn") for part in name.split(".")[-2:])
    if across or getattr(call.module, "is_cross_attention", False):
        return CROSS
    if call.query[2] != call.key[2]:
        return "cross-attention, or queries or keys that are pooled or chosen (their numbers differ)"
    if call.mask == "local" and (not local_as_full or _shares_keys(call.module)):
        # A cache keeps no keys beyond the window for the layers that share them.
        return LOCAL_KEPT
    if hasattr(call.module, "indexer"):
        return "an indexer chooses the keys of every query, which a kernel cannot honour"
    if call.mask == "own":
        return "the model's own mask (such as parts that see ahead), which a kernel cannot honour"
    if call.query[1] % call.key[1]:
        return f"{call.query[1]} query heads over {call.key[1]} key heads"
    return ""
