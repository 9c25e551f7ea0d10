"""Find the attentions of a model by running it once on a few made-up tokens and recording every call.

No table of architectures is needed: every call of transformers' attention interface is recorded, with its sizes,
direction and mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from linearize.attention.interface import UNSUPPORTED_SCORE_MODS
from linearize.attention.masks import key_padding
from linearize.attention.packing import blocks
from linearize.attention.redirect import REDIRECTED
from linearize.conversion import timm
from linearize.conversion.inputs import Call, Inputs, candidates
from linearize.core.errors import UnsupportedModelError, first_line
from linearize.modeling.compat import configs_of, implementation_of, knows_sdpa, set_implementation
from linearize.modeling.model import evaluating

_NAME = "linearize_probe"


@dataclass
class _Recorder:
    """Records calls.

    Attributes:
        always: whether masks are made even if they hide nothing, so that their kind is known.
        eager: modules of parts that only support eager softmax, which follows its mask and ignores `is_causal`.
        calls: the calls so far.
        masks: kind, mask and window of the masks so far, by the mask's identity.
    """

    always: bool = True
    eager: set[nn.Module] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    masks: dict[int, tuple[str, Tensor, int | None]] = field(default_factory=dict)

    def mask_function(self, batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
        """Build SDPA's mask, and remember its kind."""
        kinds = {causal_mask_function: "causal", bidirectional_mask_function: "bidirectional"}
        window = kwargs.get("local_size")
        kind = kinds.get(kwargs.get("mask_function", causal_mask_function), "own" if window is None else "local")
        if self.always:
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = sdpa_mask(batch_size, q_length, kv_length, **kwargs)
        if mask is not None:
            self.masks[id(mask)] = (kind, mask, window)
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
            kind, _, window = self.masks.get(id(mask)) or (_kind(mask), mask, None)
        altered = ", ".join(what for name, what in UNSUPPORTED_SCORE_MODS.items() if kwargs.get(name) is not None)
        causal = bool(kwargs.get("is_causal") or getattr(module, "is_causal", False))
        if mask is None and module in self.eager:
            causal = False
        if kind == "local" and mask is not None:
            causal = not bool(mask.triu(1).any())
        q, k, v = (tuple(t.shape) for t in (query, key, value))
        declared = None if kwargs.get("is_causal") is None else bool(kwargs["is_causal"])
        call = Call(module, q, k, v, mask=kind, altered=altered, is_causal=causal, declared=declared, window=window)
        self.calls.append(call)
        # Score modifications are left out: only shapes matter from here.
        kept = {name: value for name, value in kwargs.items() if name not in UNSUPPORTED_SCORE_MODS}
        if mask is not None and mask.shape[-1] != key.shape[2]:
            mask = None
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kept)


def _kind(mask: Tensor) -> str:
    """Return the kind of a mask that the host made itself."""
    if mask.ndim == 4 and (key_padding(mask, causal=False) is not None or blocks(mask) is not None):
        return "bidirectional"
    return "causal" if mask.ndim == 4 and key_padding(mask, causal=True) is not None else "bias"


class Run(NamedTuple):
    """A forward that a model, or a part of it, accepts.

    Attributes:
        module: the model or its part.
        inputs: keyword arguments for its forward.
    """

    module: PreTrainedModel
    inputs: Inputs


def trial_runs(model: PreTrainedModel, inputs: Mapping[str, Tensor] | None = None) -> tuple[list[Run], list[Call]]:
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
            reached = {id(call.module) for call in calls}
            if not any(id(module) in reached for module in part.modules()):
                with contextlib.suppress(UnsupportedModelError):
                    more, found = _first(model, part, candidates(part))
                    runs, calls = (runs + more, calls + found) if found else (runs, calls)
        if failure is not None and not calls:
            raise failure
        return runs, calls


def _first(model: PreTrainedModel, part: PreTrainedModel, tried: Iterable[Inputs]) -> tuple[list[Run], list[Call]]:
    """Return the first run of a part that does not fail, and its calls."""
    failures: list[tuple[Inputs, Exception]] = []
    for inputs in tried:
        run = Run(part, inputs)
        try:
            return [run], _run(model, run)
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


def _run(model: PreTrainedModel, run: Run) -> list[Call]:
    if model.config.model_type in REDIRECTED:
        return timm.probe(model, run.inputs)
    # Some models pass a mask on to layers of another length (Informer), which only works if no mask is made.
    for always in (True, False):
        recorder = _Recorder(always)
        try:
            with _recording(model, recorder), torch.no_grad():
                run.module(**run.inputs)
            break
        except Exception as error:
            if not always or "ask" not in str(error):
                raise
    return recorder.calls


@contextlib.contextmanager
def _recording(model: PreTrainedModel, recorder: _Recorder) -> Iterator[None]:
    """Temporarily route the attention of `model` to the recorder, in all its configs."""
    AttentionInterface.register(_NAME, recorder.attention)
    AttentionMaskInterface.register(_NAME, recorder.mask_function)
    for part in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        change = recorder.eager.difference_update if knows_sdpa(part) else recorder.eager.update
        change(part.modules())
    with contextlib.ExitStack() as undo:
        for table in (AttentionInterface, AttentionMaskInterface):
            undo.callback(table._global_mapping.pop, _NAME, None)
        for config in configs_of(model):
            undo.callback(set_implementation, config, implementation_of(config))
            set_implementation(config, _NAME)
        yield
