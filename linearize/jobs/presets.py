"""Presets of `convert`: options that were measured to work well together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from linearize.core.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Preset:
    """Options of a conversion, and the models they are for.

    Args:
        options: by name; options given explicitly take precedence.
        causal: whether they are for causal attention, or for attention that sees both sides.
    """

    options: Mapping[str, object]
    causal: bool


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "causal": Preset({"kernel": "hedgehog", "window": 64, "sinks": 4}, causal=True),
        "recall": Preset(
            {"kernel": "hedgehog", "window": 128, "sinks": 4, "exact_keys": 32, "keep_softmax_heads": "5%"}, causal=True
        ),
        "encoder": Preset({"kernel": "hedgehog", "window": 128, "sinks": 4}, causal=False),
    }
)
"""By name. All have learned log-scales, the default with a window.

`causal` and `recall` are for language models; docs/benchmarks/hybrid.md says what their parts bring. Under `causal`
memory is constant and the model can be exported. `recall` adds exact keys, and softmax heads that look up and copy;
their cache grows with the text, and ONNX export refuses both. `encoder` is for models that see both sides: the window
keeps texts of up to 65 tokens exact, and in longer texts the kernel covers what lies beyond it.
"""


def preset_options(values: Mapping[str, object]) -> Mapping[str, object]:
    """Return the preset's options that are not given explicitly.

    Raises:
        UnknownNameError: for an unknown preset.
    """
    name = values.get("preset")
    if name is None:
        return {}
    if name not in PRESETS:
        raise unknown_name("preset", str(name), PRESETS)
    return {option: value for option, value in PRESETS[str(name)].options.items() if option not in values}


def check_preset(name: str | None, model: str, causal: list[bool]) -> None:
    """Check that a preset suits a model.

    Args:
        name: the preset, or None.
        model: the model's name or folder.
        causal: for each self-attention to convert, whether it is causal.

    Raises:
        ConfigError: if the preset suits no attention of the model.
    """
    if name is None or PRESETS[name].causal in causal:
        return
    other = next(other for other, preset in PRESETS.items() if preset.causal != PRESETS[name].causal)
    sees = "is causal" if PRESETS[other].causal else "sees both sides"
    raise ConfigError(f"preset: got {name!r}, but attention of {model!r} {sees}; use --preset {other}, or leave it out")
