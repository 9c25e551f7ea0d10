"""The classes that run converted models in vLLM: its Transformers backend with kernels in the converted layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, IsHybrid
from vllm.model_executor.models.transformers import TransformersEmbeddingModel, TransformersForCausalLM

from linearize.attention.layer import LinearAttention
from linearize.modeling.plan import LayerPlan, Plan, damaged
from linearize.vllm.layer import CausalLayer, EncoderLayer, SoftmaxLayer, largest_state

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc
    from vllm.model_executor.models.transformers import TransformersForCausalLM as _Original
else:
    _Original = object


def _plan(vllm_config: VllmConfig) -> Plan:
    return Plan.from_dict(vllm_config.model_config.hf_config.linearize)


class _Converted(_Original):
    """Puts kernels into the modules of the original that vLLM built."""

    def _decorate_for_torch_compile(self) -> None:
        """Compile nothing: the number of a layer's calls depends on the requests."""

    def _create_hf_to_vllm_mapper(self) -> None:
        """Load every weight: names that older GPT-2 files also had would hide those that end like them."""
        self.model._keys_to_ignore_on_load_unexpected = None
        super()._create_hf_to_vllm_mapper()

    def _create_attention_instances(self, prefix: str = "") -> None:
        """Create vLLM's attention of every layer, then replace those of converted layers.

        Raises:
            CheckpointError: if the plan does not fit the model.
        """
        super()._create_attention_instances(prefix)
        plan = _plan(self.vllm_config)
        softmax_heads = max(len(layer.hybrid.softmax_heads) for layer in plan.layers)
        nbytes = largest_state(plan, self.model_config.dtype) if isinstance(self, _Decoder) else 0
        hosts = {self.get_submodule(name): fuser for name, fuser in self.attention_fusers.values()}
        for layer in plan.layers:
            host = self.model.get_submodule(layer.module)
            if host not in hosts or not hasattr(host, "attn"):
                raise damaged(f"the plan names attention {layer.module!r}, which the model does not have")
            if layer.converted:
                self._convert(host, layer, hosts.pop(host).scale(host), softmax_heads, nbytes)
            else:
                hosts.pop(host)
                host.attn = SoftmaxLayer(host.attn)
        if hosts:
            raise damaged(f"the plan names {len(plan.layers)} attentions, but the model has {len(hosts)} more")

    def _convert(self, host: Any, layer: LayerPlan, scale: float | None, softmax_heads: int, nbytes: int) -> None:
        vllm_config, shape = self.vllm_config, layer.shape
        got = host.attn.num_heads, host.attn.num_kv_heads, host.attn.head_size
        if got != (shape.heads, shape.key_heads, shape.head_dim):
            raise damaged(f"attention {layer.module!r} has heads, key heads and head size {got}, the plan has {shape}")
        usual = torch.get_default_dtype()
        # Features and sums are fp32, whatever the model's dtype.
        torch.set_default_dtype(torch.float32)
        try:
            with vllm_config.device_config.device:
                host.linear_attention = LinearAttention(*layer.mixer)
        finally:
            torch.set_default_dtype(usual)
        scaling = shape.head_dim**-0.5 if scale is None else scale
        mixer = host.linear_attention.mixer
        if shape.causal:
            host.attn = CausalLayer(mixer, layer, host.attn, scaling, softmax_heads, nbytes, vllm_config)
        else:
            EncoderLayer.of(host.attn, mixer, scaling)


class _Decoder(_Converted, TransformersForCausalLM, HasInnerState):
    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Return the shape of the largest state of a layer."""
        return ((largest_state(_plan(vllm_config), vllm_config.model_config.dtype),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Return the dtype of a state: bytes."""
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """Return the function by which a state is copied: as a whole."""
        return MambaStateCopyFuncCalculator.linear_attention_state_copy_func()


class LinearizedForCausalLM(_Decoder, IsAttentionFree):
    """A decoder whose layers and heads were all converted; its memory does not grow with the text."""


class LinearizedHybridForCausalLM(_Decoder, IsHybrid):
    """A decoder with layers or heads that keep softmax."""


class LinearizedEmbeddingModel(_Converted, TransformersEmbeddingModel):
    """A converted text encoder."""
