"""Make transformers' Auto classes and pipelines know converted models."""

from __future__ import annotations

import importlib
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from linearize.core.errors import CheckpointError
from linearize.modeling.config import MODEL_TYPE, LinearizeConfig, on_config_class


def register() -> None:
    """Register the model type `linearize`; an architecture is registered when its first checkpoint is loaded."""
    AutoConfig.register(MODEL_TYPE, LinearizeConfig, exist_ok=True)
    on_config_class(register_architecture)
    PreTrainedConfig.from_dict = classmethod(_from_dict)  # type: ignore[assignment]


_READ: Any = vars(PreTrainedConfig)["from_dict"].__func__


def _from_dict(cls: type[PreTrainedConfig], config_dict: dict[str, Any], **kwargs: Any) -> Any:
    """Read a config as transformers does, but refuse to read a converted model's config as the original's.

    Otherwise `BertForMaskedLM.from_pretrained(folder)` would run a converted BERT as softmax. `GUARD` also prevents
    this, but with a less helpful error, and older checkpoints do not have it.

    Raises:
        CheckpointError: if a transformers class reads the config of a converted checkpoint.
    """
    if config_dict.get("model_type") == MODEL_TYPE != cls.model_type:
        raise CheckpointError(
            f"{cls.__name__}: got the config of a checkpoint with linear attention, which this class would run as "
            "softmax; load it with an Auto class, such as AutoModel or AutoModelForMaskedLM"
        )
    return _READ(cls, config_dict, **kwargs)


def register_architecture(config: type[LinearizeConfig], base: type[PreTrainedConfig]) -> None:
    """Register `config`, the config class of converted models of `base`, with every Auto class that knows `base`."""
    from transformers.models.auto import modeling_auto

    from linearize.modeling.model import model_class

    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and base in mapping:
            originals = mapping[base]
            if isinstance(originals, (tuple, list)):
                mapping.register(config, tuple(model_class(cls, config) for cls in originals), exist_ok=True)
            else:
                mapping.register(config, model_class(originals, config), exist_ok=True)
    # Auto classes find the original's tokenizers and processors by the converted config.
    processors = {
        "tokenization_auto": "TOKENIZER_MAPPING",
        "feature_extraction_auto": "FEATURE_EXTRACTOR_MAPPING",
        "image_processing_auto": "IMAGE_PROCESSOR_MAPPING",
        "processing_auto": "PROCESSOR_MAPPING",
    }
    for module, name in processors.items():
        table: Any = getattr(importlib.import_module(f"transformers.models.auto.{module}"), name, None)
        if table is not None and base in table:
            table.register(config, table[base], exist_ok=True)
