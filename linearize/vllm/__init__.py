"""Plug-in for vLLM: `vllm serve FOLDER` and `LLM(FOLDER)` run converted models.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). Importing this package imports
neither vLLM nor torch.
"""

from __future__ import annotations

import warnings

TRIED = ("0.32.0",)
"""The versions of vLLM with which the tests of this plug-in ran."""


def register() -> None:
    """Make vLLM read converted folders, and register the classes that run them. Calling it again changes nothing."""
    import vllm
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER

    from linearize.vllm.config import CLASSES, Checks, ConfigParser

    known = ModelRegistry.get_supported_archs()
    for name in CLASSES:
        if name not in known:
            # By name: vLLM imports the class when it needs it.
            ModelRegistry.register_model(name, f"linearize.vllm.model:{name}")
        MODELS_CONFIG_MAP[name] = Checks
    _CONFIG_FORMAT_TO_CONFIG_PARSER["hf"] = ConfigParser
    # Not the suffix, such as +cpu, which names the build.
    version = vllm.__version__.partition("+")[0]
    if version not in TRIED:
        warnings.warn(
            f"linearize was not tried with vLLM {version}, only with {', '.join(TRIED)}; compare its output with "
            "generate() before you rely on it",
            stacklevel=2,
        )
