"""Find a model's attentions: which can be converted, which stay softmax, and why.

No table of architectures is needed: the model is run once on a few made-up tokens, and every call of transformers'
attention interface is recorded, with its sizes, direction and mask.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from linearize.attention.interface import UNSUPPORTED_SCORE_MODS
from linearize.attention.masks import key_padding
from linearize.attention.packing import blocks
from linearize.attention.redirect import REDIRECTED
from linearize.attention.shape import HeadShape
from linearize.conversion import timm
from linearize.conversion.inputs import BOTH_WAYS, CAUSALLY, Call, Inputs, candidates, optional_inputs
from linearize.core.errors import UnsupportedModelError, first_line
from linearize.modeling.compat import chooses_keys, configs_of, implementation_of, set_implementation
from linearize.modeling.model import evaluating
from linearize.modeling.plan import CALLED, LOCAL, MASKED, OUTSIDE, OWN, SOFTMAX, UNKNOWN, LayerPlan, host_facts

CROSS = "cross-attention"
LOCAL_KEPT = "local attention (sliding window or chunks), already linear"
HEAD = "outside of the body, and only attentions of the body are converted"
_NOT_HONOURED = "which a kernel cannot honour"
_NAME = "linearize_probe"
_UNION = or_masks().__code__
_ATTENTION = re.compile(r"(attention|attn)(v?\d+)?(pool(ing|er)?(\d?d)?(head)?)?$", re.I)
_QUERIES, _KEYS = (
    {f"{side}{name}" for name in names for side in ("", "w", "to_")}
    | {f"{name}{side}" for name in names for side in ("_proj", "_lin", "_linear", "_layer")}
    for names in (("q", "query", "queries"), ("k", "key", "keys", "kv", "key_value"))
)
_JOINT = {"qkv", "qkv_proj", "to_qkv", "wqkv", "query_key_value", "in_proj_weight", "c_attn"}
_RECURRENT = {"a_log", "dt_bias", "conv1d", "q_conv1d"}


Run = tuple[PreTrainedModel, Inputs]
"""A forward that a model, or a part of it, accepts: the model or its part, and keyword arguments."""
Trial = tuple[list[Run], list[Call]]
"""The result of `trial_runs`."""


def trial_runs(model: PreTrainedModel, inputs: Mapping[str, Tensor] | None = None) -> Trial:
    """Run a model once, and record its attention calls.

    Args:
        model: any transformers model; it is not changed.
        inputs: keyword arguments for its forward; None to make them up from the config.

    Returns:
        A run of the whole model if it takes the inputs, and the calls in order. With made-up inputs, parts that did not
        run in it, such as an image encoder in a run on tokens alone, are run separately.

    Raises:
        UnsupportedModelError: if nothing runs.
    """
    with evaluating(model):
        if inputs is not None:
            return _first(model, model, [dict(inputs)])
        failure = None
        try:
            runs, calls = _first(model, model, candidates(model))
        except UnsupportedModelError as error:
            runs, calls, failure = [], [], error
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part is not model]
        for part in parts if model.config.model_type not in REDIRECTED else ():
            if {call.module for call in calls}.isdisjoint(part.modules()):
                with contextlib.suppress(UnsupportedModelError):
                    more, found = _first(model, part, candidates(part))
                    runs, calls = (runs + more, calls + found) if found else (runs, calls)
        if failure is not None and not calls:
            raise failure
        return runs, calls


def _first(model: PreTrainedModel, part: PreTrainedModel, tried: Iterable[Inputs]) -> Trial:
    """Return the first run of a part that does not fail, and its calls."""
    failures: list[tuple[Inputs, Exception]] = []
    for inputs in tried:
        try:
            if model.config.model_type in REDIRECTED:
                return [(part, inputs)], timm.probe(model, inputs)
            return [(part, inputs)], _Recorder(model).calls_of(part, inputs)
        except UnsupportedModelError:
            raise
        except Exception as error:
            failures.append((inputs, error))
    inputs, first = failures[0]
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in inputs.items() if torch.is_tensor(value))
    raise UnsupportedModelError(
        f"a trial run of {type(part).__name__} on {shapes} failed ({type(first).__name__}: {first_line(first)}); "
        "pass example_inputs=... (--example-inputs FILE) that its forward accepts"
    ) from first


class _Recorder:
    """Records the attention calls of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        # Modules of parts that only support eager softmax, which follows its mask and ignores `is_causal`.
        self.eager: set[nn.Module] = set()
        for part in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
            change = self.eager.difference_update if part._supports_sdpa else self.eager.update
            change(part.modules())

    def calls_of(self, part: PreTrainedModel, inputs: Inputs) -> list[Call]:
        """Run a part of the model, with the attention of all its configs routed here, and return the calls in order."""
        with contextlib.ExitStack() as undo, torch.no_grad():
            for table, function in ((AttentionInterface, self.attention), (AttentionMaskInterface, self.mask_function)):
                table.register(_NAME, function)
                undo.callback(table._global_mapping.pop, _NAME, None)
            for config in configs_of(self.model):
                undo.callback(set_implementation, config, implementation_of(config))
                set_implementation(config, _NAME)
            # Masks are made even if they hide nothing, so that their kind is known. But some models pass a mask on to
            # layers of another length (Informer), which only works if no mask is made.
            try:
                calls = self._run(part, inputs, always=True)
            except Exception as error:
                if "ask" not in str(error):
                    raise
                return self._run(part, inputs)
            with contextlib.suppress(Exception):
                self._note(calls, self._run(part, inputs), "without a mask")
            for name, (zeros, mixed) in optional_inputs(part, inputs).items():
                with contextlib.suppress(Exception):
                    differ = self._differing(calls, self._run(part, inputs | {name: mixed}, always=True))
                    for call, _ in differ:
                        call.optional = name
                    if differ:
                        # Texts alone have zeros.
                        self._note(calls, self._run(part, inputs | {name: zeros}, always=True), f"with {name}")
            return calls

    def _run(self, part: PreTrainedModel, inputs: Inputs, *, always: bool = False) -> list[Call]:
        """Run a part once; `always` says whether to make masks that hide nothing."""
        self.always = always
        self.calls: list[Call] = []
        # Kind, window and mask of the masks that transformers made.
        self.masks: list[tuple[str, int | None, Tensor]] = []
        # Kept, so that no later ones lie in the same place.
        self.keys: list[Tensor] = []
        part(**inputs)
        return self.calls

    def _differing(self, calls: list[Call], others: list[Call]) -> list[tuple[Call, Call]]:
        """Return the self-attentions that read other tokens in another run of the same part."""
        queues: dict[nn.Module, list[Call]] = {}
        for other in others:
            queues.setdefault(other.module, []).append(other)
        pairs = [(call, queues[call.module].pop(0)) for call in calls if queues.get(call.module)]
        return [
            (call, other)
            for call, other in pairs
            if call.query[2] == call.key[2]
            and call.reads not in (other.reads, other.here)
            and not (other.mask == "none" and call.module in self.eager)
        ]

    def _note(self, calls: list[Call], others: list[Call], when: str) -> None:
        for call, other in self._differing(calls, others):
            reads = other.here or other.reads
            call.varies = call.varies or f"{when} it reads its tokens {reads}, else {call.reads}, {_NOT_HONOURED}"

    def mask_function(self, batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
        """Build SDPA's mask, and remember its kind."""
        function, window = kwargs.get("mask_function", causal_mask_function), kwargs.get("local_size")
        if self.always:
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = sdpa_mask(batch_size, q_length, kv_length, **kwargs)
        if mask is None:
            return None
        kind = {causal_mask_function: "causal", bidirectional_mask_function: "bidirectional"}.get(function)
        far = _sees_far(function)
        if kind is None and window is not None:
            # The window of Unlimited-OCR begins after the prompt.
            kind = "local" if far and _kind_by_values(mask) else "own"
        if far is False:
            kind = "local"
            lengths = range(1, mask.shape[-1] + 1)
            window = window or max(n for n in lengths if n == 1 or _kind_by_values(mask[..., :n, :n]))
            # These inputs are shorter than most windows: hide more, so that the mask shows what it is, also as a copy.
            mask = mask & ~torch.ones_like(mask).triu(2) & torch.ones_like(mask).triu(-1)
        self.masks.append((kind or _kind_by_values(mask) or "own", window, mask))
        return mask

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        # Many hosts, including most vision-language models, pass it by this name.
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Record the call, and attend with softmax."""
        mask, kind, window = attention_mask, "none", None
        if mask is not None:
            known = [one for one in self.masks if mask is one[2]]
            known = known or [one for one in self.masks if _same_mask(mask, one[2])]
            # Otherwise the host made it itself.
            kind, window, _ = known[0] if known else (_kind_by_values(mask) or "bias", None, None)
        # Without score modifications, as only shapes matter from here.
        altered = [what for name, what in UNSUPPORTED_SCORE_MODS.items() if kwargs.pop(name, None) is not None]
        declared = None if kwargs.get("is_causal") is None else bool(kwargs["is_causal"])
        causal = bool(declared or getattr(module, "is_causal", False))
        if mask is None and module in self.eager:
            causal = False
        elif mask is None and declared is not None:
            # As in SDPA. Next to a mask, hosts pass False because the mask says it.
            causal = declared
        if kind == "local" and mask is not None:
            causal = not bool(_seen(mask).triu(1).any())
        q, k, v = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        call = Call(module, q, k, v, kind, ", ".join(altered), is_causal=causal, declared=declared, window=window)
        call.keys = key.data_ptr()
        if kind == "own" and mask is not None and mask.ndim == 4:
            directions = {True: CAUSALLY, False: BOTH_WAYS}
            call.here = next((words for way, words in directions.items() if key_padding(mask, way) is not None), "")
        self.calls.append(call)
        self.keys.append(key)
        if mask is not None and mask.shape[-1] != key.shape[2]:
            mask = None
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)


def _seen(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _same_mask(mask: Tensor, other: Tensor) -> bool:
    """Tell whether a mask says what a known one does: hosts slice, copy or cast those of transformers."""
    alike = mask.ndim == 4 and mask.shape[-2:] == other.shape[-2:] and not mask.is_meta
    return alike and bool((_seen(mask) == other[:1]).all())


def _kind_by_values(mask: Tensor) -> str | None:
    """Return the kind of a mask by what it hides apart from padding; None if it is neither direction's."""
    if mask.ndim != 4 or mask.is_meta:
        return None
    if key_padding(mask, causal=False) is not None or blocks(mask) is not None:
        return "bidirectional"
    return "causal" if key_padding(mask, causal=True) is not None else None


def _sees_far(function: Callable[..., object]) -> bool | None:
    """Tell whether a mask function lets a token see one far before it; None if that depends on the row's tokens."""
    parts = inspect.getclosurevars(function).nonlocals.get("mask_functions") if inspect.isfunction(function) else None
    if parts is None:
        zero, far = torch.zeros(1, dtype=torch.long), torch.tensor([1 << 40])
        try:
            return bool(function(zero, zero, far, far // 2))
        except (IndexError, RuntimeError, TypeError, ValueError):
            return None
    known, deciding = {_sees_far(part) for part in parts}, function.__code__ is _UNION
    return deciding if deciding in known else None if None in known else not deciding


def find_attentions(model: PreTrainedModel, calls: list[Call], local_as_full: bool) -> list[LayerPlan]:
    """List the attentions called in trial runs, one per module.

    Args:
        model: the model.
        calls: the calls of its trial runs, in order.
        local_as_full: whether layers with a sliding window or chunks can be converted.

    Returns:
        The layers without a kernel or number, in the order of their first calls; those with a reason stay softmax.
    """
    names = plan_names(model)
    by_module: dict[nn.Module, list[Call]] = {}
    for call in calls:
        by_module.setdefault(call.module, []).append(call)
    first = {module: found[0] for module, found in by_module.items()}
    times = Counter(call.module for call in calls)
    sharing = _sharing(calls)
    reasons = {
        module: _why_any_kept(found, names[module], local_as_full, module in sharing)
        for module, found in by_module.items()
    }
    # A cache keeps the keys of layers that stay softmax, and BLT numbers its global layers like its local ones.
    kept = {
        getattr(module, "layer_idx", None)
        for module, call in first.items()
        if reasons[module] not in ("", CROSS, HEAD) and call.query[2] == call.key[2]
    }
    layers = []
    for module, call in first.items():
        cache_index = getattr(module, "layer_idx", None)
        # One running state serves one call per token: if an attention runs more often, its keys are kept.
        if cache_index in kept or times[module] > 1 or module in sharing or (cache_index or 0) < 0:
            cache_index = None
        causal = call.causal
        shape = HeadShape(call.query[1], call.key[1], call.query[3], call.value[3], causal)
        facts = host_facts(module, shape, cache_index)
        if "is_causal" not in facts:
            # The direction comes from the call, or from the mask.
            facts = (CALLED if call.declared == causal else MASKED, *facts)
        host = (*facts, LOCAL) if local_as_full and call.mask == "local" else facts
        host = (*host, OWN) if reasons[module] and reasons[module] == call.varies else host
        layers.append(LayerPlan(names[module], None, SOFTMAX, shape, {}, reasons[module], cache_index, host=host))
    return layers


def _sharing(calls: list[Call]) -> set[nn.Module]:
    """Return the attentions that read the keys of another one, and those whose keys others read (Gemma 4)."""
    owners = {call.keys: call.module for call in reversed(calls) if call.keys}
    readers = {call.module for call in calls if owners.get(call.keys, call.module) is not call.module}
    read = {owners[call.keys] for call in calls if call.module in readers}
    modules = {call.module for call in calls}
    stated = {x for x in modules if getattr(x, "is_kv_shared_layer", 0) or getattr(x, "store_full_length_kv", 0)}
    return readers | read | stated


def plan_names(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Return the names that a plan has for a model's modules: from the body, and `OUTSIDE` before those of the head."""
    outside = {module: f"{OUTSIDE}{name}" for name, module in model.named_modules()}
    return outside | {module: name for name, module in model.base_model.named_modules()}


def find_unreached(model: PreTrainedModel, calls: list[Call]) -> list[LayerPlan]:
    """List the attentions that no trial run called, found by class or projections; they stay softmax."""
    names = plan_names(model)
    found: dict[str, nn.Module] = {}
    for module, name in names.items():
        # Projections to queries and keys, outside of a linear recurrence.
        own = set(map(str.lower, (*dict(module.named_children()), *module._parameters)))
        projects = not own & _RECURRENT and (own & _JOINT or (own & _QUERIES and own & _KEYS))
        named = projects or _ATTENTION.search(type(module).__name__)
        if named and next(module.parameters(), None) is not None:
            found[name] = module
    seen = tuple(f"{names[call.module]}." for call in calls)
    layers = []
    for name, module in found.items():
        around = [other for other in (*found, *seen) if other.startswith(f"{name}.")]
        if around or f"{name}.".startswith(seen):
            continue
        kind = type(module).__name__
        host: tuple[str, ...] = (MASKED, OWN)
        reason = f"its own attention code ({kind}), which cannot be reached"
        if "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(module).forward):
            host = (MASKED,)
            reason = f"did not run in the trial run ({kind}); pass example inputs that reach it (--example-inputs)"
        layers.append(LayerPlan(name, None, SOFTMAX, UNKNOWN, reason=reason, host=host))
    return layers


def _why_any_kept(calls: list[Call], name: str, local_as_full: bool, shares_keys: bool) -> str:
    """Return why an attention cannot be converted, looking at all its calls; empty if it can."""
    reason = next(filter(None, (_why_kept(call, name, local_as_full, shares_keys) for call in calls)), "")
    if not reason and len({call.causal for call in calls}) > 1:
        return f"it reads its tokens causally in some calls and in both directions in others, {_NOT_HONOURED}"
    return reason


def _why_kept(call: Call, name: str, local_as_full: bool, shares_keys: bool) -> str:
    """Return why an attention cannot be converted; empty if it can."""
    if name.startswith(OUTSIDE):
        return HEAD
    if call.refused:
        return call.refused
    if call.varies:
        return call.varies
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
    if call.mask == "local" and (shares_keys or not local_as_full):
        # A cache keeps no keys beyond the window for the layers that share them.
        return LOCAL_KEPT + ", with keys that several layers share" * shares_keys
    if chooses_keys(call.module):
        return "an indexer chooses the keys of every query, which a kernel cannot honour"
    if call.mask == "own":
        return "the model's own mask (such as parts that see ahead), which a kernel cannot honour"
    if call.query[1] % call.key[1]:
        return f"{call.query[1]} query heads over {call.key[1]} key heads"
    return ""
