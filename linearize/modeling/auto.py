"""Make transformers' Auto classes, and peft, know converted models."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from linearize.core.errors import CheckpointError
from linearize.core.registry import Values
from linearize.modeling.config import MODEL_TYPE, LinearizeConfig, on_config_class
from linearize.modeling.late import when_imported


def register() -> None:
    """Register the model type `linearize`; an architecture is registered when its first checkpoint is loaded."""
    AutoConfig.register(MODEL_TYPE, LinearizeConfig, exist_ok=True)
    on_config_class(register_architecture)
    guard_configs()


_READ = vars(PreTrainedConfig)["from_dict"].__func__


class _ConvertedError(CheckpointError):
    """A class of transformers reads the config of a converted checkpoint."""


@functools.cache
def guard_configs() -> None:
    """Let no class of transformers read the config of a converted checkpoint as its own."""
    PreTrainedConfig.from_dict = classmethod(_from_dict)  # type: ignore[assignment]


@functools.cache
def guard_models() -> None:
    """Let a class of transformers load its converted counterpart.

    Many look the class up in `config.architectures`: sentence-transformers with our config, `transformers serve`
    without one.
    """
    from transformers.modeling_utils import PreTrainedModel

    load = vars(PreTrainedModel)["from_pretrained"].__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        if config is None:
            try:
                return load(cls, *args, **kwargs)
            except _ConvertedError:
                # The code in a checkpoint's folder runs only if the caller allows it in this call too.
                if MODEL_TYPE not in CONFIG_MAPPING and not kwargs.get("trust_remote_code"):
                    raise
                options = {key: kwargs[key] for key in _READING if key in kwargs}
                name = args[0] if args else kwargs["pretrained_model_name_or_path"]
                config = AutoConfig.from_pretrained(name, **options)
        from linearize.modeling.model import LinearizedModel, model_class

        if not isinstance(config, LinearizeConfig) or issubclass(cls, LinearizedModel):
            return load(cls, *args, **kwargs)
        if cls.config_class is None or not isinstance(config, cls.config_class):
            raise CheckpointError(
                f"{cls.__name__}: got the {type(config).__name__} of a converted model, expected a config of this "
                "class; load it with an Auto class, such as AutoModel"
            )
        return model_class(cls, type(config)).from_pretrained(*args, **kwargs | {"config": config})

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment, method-assign]


_READING = ("trust_remote_code", "revision", "cache_dir", "token", "local_files_only", "subfolder", "force_download")
"""Arguments of `from_pretrained` that say where a config is and whether its code may run."""


def _from_dict(cls: type[PreTrainedConfig], config_dict: Values, **kwargs: object) -> PreTrainedConfig:
    """Read a config as transformers does, but refuse to read a converted model's config as the original's.

    Otherwise a model of the original's class would run a converted checkpoint as softmax. `GUARD` also prevents this,
    but with a less helpful error, and older checkpoints do not have it.

    Raises:
        CheckpointError: if a transformers class reads the config of a converted checkpoint.
    """
    written = config_dict.get("model_type") == MODEL_TYPE or isinstance(config_dict.get(MODEL_TYPE), dict)
    # Ask for the field, because the code saved with a checkpoint has another LinearizeConfig.
    if written and not hasattr(cls, MODEL_TYPE):
        raise _ConvertedError(
            f"{cls.__name__}: got the config of a checkpoint with linear attention, which this class would run as "
            "softmax; load it with an Auto class, such as AutoModel or AutoModelForMaskedLM"
        )
    return _READ(cls, config_dict, **kwargs)


def register_architecture(config: type[LinearizeConfig], base: type[PreTrainedConfig]) -> None:
    """Register `config`, the config class of converted models of `base`, in every table that knows `base`."""
    # linearize's hook did this, but not where only the code saved with a checkpoint runs.
    guard_configs()
    guard_models()
    from transformers import PreTrainedModel
    from transformers.models.auto.auto_factory import _LazyAutoMapping

    from linearize.modeling.model import model_class

    def converted(original: Any) -> Any:
        if isinstance(original, (tuple, list)):
            return tuple(map(converted, original))
        is_model = isinstance(original, type) and issubclass(original, PreTrainedModel)
        return model_class(original, config) if is_model else original

    # The other tables find processors. A table without an entry would find that of `base`, which has the same name.
    names = ("modeling", "tokenization", "feature_extraction", "image_processing", "video_processing", "processing")
    for name in names:
        for table in vars(importlib.import_module(f"transformers.models.auto.{name}_auto")).values():
            if isinstance(table, _LazyAutoMapping) and base in table:
                table.register(config, converted(table[base]), exist_ok=True)
    when_imported(_PEFT, _tell_peft)


_PEFT = "peft.tuners.tuners_utils"


@functools.cache
def _tell_peft() -> None:
    """Let peft find its default modules by the original's `model_type`: it reads `to_dict`, which may be written."""
    tuner = vars(sys.modules[_PEFT])["BaseTuner"]
    read = tuner.get_model_config

    def get_model_config(model: object) -> Values:
        values, found = read(model), getattr(model, "config", None)
        return {**values, "model_type": found.model_type} if isinstance(found, LinearizeConfig) else values

    tuner.get_model_config = staticmethod(get_model_config)
