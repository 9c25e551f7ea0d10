"""Config of a converted model: the original's config and the section `linearize`.

In memory it has the original's names: class name, `model_type`, `architectures`. Pipelines, peft and the Trainer choose
by them. Written (`to_dict`, config.json), it has names of its own. Its `model_type` prevents transformers' Auto classes
from loading the checkpoint as a softmax model, its `architectures` do so for engines that choose by them. A concrete
class (`BertForMaskedLM.from_pretrained`) only warns about a different model type, so `GUARD` makes its config fail.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from linearize.attention.factory import build_mixer
from linearize.attention.parts import newest_part
from linearize.core.errors import CheckpointError, ConfigError, LinearizeError, UnknownNameError
from linearize.core.registry import ReadOnlyValues, Values, kernel_info
from linearize.modeling.compat import IMPLEMENTATIONS, implementation, refusal, use_linear_attention
from linearize.modeling.plan import ABSENT, Plan, damaged
from linearize.modeling.portable import ENTRY, code_files, outside_packages, why_not

_INSTALLED = __name__.startswith("linearize.")
"""Whether this is the installed package; otherwise it is the code saved with a checkpoint."""
MODEL_TYPE = "linearize"
PREFIX = "Linearized"
"""Written before the original's class names, in `architectures` and wherever a class is looked up by name (pickle)."""
FORMAT_VERSION = 2
"""The newest format version that this linearize reads; it writes the oldest that can say what the plan has."""
GUARD = "; linear attention: load it with an Auto class of transformers, after `import linearize` or with code trusted"
"""Text after a number in config.json: a class that does not support linear attention fails on the value's type."""


class LinearizeConfig(PreTrainedConfig):
    """Entry of `AutoConfig`: reads the section `linearize` and becomes the config class of the original model."""

    model_type = MODEL_TYPE
    linearize: dict[str, Any] | None = None

    def __new__(cls, *args: object, **kwargs: object) -> LinearizeConfig:
        """Become the config class of the original; composite models create the configs of their parts in this way.

        Raises:
            CheckpointError: as in `from_dict`.
            ConfigError: as in `from_dict`.
        """
        if cls is LinearizeConfig and kwargs.get("linearize") is not None:
            section = check_section(kwargs["linearize"])
            cls = config_class(base_config_class(section["base_model_type"]))
        config: LinearizeConfig = super().__new__(cls)
        return config

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: object
    ) -> tuple[Values, Values]:
        """Return the values of a config.json as transformers does, with the original's `model_type`."""
        values, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return {**values, "model_type": cls.model_type} if values.get("model_type") == MODEL_TYPE else values, rest

    @classmethod
    def from_dict(cls, config_dict: Values, **kwargs: object) -> Any:
        """Return the config of a converted model, of the class that belongs to its original.

        Raises:
            CheckpointError: if the section is missing, damaged or in a newer format, if the installed transformers
                does not know the original's model type, or if another value is of the wrong kind.
            ConfigError: if a kernel is unknown, or one of its arguments is not allowed.
        """
        config_dict = _unguarded(config_dict)
        if cls is LinearizeConfig:
            section = check_section(config_dict.get("linearize"))
            return config_class(base_config_class(section["base_model_type"])).from_dict(config_dict, **kwargs)
        try:
            config = super().from_dict(config_dict, **kwargs)
            dtype = config_dict.get("dtype")
            if dtype is not None and not isinstance(getattr(torch, str(dtype), dtype), torch.dtype):
                raise TypeError(f"got dtype {dtype!r}, expected a name such as 'float32'")
            return config
        except LinearizeError:
            raise
        except Exception as error:
            # huggingface_hub's validation wraps our errors in its own.
            if isinstance(error.__cause__, LinearizeError):
                raise error.__cause__ from None
            # Whatever transformers cannot read is damage to the file.
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise damaged(f"it describes no model, or an argument that overrides a value is wrong ({why})") from error

    def to_dict(self) -> dict[str, object]:
        """Return plain data as it may be written: the names of a converted model, the section and its checksum."""
        values = super().to_dict() | {"model_type": MODEL_TYPE}
        if self.architectures:
            values["architectures"] = [f"{PREFIX}{name.removeprefix(PREFIX)}" for name in self.architectures]
        if self.linearize:
            values["linearize"] = _with_checksum(self.linearize)
        return values

    def to_diff_dict(self) -> dict[str, object]:
        """Return the values for config.json: those other than the defaults, the section, `GUARD` and `auto_map`."""
        section = _with_checksum(self.linearize) if self.linearize else self.linearize
        values = super().to_diff_dict() | {"model_type": MODEL_TYPE, "linearize": section}
        # Guard the configs of parts too: the class of a part (CLIPTextModel) reads only its own config.
        for key in getattr(self, "sub_configs", None) or {}:
            if isinstance(values.get(key), dict):
                values[key] |= _guarded(getattr(self, key))
        values |= _guarded(self)
        values.pop("auto_map", None)
        if self.linearize and not (_INSTALLED and why_not(Plan.from_dict(self.linearize))):
            values["auto_map"] = {"AutoConfig": f"{ENTRY}.{LinearizeConfig.__name__}"}
        return values

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: object
    ) -> None:
        """Save as transformers does, with the code that runs the model if linearize is not installed."""
        os.makedirs(save_directory, exist_ok=True)
        plan, files = Plan.from_dict(self.linearize or {}), {}
        if not _INSTALLED:
            # This code was itself saved with a checkpoint: copy it.
            saved = Path(__file__).parent.glob("*linearize*.py")
            files = {file.name: file.read_text(encoding="utf-8") for file in saved}
        elif reason := why_not(plan):
            warnings.warn(reason, stacklevel=2)
        else:
            files = code_files(plan)
        for name, text in files.items():
            (Path(save_directory) / name).write_text(text, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub, **kwargs)


def _guarded(config: PreTrainedConfig) -> dict[str, str]:
    """Return one number of a config with `GUARD` appended, if possible one not needed to run; empty without numbers."""
    general = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names = [
        f.name for f in dataclasses.fields(config) if f.name not in general and f.type in (float, "float", int, "int")
    ]
    name = "initializer_range" if "initializer_range" in names else next(iter(names), None)
    return {} if name is None else {name: json.dumps(getattr(config, name)) + GUARD}


def _unguarded(values: Mapping[str, object]) -> Values:
    """Return the values of a config.json, including nested configs, without `GUARD`.

    Raises:
        CheckpointError: if `GUARD` comes after something else than a number.
    """
    plain = dict(values)
    for key, value in values.items():
        if isinstance(value, str) and value.endswith(GUARD):
            number = value.removesuffix(GUARD)
            try:
                plain[key] = json.loads(number)
            except ValueError:
                raise damaged(f"got {key} {number[:60]!r}, expected a number") from None
        elif isinstance(value, dict) and key != MODEL_TYPE:
            plain[key] = _unguarded(value)
    return plain


def _with_checksum(section: Values) -> dict[str, object]:
    """Return a section as written to the file, with the packages that its kernels need and a checksum."""
    section = {key: value for key, value in section.items() if key != PACKAGES}
    # The code saved with a checkpoint contains only linearize's own kernels.
    packages = outside_packages(Plan.from_dict(section)) if _INSTALLED else {}
    section |= {PACKAGES: packages} if packages else {}
    return {**section, "checksum": checksum(section)}


def checksum(section: Mapping[str, object]) -> str:
    """Return a checksum of a section without its provenance, so that an edit of one of its values is noticed.

    Most edits would not be noticed otherwise: another window, argument or kernel with weights of the same size.
    """
    checked = {key: value for key, value in section.items() if key not in ("checksum", "provenance")}
    text = json.dumps(checked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_checksum(section: ReadOnlyValues) -> None:
    """Check that a section was not changed after it was written.

    Older checkpoints, which have neither a checksum nor facts about their hosts, are not checked.

    Raises:
        CheckpointError: if the checksum differs.
    """
    if "checksum" not in section and not any("host" in layer for layer in section["layers"]):
        return
    if section.get("checksum") != checksum(section):
        raise CheckpointError(
            f"config.json: the section 'linearize' has checksum {repr(section.get('checksum'))[:40]}, expected "
            f"{checksum(section)!r}: one of its values was changed after it was written; restore the file or convert "
            "the model again"
        )


PACKAGES = "packages"
"""Key of the section for the packages that register kernels from outside linearize, by kernel."""
_KEYS = ("format_version", "checksum", "provenance", ABSENT, PACKAGES)
"""Keys of the section other than those of the plan."""


def check_section(section: object) -> Values:
    """Return the section `linearize` of a config.json if this version can read it.

    Raises:
        CheckpointError: if this version cannot read it; the message says what is wrong.
        ConfigError: if a kernel is unknown, or one of its arguments is not allowed.
    """
    if not isinstance(section, dict):
        raise damaged("model_type is 'linearize', but there is no section 'linearize'")
    version = section.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"config.json: got format_version {version!r}, expected 1 to {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"config.json: the checkpoint has format version {version}, this linearize reads up to {FORMAT_VERSION}; "
            "upgrade it: pip install -U linearize"
        )
    plan = Plan.from_dict(section)
    newest = newest_part(layer.hybrid for layer in plan.layers)
    if newest.since > version:
        raise CheckpointError(
            f"config.json: got {newest.option} in format version {version}, whose values had another meaning before "
            f"version {newest.since}; convert the model again"
        )
    if unknown := sorted(str(key) for key in section.keys() - {*_KEYS, *plan.to_dict()}):
        raise damaged(f"the section 'linearize' has unknown keys {repr(unknown)[:300]}")
    if not isinstance(section.get("provenance", {}), dict):
        raise damaged("the section 'linearize' has a provenance that is not an object")
    absent = section.get(ABSENT, [])
    # Kernel weights are never absent: every model has them.
    if not isinstance(absent, list) or not all(isinstance(x, str) and "linear_attention." not in x for x in absent):
        raise damaged(f"got {ABSENT} {repr(absent)[:80]}, expected a list of the names of weights outside kernels")
    if not plan.converted:
        raise damaged("the section 'linearize' names no converted layer")
    _check_kernels(section.get(PACKAGES, {}), plan)
    return section


def _check_kernels(packages: object, plan: Plan) -> None:
    """Check that the packages of kernels from outside linearize were imported, and that all kernels can be built.

    Raises:
        CheckpointError: if `packages` does not name packages by kernel, or an argument does not fit its kernel.
        ConfigError: naming the package of a kernel that is not registered, or an argument that is not allowed.
    """
    if not isinstance(packages, dict) or not all(isinstance(x, str) and x.isidentifier() for x in packages.values()):
        raise damaged(f"got {PACKAGES} {repr(packages)[:80]}, expected the names of packages by kernel")
    for kernel, package in packages.items():
        try:
            kernel_info(kernel)
        except UnknownNameError:
            raise ConfigError(
                f"this checkpoint needs package {package}, which registers its kernel {str(kernel)[:80]!r}; install "
                "it, and import it before loading"
            ) from None
    checked: list[object] = []
    for layer in plan.converted:
        if layer.mixer in checked:
            continue
        checked.append(layer.mixer)
        try:
            # The meta device takes no memory, so even an argument that asks for a huge kernel is checked in time.
            with torch.device("meta"):
                config = build_mixer(*layer.mixer).config
        except LinearizeError:
            raise
        except Exception as error:
            why = f"{layer.shape} ({type(error).__name__})"
            raise damaged(f"kernel {layer.kernel!r} cannot be built for {why}") from error
        for name, value in layer.arguments.items():
            # Numbers as text are only allowed on the command line, not in a file.
            expected = getattr(config, name)
            if type(value) is not type(expected):
                raise damaged(f"kernel {layer.kernel!r}, argument {name}: got {value!r}, expected {expected!r}")


def base_config_class(model_type: str) -> type[PreTrainedConfig]:
    """Return transformers' config class of the original.

    Raises:
        CheckpointError: if the installed transformers does not know it.
    """
    # Import here, because linearize imports this module as soon as transformers' configuration_auto is imported.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type == MODEL_TYPE or model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json: the original's model type {model_type!r} is unknown to the installed transformers; "
            "upgrade it: pip install -U transformers"
        )
    return CONFIG_MAPPING[model_type]


if TYPE_CHECKING:
    _Original = PreTrainedConfig
else:
    _Original = object


class _Mixin(_Original):
    """The additions of a converted model's config to the original's."""

    def __post_init__(self, **kwargs: object) -> None:
        kwargs.pop("model_type", None)
        # Without the plug-in, vLLM would find its own softmax class by the original's name.
        if isinstance(self.architectures, list) and (_INSTALLED or "vllm" not in sys.modules):
            self.architectures = [str(name).removeprefix(PREFIX) for name in self.architectures]
        requested = kwargs.pop("attn_implementation", None)
        if requested not in (None, *IMPLEMENTATIONS):
            raise ConfigError(refusal(requested))
        super().__post_init__(**kwargs)
        use_linear_attention(self)

    @property
    def _attn_implementation(self) -> str | None:
        """Name of the attention implementation; any other than linearize's is ignored with a warning."""
        return vars(self).get("_attn_implementation_internal")

    @_attn_implementation.setter
    def _attn_implementation(self, value: object) -> None:
        # Warn instead of raising: Whisper sets "eager" for word timestamps.
        if value not in (None, *IMPLEMENTATIONS):
            warnings.warn(f"{refusal(value)}; the name is ignored", stacklevel=3)
        use_linear_attention(self)

    @property
    def output_attentions(self) -> bool | None:
        """Whether a forward returns attention weights; in transformers itself only eager softmax does."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        self._output_attentions = value

    def validate(self) -> None:
        """Check as transformers does, except that attention weights do not need eager softmax."""
        wanted, self._output_attentions = self._output_attentions, False
        try:
            super().validate()  # type: ignore[misc]
        finally:
            self._output_attentions = wanted

    def __setattr__(self, key: str, value: object) -> None:
        # If the caller names no implementation, transformers writes "sdpa" here; the model would silently run softmax.
        if key == "_attn_implementation_internal" and value is not None:
            value = value if value in IMPLEMENTATIONS else implementation(self)
        super().__setattr__(key, value)


def __getattr__(name: str) -> type[LinearizeConfig]:
    """Create the config class of converted models on demand, because pickle looks it up by name."""
    import transformers

    base = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if not isinstance(base, type) or not issubclass(base, PreTrainedConfig):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return config_class(base)


_CLASSES: dict[type[PreTrainedConfig], type[LinearizeConfig]] = {}
_CALLBACKS: list[Callable[[type[LinearizeConfig], type[PreTrainedConfig]], None]] = []


def on_config_class(callback: Callable[[type[LinearizeConfig], type[PreTrainedConfig]], None]) -> None:
    """Call a function with every config class that is or will be created, and the original's class."""
    if callback in _CALLBACKS:
        return
    _CALLBACKS.append(callback)
    for base, converted in list(_CLASSES.items()):
        callback(converted, base)


def config_class(base: type[PreTrainedConfig]) -> type[LinearizeConfig]:
    """Return the config class of converted models of `base`; create and register it with the Auto classes if needed."""
    if base in _CLASSES:
        return _CLASSES[base]
    # With an `_auto_class`, transformers would copy only this file and name this class in auto_map; `save_pretrained`
    # and `to_diff_dict` copy all files and name the class in the module `ENTRY`.
    members: Values = {"__module__": __name__, "__annotations__": {}, "_auto_class": None}
    members |= {"model_type": base.model_type, "__qualname__": f"{PREFIX}{base.__name__}"}
    members["__doc__"] = f"Config of a converted model; see `{base.__name__}`."
    # The order of the bases matters: our from_dict and to_diff_dict override those of a composite's config.
    converted: Any = type(base.__name__, (_Mixin, LinearizeConfig, base), members)
    _CLASSES[base] = converted
    for callback in _CALLBACKS:
        callback(converted, base)
    return converted
