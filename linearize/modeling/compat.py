"""What converted models rely on in transformers without a public name, all in one place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel
# Imported inside functions: the configs of this package are registered before transformers can import its models.


def implementation_of(config: PreTrainedConfig) -> str | None:
    """Return the attention implementation that a config names."""
    return getattr(config, "_attn_implementation_internal", None)


def set_implementation(config: PreTrainedConfig, name: str | None) -> None:
    """Name the attention implementation in a config; that of a converted model takes any name here."""
    vars(config)["_attn_implementation_internal"] = name


def knows_sdpa(part: PreTrainedModel) -> bool:
    """Tell whether a model, or a part of one, runs on SDPA, and not on eager softmax alone."""
    return bool(part._supports_sdpa)


def share_renamings(name: str, base: type[PreTrainedModel], inner: bool = False) -> None:
    """Rename weights between file and model as for the original, which transformers finds by class or `model_type`.

    Args:
        name: name of the class of converted models.
        base: class of the original.
        inner: whether the class is that of a body inside its model. Entries by `model_type` then come with the model:
            registered for both, they would be applied twice.
    """
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    mapping = get_checkpoint_conversion_mapping(base.__name__)
    if mapping is None and base.config_class is not None and not inner:
        mapping = get_checkpoint_conversion_mapping(base.config_class.model_type)
    if mapping is not None:
        register_checkpoint_conversion_mapping(name, mapping, overwrite=True)


def forget_renamings(model: PreTrainedModel) -> None:
    """Let a model be saved under the names that its weights have now, not those of the file that it came from."""
    model._weight_conversions = None  # type: ignore[assignment]


def share_classes(base: type[PreTrainedModel], names: tuple[str, ...]) -> None:
    """Let files that choose classes of attentions by the implementation's name (SAM) choose those of SDPA."""
    modules = [sys.modules[one.__module__] for one in base.__mro__ if one.__module__ in sys.modules]
    for table in (x for module in modules for x in vars(module).values() if isinstance(x, dict)):
        if "eager" in table and all(isinstance(x, type) for x in table.values()):
            for name in names:
                table.setdefault(name, table.get("sdpa", table["eager"]))


def record_outputs(model: PreTrainedModel) -> None:
    """Tell transformers' output recorder, which looks models up by class, that the class is another one now."""
    try:
        from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY
    except ImportError:
        from transformers.utils.generic import _CAN_RECORD_REGISTRY  # type: ignore[attr-defined,no-redef]
    _CAN_RECORD_REGISTRY[model] = model._can_record_outputs


_SLICING = "_maybe_slice_kv_shared_inputs"
"""Method by which Gemma 4 leaves out tokens, and the rows of a mask, before layers that share keys."""


def keep_tokens(model: nn.Module) -> None:
    """Let Gemma 4 leave out nothing before layers that share keys: linear attention's mask has no rows."""
    for module in model.modules():
        if hasattr(type(module), _SLICING):
            setattr(module, _SLICING, _unsliced)


def _unsliced(
    hidden: Tensor, per_layer: object, positions: object, masks: object, *args: object, **kwargs: object
) -> Any:
    return hidden, per_layer, positions, masks
