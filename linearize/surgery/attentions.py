"""What attentions a model has: which of them can be converted, which stay softmax, and why."""

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
from linearize.modeling.plan import CALLED, LOCAL, MASKED, OWN, SOFTMAX, UNKNOWN, LayerPlan, Plan, host_facts
from linearize.surgery.call import Call
from linearize.surgery.check import why_part_differs
from linearize.surgery.probe import Run

CROSS = "cross-attention"
LOCAL_KEPT = "local attention (sliding window or chunks), linear already"


def find_attentions(model: PreTrainedModel, runs: list[Run], calls: list[Call], local_as_full: bool) -> list[LayerPlan]:
    """List the attentions that trial runs called, not decided yet, and numbered if they can be converted.

    Args:
        model: the model.
        runs: its trial runs.
        calls: what they called.
        local_as_full: whether layers with a sliding window or chunks can be converted.
    """
    return _keep_parts(model, _called(model, calls, local_as_full), runs)


def _called(model: PreTrainedModel, calls: list[Call], local_as_full: bool) -> list[LayerPlan]:
    """Turn calls into undecided layers, one per module, numbered where they can be converted."""
    root = model.base_model
    names: dict[nn.Module, str] = {module: name for name, module in root.named_modules()}
    layers: list[LayerPlan] = []
    seen: set[int] = set()
    count = 0
    times = Counter(id(call.module) for call in calls)
    # A cache keeps the keys of layers that stay softmax, and BLT's global layers have the numbers of its local ones.
    kept = {
        getattr(call.module, "layer_idx", None)
        for call in calls
        if call.query[2] == call.key[2] and call.module in names
        if (reason := _why_kept(call, names[call.module], local_as_full)) and reason != CROSS
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
            # One running state serves one call per token: if an attention runs more often, its keys are kept.
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
    """Tell whether an attention reads the keys of an earlier layer (Gemma 4), or later ones read its keys."""
    return any(getattr(module, name, False) for name in ("is_kv_shared_layer", "store_full_length_kv"))


def find_unreached(model: PreTrainedModel, calls: list[Call]) -> list[LayerPlan]:
    """List the attentions of the body that no trial run called, found by their classes' names: they stay softmax."""
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
    """Return the facts of a host, and whether its direction comes from its module, its call or its mask."""
    facts = host_facts(call.module, shape, cache_index)
    if "is_causal" in facts:
        return facts
    return (CALLED if call.declared == shape.causal else MASKED, *facts)


def _why_kept(call: Call, name: str, local_as_full: bool) -> str:
    """Return why the attention with a name cannot be converted; empty if it can."""
    if call.refused:
        return call.refused
    if call.altered:
        return f"scores carry {call.altered}, which a kernel cannot honour"
    if call.mask == "bias":
        return "scores carry an additive bias or a mask of the model's own, which a kernel cannot honour"
    if _attends_across(call, name):
        return CROSS
    if call.query[2] != call.key[2]:
        return "cross-attention, or queries or keys that are pooled or chosen (their numbers differ)"
    if call.mask == "local" and (not local_as_full or _shares_keys(call.module)):
        # A cache keeps no keys beyond the window for the layers that share them.
        return LOCAL_KEPT
    if hasattr(call.module, "indexer"):
        return "an indexer chooses the keys of every query, which a kernel cannot honour"
    if call.mask == "own":
        return "a mask of the model's own (such as parts that see ahead), which a kernel cannot honour"
    if call.query[1] % call.key[1]:
        return f"{call.query[1]} query heads over {call.key[1]} key heads"
    return ""


def _attends_across(call: Call, name: str) -> bool:
    """Recognise cross-attention between sequences of one length by its name."""
    own = name.split(".")[-2:]
    return bool(getattr(call.module, "is_cross_attention", False)) or any(
        "cross" in part or part.startswith("encoder_attn") for part in own
    )
