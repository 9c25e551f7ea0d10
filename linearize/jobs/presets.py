"""Presets of `convert`: options that were measured to work well together, under one name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from linearize.errors import unknown_name

CAUSAL = "causal"
PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {CAUSAL: {"kernel": "hedgehog", "window": 64, "sinks": 4}}
)
"""Options of a conversion by the preset's name; what somebody gives beside it comes first.

`causal`, for language models: its perplexity came within 1 % of softmax's, where the kernel alone was 2 % above
(recipe `llama-small-wikitext2`, docs/benchmarks.md).
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
    return {option: value for option, value in PRESETS[str(name)].items() if option not in values}
