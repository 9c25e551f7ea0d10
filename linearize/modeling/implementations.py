"""Which attention implementation each part of a converted model runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig

from linearize.attention.mixer import EAGER, IMPLEMENTATION, LOCAL_AS_FULL
from linearize.core.errors import ConfigError
from linearize.modeling.compat import implementation_of, knows_sdpa, set_implementation
from linearize.modeling.plan import LOCAL, OWN, SOFTMAX, Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATIONS = (IMPLEMENTATION, LOCAL_AS_FULL, EAGER)


def implementation(config: PreTrainedConfig) -> str:
    """Return the name of the attention implementation that a converted model's config asks for."""
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

    Parts that know eager softmax only get masks as eager softmax does. Parts without a converted layer whose attention
    has its own code or masks run as they did in the original.

    Args:
        model: the model.
        plan: its plan.
        name: the implementation of the other parts.
    """
    # Not above: transformers imports the configs of this package before its models.
    from transformers import PreTrainedModel

    root: nn.Module = model.base_model
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in model.modules():
        # A part may have made its own config (X-CLIP): it would attend with softmax, without warning.
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            set_implementation(config, name)
    for part in parts:
        if name == IMPLEMENTATION and not knows_sdpa(part):
            set_implementation(part.config, EAGER)
    converted = [_part_of(root, layer.module, parts) for layer in plan.converted]
    original = [_part_of(root, layer.module, parts) for layer in plan.layers if OWN in layer.host]
    for part in dict.fromkeys(part for part in original if part not in converted):
        config = part.config
        if any(one.config is config for one in converted):
            copied: Any = type(config).__new__(type(config))
            vars(copied).update(vars(config))
            for module in part.modules():
                if getattr(module, "config", None) is config:
                    module.config = copied
            config = copied
        set_implementation(config, "sdpa" if knows_sdpa(part) else "eager")


def _part_of(root: nn.Module, module: str, parts: list[PreTrainedModel]) -> PreTrainedModel:
    """Return the innermost model that holds the module of a name."""
    host = root.get_submodule(module)
    return [part for part in parts if any(one is host for one in part.modules())][-1]


def check_implementation(host: nn.Module) -> None:
    """Refuse a call of a converted attention whose config was set to softmax: its kernel would be left out.

    Raises:
        ConfigError: if it was.
    """
    config = getattr(host, "config", None)
    if isinstance(config, PreTrainedConfig) and (name := implementation_of(config)) not in (None, *IMPLEMENTATIONS):
        raise ConfigError(refusal(name))


def refusal(name: object) -> str:
    """Say that a converted model has no other attention."""
    return (
        f"got attn_implementation={name!r}, but a converted model runs its own linear attention; load the original "
        "checkpoint for softmax"
    )
