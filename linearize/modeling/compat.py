"""Access to the private parts of transformers that converted models rely on, above all the attention implementation."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, _active_collector

from linearize.attention.mixer import EAGER, IMPLEMENTATION, LOCAL_AS_FULL
from linearize.core.errors import ConfigError, UnsupportedModelError
from linearize.modeling.plan import LOCAL, OWN, SOFTMAX, Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel
# Import transformers' models inside functions: this package's configs are registered before they can be imported.

IMPLEMENTATIONS = (IMPLEMENTATION, LOCAL_AS_FULL, EAGER)


def implementation_of(config: PreTrainedConfig) -> str | None:
    """Return the attention implementation that a config names."""
    return getattr(config, "_attn_implementation_internal", None)


def set_implementation(config: PreTrainedConfig, name: str | None) -> None:
    """Set the attention implementation in a config; the config of a converted model accepts any name here."""
    vars(config)["_attn_implementation_internal"] = name


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Return the configs of a model and of its parts, each once; a part may have created its own."""
    held = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in held if isinstance(config, PreTrainedConfig)}.values())


def implementation(config: PreTrainedConfig) -> str:
    """Return the attention implementation that the config of a converted model asks for."""
    layers = (getattr(config, "linearize", None) or {}).get("layers", ())
    local = [layer["kernel"] for layer in layers if LOCAL in layer.get("host", ())]
    return LOCAL_AS_FULL if local and SOFTMAX not in local else IMPLEMENTATION


def use_linear_attention(config: PreTrainedConfig, name: str | None = None) -> None:
    """Set the attention implementation on a converted model's config and on the configs inside it."""
    name = implementation(config) if name is None else name
    set_implementation(config, name)
    for key in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, key, None)
        if inner is not None:
            use_linear_attention(inner, name)


def use_implementations(model: PreTrainedModel, plan: Plan, name: str) -> None:
    """Set the attention implementation of every part of a converted model.

    Parts that support only eager softmax get the masks of eager softmax. Parts without a converted layer, whose
    attention has its own code or masks, or chooses its keys, run as in the original.

    Args:
        model: the model.
        plan: its plan.
        name: the implementation for the other parts.

    Raises:
        UnsupportedModelError: if a part has both converted layers and layers that choose their keys.
    """
    from transformers import PreTrainedModel

    root: nn.Module = model.base_model
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    # A part may have created its own config (X-CLIP): without this it would silently attend with softmax.
    for config in configs_of(model):
        set_implementation(config, name)
    for part in parts:
        if name == IMPLEMENTATION and not part._supports_sdpa:
            set_implementation(part.config, EAGER)
    converted = [_part_of(root, layer.module, parts) for layer in plan.converted]
    choosing = [x.module for x in plan.layers if x.in_body and chooses_keys(root.get_submodule(x.module))]
    own = [x.module for x in plan.layers if OWN in x.host and x.in_body]
    if mixed := next((x for x in choosing if _part_of(root, x, parts) in converted), None):
        raise UnsupportedModelError(
            f"{type(model).__name__}: attention {mixed!r} chooses its keys, which works only under the original's "
            "attention implementation, but layers next to it are converted; keep these softmax"
        )
    original = [_part_of(root, module, parts) for module in (*own, *choosing)]
    for part in dict.fromkeys(part for part in original if part not in converted):
        config = part.config
        if any(one.config is config for one in converted):
            copied: Any = type(config).__new__(type(config))
            vars(copied).update(vars(config))
            for module in part.modules():
                if getattr(module, "config", None) is config:
                    module.config = copied
            config = copied
        set_implementation(config, "sdpa" if part._supports_sdpa else "eager")


def chooses_keys(host: nn.Module) -> bool:
    """Tell whether a host has an indexer; it hides the other keys only where the implementation is eager or SDPA."""
    return hasattr(host, "indexer")


def _part_of(root: nn.Module, module: str, parts: list[PreTrainedModel]) -> PreTrainedModel:
    """Return the innermost model that contains the module of this name."""
    host = root.get_submodule(module)
    return [part for part in parts if host in set(part.modules())][-1]


def check_implementation(host: nn.Module) -> None:
    """Check that the config of a converted attention was not set to softmax, which would bypass its kernel.

    Raises:
        ConfigError: if it was.
    """
    name = getattr(getattr(host, "config", None), "_attn_implementation_internal", None)
    if name not in (None, *IMPLEMENTATIONS):
        raise ConfigError(refusal(name))


def refusal(name: object) -> str:
    """Return the message that a converted model has no other attention."""
    return (
        f"got attn_implementation={name!r}, but a converted model runs its own linear attention; leave the "
        "name out, or load the original checkpoint for softmax"
    )


def enter_parts(config: PreTrainedConfig) -> None:
    """Enter our implementations in the tables of attention classes of the files that build a config's parts."""
    for key in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            file = type(part).__module__.replace("configuration_", "modeling_")
            with contextlib.suppress(ImportError):
                share_tables({importlib.import_module(file).__name__})
            enter_parts(part)


def share_tables(files: set[str]) -> None:
    """Enter our attention in the tables of some modeling files (SAM): attention classes by the implementation's name.

    Ours get the classes of SDPA.
    """
    for file in files & sys.modules.keys():
        for table in vars(sys.modules[file]).values():
            if isinstance(table, dict) and "eager" in table and all(isinstance(x, type) for x in table.values()):
                for kind in IMPLEMENTATIONS:
                    table.setdefault(kind, table.get("sdpa", table["eager"]))


def forget_renamings(model: PreTrainedModel) -> None:
    """Make a model save its weights under their current names instead of those in the file it was loaded from."""
    vars(model)["_weight_conversions"] = None


def record_outputs(model: PreTrainedModel) -> None:
    """Register a model's new class with transformers' output recorder, which looks models up by class."""
    registry: dict[object, object] = _CAN_RECORD_REGISTRY
    # The keys are class names; newer releases derive the name from the model that is passed as the key.
    registry[str(type(model)) if type(registry) is dict else model] = model._can_record_outputs


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Temporarily stop recording outputs: a layer that runs inside another model would count as one of its layers."""
    token = _active_collector.set(None)
    try:
        yield
    finally:
        _active_collector.reset(token)


_SLICING = "_maybe_slice_kv_shared_inputs"
"""The method with which Gemma 4 drops tokens, and rows of the mask, before layers that share keys."""


def keep_tokens(model: nn.Module) -> None:
    """Stop Gemma 4 from dropping tokens before layers that share keys: the mask of linear attention has no rows."""
    for module in model.modules():
        if (method := getattr(type(module), _SLICING, None)) is not None:
            # It returns the arguments before this one, which are not the same for all forms.
            count = [*inspect.signature(method).parameters].index("logits_to_keep") - 1
            setattr(module, _SLICING, functools.partial(_first, count))


def _first(count: int, *args: object, **kwargs: object) -> tuple[object, ...]:
    return args[:count]
