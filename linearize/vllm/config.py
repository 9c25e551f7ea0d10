"""Which converted models vLLM can run: reads config.json, and refuses what would compute other numbers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig
from vllm.model_executor.models.config import MambaModelConfig
from vllm.transformers_utils.config import HFConfigParser

from linearize.attention.parts import HEADS, NEAR, SCALED, check_parts
from linearize.attention.redirect import REDIRECTED
from linearize.core.errors import ConfigError, UnsupportedModelError
from linearize.core.registry import Values
from linearize.modeling.config import LinearizeConfig, base_config_class
from linearize.modeling.model import check_checkpoint
from linearize.modeling.plan import Plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CAUSAL, HYBRID, EMBEDDER = "LinearizedForCausalLM", "LinearizedHybridForCausalLM", "LinearizedEmbeddingModel"
"""The classes of `linearize.vllm.model`: a decoder with states only, one with keys as well, and a text encoder."""
CLASSES = (CAUSAL, HYBRID, EMBEDDER)

DECODERS = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of decoders with a head."""


class ConfigParser(HFConfigParser):
    """Reads config.json as vLLM does; a converted model's becomes the original's, with the section `linearize`."""

    def parse(
        self, model: str | os.PathLike[str], trust_remote_code: bool, revision: str | None = None, **kwargs: object
    ) -> tuple[Values, PreTrainedConfig]:
        """Return the values of config.json, and the config.

        Raises:
            LinearizeError: if the folder is damaged, or vLLM cannot run the model.
        """
        values, config = super().parse(model, trust_remote_code, revision=revision, **kwargs)
        if isinstance(config, LinearizeConfig):
            check_overrides(kwargs.get("hf_overrides"))
            check_checkpoint(model, revision=revision)
            config = original_config(config)
        return values, config


WRITTEN = {"architectures", "model_type", "linearize", "is_causal"}
"""Values of config.json that choose the class that runs the model, and the direction, which a kernel has."""


def check_overrides(overrides: object) -> None:
    """Refuse changes of config.json (`--hf-overrides`) by which vLLM would run something else.

    Raises:
        UnsupportedModelError: for such a change, or a function, whose changes cannot be known.
    """
    if callable(overrides):
        raise _option("hf_overrides", "a function", "a dict")
    if isinstance(overrides, dict) and (names := sorted(WRITTEN & overrides.keys())):
        raise _option("hf_overrides", names, f"none of {', '.join(sorted(WRITTEN))}: they choose what runs")


def original_config(config: LinearizeConfig) -> PreTrainedConfig:
    """Return the config of the original with the section `linearize` and the name of the class that runs it.

    vLLM then builds the original's modules, and its own attention can be used where softmax was kept.

    Raises:
        UnsupportedModelError: if vLLM cannot run the model.
    """
    plan = Plan.from_dict(config.linearize or {})
    architecture = runner(config, plan)
    changed = {"model_type": plan.base_model_type, "architectures": [architecture]}
    values: Values = {key: value for key, value in config.to_dict().items() if key not in _OWN} | changed
    plain = base_config_class(plan.base_model_type).from_dict(values)
    plain.name_or_path, plain.linearize = config.name_or_path, config.linearize
    return plain


_OWN = ("linearize", "auto_map")


def runner(config: PreTrainedConfig, plan: Plan) -> str:
    """Return the name of the class that runs a converted model.

    Raises:
        UnsupportedModelError: if it is missing.
    """
    name = (config.architectures or [plan.architecture])[0]
    if config.is_encoder_decoder or getattr(config, "sub_configs", None) or plan.base_model_type in REDIRECTED:
        raise _refused(f"{name}, whose attention vLLM cannot reach", "a text decoder or encoder such as Llama or BERT")
    for layer in plan.layers:
        if not layer.in_body or layer.shape.value_dim != layer.shape.head_dim:
            raise _refused(f"an attention {layer.module!r} that vLLM cannot reach", "one in the body, with equal sizes")
    for layer in plan.converted:
        try:
            check_parts(layer.hybrid, NEAR | SCALED | HEADS, "vLLM")
        except ConfigError as error:
            raise UnsupportedModelError(str(error)) from None
    causal = {layer.shape.causal for layer in plan.layers}
    if causal == {False} and name.endswith("Model"):
        return EMBEDDER
    if causal != {True} or not name.endswith(DECODERS):
        expected = "a causal language model (...ForCausalLM), or a text encoder without a head (...Model)"
        raise _refused(name, expected)
    keys = any(layer.hybrid.softmax_heads or not layer.converted for layer in plan.layers)
    return HYBRID if keys else CAUSAL


def _refused(got: str, expected: str) -> UnsupportedModelError:
    # No `ValueError`: pydantic, of which vLLM's configs are made, would print that as several lines.
    return UnsupportedModelError(
        f"vLLM: got {got}, expected {expected}; use generate() or a pipeline of transformers instead"
    )


class Checks(MambaModelConfig):
    """Checks the options of an engine."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse options under which the states would be wrong, then set those of models with states.

        Raises:
            UnsupportedModelError: for such an option.
        """
        parallel = vllm_config.parallel_config
        for option in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
        ):
            if (size := getattr(parallel, option, 1)) > 1:
                raise _option(option, size, "1: a state is not split over devices")
        if vllm_config.speculative_config is not None:
            raise _option("speculative_config", "one", "none: rejected tokens cannot be removed from a state")
        if vllm_config.lora_config is not None:
            raise _option("enable_lora", True, "none; merge the adapter before converting")
        if vllm_config.model_config.quantization is not None:
            raise _option("quantization", vllm_config.model_config.quantization, "none")
        if vllm_config.kv_transfer_config is not None:
            raise _option("kv_transfer_config", "one", "none: states stay in the engine that computed them")
        architecture = vllm_config.model_config.architecture
        convert = vllm_config.model_config.convert_type
        if convert not in (("none", "embed") if architecture == EMBEDDER else ("none",)):
            raise _option("convert", convert, "none: decoders generate, text encoders embed")
        if architecture == CAUSAL and vllm_config.cache_config.enable_prefix_caching:
            raise _option("enable_prefix_caching", True, "False: only models that keep some softmax are tried with it")
        if architecture != EMBEDDER:
            super().verify_and_update_config(vllm_config)


def _option(name: str, got: object, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"vLLM: got {name}={got!r} for a converted model, expected {expected}")
