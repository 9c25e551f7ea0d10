"""vLLM's layer of a converted attention: calls the mixer for each request, with the request's state from vLLM's cache.

A state is everything that decoding needs: sums, window, sinks and exact keys. It is one block of the cache, as for
Mamba layers, and is read before a call and written after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention, EncoderOnlyAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from linearize.attention.call import AttentionCall, MixerState
from linearize.attention.factory import build_mixer
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.mixer import Mixer
from linearize.core.errors import UnsupportedModelError
from linearize.modeling.plan import LayerPlan, Plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ALIGNMENT = 16
"""A state's size is a multiple of this number of bytes, so that each of its tensors is aligned."""


class Stored(NamedTuple):
    """A tensor of a state in the cache.

    Attributes:
        name: its name in the mixer's state.
        dtype: its dtype.
        shape: its shape for one request.
        start: where it begins in the state, in bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Its size for one request."""
        return prod(self.shape) * self.dtype.itemsize


def without_softmax_heads(mixer: Mixer) -> Mixer:
    """Return a mixer that leaves out heads that keep softmax: vLLM's own attention computes them."""
    if isinstance(mixer, FeatureMapMixer) and mixer.hybrid.softmax_heads:
        mixer.softmax_heads = None
    return mixer


@torch.no_grad()
def stored(layer: LayerPlan, dtype: torch.dtype) -> tuple[list[Stored], int]:
    """Return the tensors of one request's state and its size in bytes, measured on the meta device.

    Args:
        layer: a causal layer.
        dtype: dtype of the model.

    Raises:
        UnsupportedModelError: if the state grows with the text.
    """

    def after(tokens: int) -> dict[str, Tensor]:
        sizes = ((shape.heads, shape.head_dim), (shape.key_heads, shape.head_dim), (shape.key_heads, shape.value_dim))
        q, k, v = (torch.zeros(2, heads, tokens, size, dtype=dtype) for heads, size in sizes)
        state: dict[str, Tensor] = mixer(AttentionCall(q, k, v, 1.0, needs_state=True))[1]
        return state

    shape = layer.shape
    with torch.device("meta"):
        mixer = without_softmax_heads(build_mixer(*layer.mixer))
        try:
            one, more = after(1), after(3)
        except NotImplementedError:
            # What a look-up keeps depends on the values, which the meta device does not have.
            one, more = {}, {"looked_up": torch.empty(0)}
    if {name: x.shape for name, x in one.items()} != {name: x.shape for name, x in more.items()}:
        raise UnsupportedModelError(
            f"vLLM: got kernel {layer.kernel!r}, whose state grows with the text, expected a state of constant size; "
            "use generate(), or choose another kernel"
        )
    tensors, start = [], 0
    # The widest numbers first, so that all are aligned.
    for name, tensor in sorted(one.items(), key=lambda item: (-item[1].itemsize, item[0])):
        tensors.append(Stored(name, tensor.dtype, tuple(tensor.shape[1:]), start))
        start += tensors[-1].nbytes
    return tensors, -(-start // ALIGNMENT) * ALIGNMENT


def largest_state(plan: Plan, dtype: torch.dtype) -> int:
    """Return the size of the largest state of a converted layer in bytes, for one request.

    Raises:
        UnsupportedModelError: if a state grows with the text.
    """
    return max(stored(layer, dtype)[1] for layer in plan.converted)


class Span(NamedTuple):
    """Some tokens of one request, in the tokens of a forward.

    Attributes:
        start: number of the first token.
        end: number after the last token.
        block: the block of its state.
        is_first: whether there are no tokens before, and so no state.
    """

    start: int
    end: int
    block: int
    is_first: bool


@dataclass
class Requests(LinearAttentionMetadata):
    """The requests of a forward.

    Attributes:
        spans: those with several tokens or without a state.
        steps: [N], the tokens of the others, which decode one token each.
        step_blocks: [N], the blocks of their states.
    """

    spans: list[Span]
    steps: Tensor
    step_blocks: Tensor


class RequestsBuilder(LinearAttentionMetadataBuilder):
    """Makes `Requests`."""

    # The number of calls depends on the requests, so no graph can be captured.
    _cudagraph_support = AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Requests:
        """Return the requests of the next forward."""
        usual = super().build(common_prefix_len, common_attn_metadata, fast_build)
        starts = common_attn_metadata.query_start_loc_cpu.tolist()
        lengths = usual.seq_lens.tolist()
        blocks = usual.state_indices_tensor.tolist()
        spans = [
            Span(start, end, block, length == end - start)
            for start, end, block, length in zip(starts, starts[1:], blocks, lengths, strict=False)
            if end > start
        ]
        several = [one for one in spans if one.is_first or one.end - one.start > 1]
        steps = [one for one in spans if not one.is_first and one.end - one.start == 1]
        place, block = ([one[i] for one in steps] for i in (0, 2))
        device = usual.query_start_loc.device
        return Requests(
            **vars(usual),
            spans=several,
            steps=torch.tensor(place, dtype=torch.long, device=device),
            step_blocks=torch.tensor(block, dtype=torch.long, device=device),
        )


class RequestsBackend(LinearAttentionBackend):
    """The name of `RequestsBuilder` for vLLM."""

    @staticmethod
    def get_name() -> str:
        """Return the name in logs."""
        return "LINEARIZE"

    @staticmethod
    def get_builder_cls() -> type[RequestsBuilder]:
        """Return the builder."""
        return RequestsBuilder


class _Converted:
    """What both directions share.

    Attributes:
        mixer: computes the outputs; the host's module owns its parameters.
        scaling: the host's scaling factor of the scores.
        prefix: the name by which vLLM knows the layer.
    """

    mixer: Mixer
    scaling: float
    prefix: str

    def _split(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, H, D], k [T, K, D] and v [T, K, V] of vLLM's flat [T, H D], ..."""
        shape = self.mixer.shape
        q, k = query.view(-1, shape.heads, shape.head_dim), key.view(-1, shape.key_heads, shape.head_dim)
        return q, k, value.view(-1, shape.key_heads, shape.value_dim)

    def _mix(self, tokens: Iterable[Tensor], state: MixerState | None, needs_state: bool) -> tuple[Tensor, Any]:
        """Mix queries, keys and values [B, T, H, D], ... -> [B, T, H, V]."""
        q, k, v = (x.transpose(1, 2) for x in tokens)
        out, after = self.mixer(AttentionCall(q, k, v, self.scaling, None, None, state, needs_state))
        return out.transpose(1, 2), after

    def _metadata(self) -> Any:
        every = get_forward_context().attn_metadata
        return None if every is None else every[self.prefix]


class SoftmaxLayer(nn.Module):
    """An attention of vLLM whose outputs have transformers' shape, which GPT-2 needs."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend, query [T, H D], key [T, K D], value [T, K D] -> [1, T, H, D], for the tokens of all requests."""
        out: Tensor = self.attention(query, key, value)
        return out.view(1, -1, self.attention.num_heads, self.attention.head_size)


class CausalLayer(_Converted, nn.Module, MambaBase):
    """A converted layer of a decoder.

    Attributes:
        tensors: the tensors of a state.
        nbytes: size of the largest state of any layer in bytes. vLLM gives each layer that much, and keeps one table of
            blocks for layers of one size.
        states: the states of all blocks, by the names of their tensors, [blocks, ...].
        heads: heads that keep softmax, computed by `softmax`; repeated up to the largest number of any layer, so that
            all layers have keys of one size. None without such heads.
        key_heads: their key heads.
        softmax: vLLM's attention for these heads.
    """

    def __init__(
        self,
        mixer: Mixer,
        layer: LayerPlan,
        replaced: Attention,
        scaling: float,
        softmax_heads: int,
        nbytes: int,
        vllm_config: VllmConfig,
    ) -> None:
        """Take the place of an attention of vLLM.

        Args:
            mixer: the mixer.
            layer: its plan.
            replaced: the attention.
            scaling: its scaling factor of the scores.
            softmax_heads: the largest number of heads that keep softmax in any layer.
            nbytes: size of the largest state of any layer.
            vllm_config: config of the engine.
        """
        super().__init__()
        # Not as a submodule: the parameters belong to the host's module.
        self.__dict__["mixer"] = without_softmax_heads(mixer)
        self.scaling, self.prefix = scaling, replaced.layer_name
        self.tensors, self.nbytes = stored(layer, vllm_config.model_config.dtype)[0], nbytes
        self.kv_cache = (torch.tensor([]),)
        self.states: dict[str, Tensor] = {}
        vllm_config.compilation_config.static_forward_context[self.prefix] = self
        self.softmax: Attention | None = None
        shape, kept = layer.shape, list(layer.hybrid.softmax_heads)
        if kept:
            self.heads = kept + kept[-1:] * (softmax_heads - len(kept))
            self.key_heads = [head // (shape.heads // shape.key_heads) for head in self.heads]
            self.softmax = Attention(
                num_heads=softmax_heads,
                head_size=shape.head_dim,
                scale=scaling,
                num_kv_heads=softmax_heads,
                cache_config=vllm_config.cache_config,
                prefix=f"{self.prefix}.softmax",
            )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend, query [T, H D], key [T, K D], value [T, K V] -> [1, T, H, V], for the tokens of all requests."""
        q, k, v = self._split(query, key, value)
        out = v.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        requests: Requests | None = self._metadata()
        # Without requests, vLLM measures its memory.
        if requests is not None:
            self._attend(q, k, v, out, requests)
        if self.softmax is not None:
            keys = (x[:, self.key_heads].flatten(1) for x in (k, v))
            exact = self.softmax(q[:, self.heads].flatten(1), *keys)
            out[:, self.heads] = exact.view(-1, len(self.heads), v.shape[2])
        return out[None]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, requests: Requests) -> None:
        steps, blocks = requests.steps, requests.step_blocks
        if len(steps):
            parts = (x.index_select(0, steps)[:, None] for x in (q, k, v))
            mixed, after = self._mix(parts, {name: x[blocks] for name, x in self.states.items()}, True)
            out[steps] = mixed[:, 0]
            for name, state in self.states.items():
                state[blocks] = after[name]
        for start, end, block, is_first in requests.spans:
            before = None if is_first else {name: x[block : block + 1].clone() for name, x in self.states.items()}
            mixed, after = self._mix((x[None, start:end] for x in (q, k, v)), before, True)
            out[start:end] = mixed[0]
            for name, state in self.states.items():
                state[block] = after[name][0]

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the states of all blocks from the memory that vLLM allocated."""
        super().bind_kv_cache(kv_cache)
        pages = self.kv_cache[0]
        self.states = {
            one.name: pages[:, one.start : one.start + one.nbytes].view(one.dtype).view(-1, *one.shape)
            for one in self.tensors
        }

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        """Return the shape of a state."""
        return ((self.nbytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the dtype of a state: bytes."""
        return (torch.uint8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The kind of layer."""
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[RequestsBackend]:
        """Return the backend that describes the requests."""
        return RequestsBackend


class EncoderLayer(_Converted, EncoderOnlyAttention):
    """A converted layer of a text encoder; it has no state."""

    @classmethod
    def of(cls, replaced: EncoderOnlyAttention, mixer: Mixer, scaling: float) -> EncoderLayer:
        """Turn an attention of vLLM into a converted layer, in place."""
        layer: Any = replaced
        layer.__class__ = cls
        layer.__dict__["mixer"] = mixer
        layer.scaling, layer.prefix = scaling, replaced.layer_name
        return layer

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Attend, query [T, H D], key [T, K D], value [T, K V] -> [1, T, H, V], for the tokens of all requests."""
        q, k, v = self._split(query, key, value)
        out = v.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        metadata = self._metadata()
        if metadata is not None:
            for start, end in itertools.pairwise(metadata.query_start_loc.tolist()):
                if end > start:
                    out[start:end] = self._mix((x[None, start:end] for x in (q, k, v)), None, False)[0][0]
        return out[None]
