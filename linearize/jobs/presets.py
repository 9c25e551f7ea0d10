"""Presets of `convert`: options that were measured to work well together, under one name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from linearize.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Preset:
    """Options of a conversion, and the models they are for.

    Args:
        options: by name; options given explicitly take precedence.
        causal: whether they are for attention that sees no token behind its own, or for attention that sees all.
    """

    options: Mapping[str, object]
    causal: bool


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "causal": Preset({"kernel": "hedgehog", "window": 64, "sinks": 4}, causal=True),
        "encoder": Preset({"kernel": "hedgehog", "window": 128, "sinks": 4}, causal=False),
    }
)
"""By name. Both have learned log-scales, the default with a window.

`causal` is for language models: docs/benchmarks/hybrid.md has what its parts are worth. `encoder` is for models that see both
sides: texts of up to 65 tokens come out as before, which is the window's merit; in longer texts the kernel carries what
is farther apart.
"""


def preset_options(values: Mapping[str, object]) -> Mapping[str, object]:
    """Return what the preset among options says where they do not.

    Raises:
        UnknownNameError: for a preset that there is not.
    """
    name = values.get("preset")
    if name is None:
        return {}
    if name not in PRESETS:
        raise unknown_name("preset", str(name), PRESETS)
    return {option: value for option, value in PRESETS[str(name)].options.items() if option not in values}


def check_preset(name: str | None, model: str, causal: list[bool]) -> None:
    """Check that a preset is for a model.

    Args:
        name: of the preset, if there is one.
        model: its name or folder.
        causal: of each self-attention to convert, whether it is causal.

    Raises:
        ConfigError: if the preset is for no attention of the model.
    """
    if name is None or PRESETS[name].causal in causal:
        return
    other = next(other for other, preset in PRESETS.items() if preset.causal != PRESETS[name].causal)
    sees = "sees no token behind its own" if PRESETS[other].causal else "sees the tokens behind too"
    raise ConfigError(f"preset: got {name!r}, but attention of {model!r} {sees}; use --preset {other}, or leave it out")
