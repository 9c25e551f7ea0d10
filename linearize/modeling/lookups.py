"""What transformers looks up by the name of a class or an attention implementation, for converted models too."""

from __future__ import annotations

import sys

from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from linearize.modeling.implementations import IMPLEMENTATIONS


def share_renamings(name: str, base: type[PreTrainedModel], inner: bool = False) -> None:
    """Rename weights between file and model as for the original, which transformers finds by class or `model_type`.

    Args:
        name: of the class of converted models.
        base: class of the original.
        inner: whether the class is that of a body inside its model. Entries by `model_type` then come with the model:
            registered for both, they would be applied twice.
    """
    mapping = get_checkpoint_conversion_mapping(base.__name__)
    if mapping is None and base.config_class is not None and not inner:
        mapping = get_checkpoint_conversion_mapping(base.config_class.model_type)
    if mapping is not None:
        register_checkpoint_conversion_mapping(name, mapping, overwrite=True)


def share_classes(base: type[PreTrainedModel]) -> None:
    """Let files that choose classes of attentions by the implementation's name (SAM) choose those of SDPA."""
    modules = [sys.modules[one.__module__] for one in base.__mro__ if one.__module__ in sys.modules]
    for table in (x for module in modules for x in vars(module).values() if isinstance(x, dict)):
        if "eager" in table and all(isinstance(x, type) for x in table.values()):
            for name in IMPLEMENTATIONS:
                table.setdefault(name, table.get("sdpa", table["eager"]))


def record_outputs(model: PreTrainedModel) -> None:
    """Tell transformers' output recorder, which looks models up by class, that the class is another one now."""
    try:
        from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY
    except ImportError:
        from transformers.utils.generic import _CAN_RECORD_REGISTRY  # type: ignore[attr-defined,no-redef]
    _CAN_RECORD_REGISTRY[model] = model._can_record_outputs
