"""A mixer replaces softmax in one layer: the base class, and the mixer of kernels that attend inside blocks of tokens.

The mixer of feature-map kernels, the largest family, is in `linearize.attention.feature_map`.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor, nn

from linearize.attention.call import AttentionCall, MixerState
from linearize.attention.shape import HeadShape
from linearize.core.registry import PLAIN, Hybrid, KernelInfo, kernel_info
from linearize.kernels.base import Kernel, Output
from linearize.ops import Blocks, BlockState, block_attention, block_weights

IMPLEMENTATION = "linearize"
"""The name under which transformers knows the attention function of converted models."""
LOCAL_AS_FULL = "linearize_local_as_full"
"""The same if every layer with a sliding window or chunks was converted as full attention."""
EAGER = "linearize_eager"
"""The same for hosts that only know eager softmax: they read masks as numbers to add to the scores."""


class Mixer(nn.Module, abc.ABC):
    """Turns q, k, v into the heads' outputs at linear cost.

    Attributes:
        info: the kernel's facts.
        config: its arguments.
        shape: sizes and direction.
        positive: whether its weights can never be negative.
        output: the module after the weighted sum of the values, or None.
        hybrid: what the layer has in addition to the kernel.
    """

    hybrid: Hybrid = PLAIN

    def __init__(self, info: KernelInfo, config: Any, shape: HeadShape) -> None:
        super().__init__()
        self.info, self.config, self.shape = info, config, shape
        self.positive = info.is_positive(config)
        self.output: Output | None = None
        if info.build is not None and issubclass(info.build, Kernel):
            self.output = info.build.output(config, shape.heads, shape.value_dim)

    def __getstate__(self) -> dict[str, object]:
        """Copy and pickle the kernel's name instead of its facts, without the backends' memory."""
        state = {**self.__dict__, "info": self.info.name}
        return state | {"memory": {}} if "memory" in state else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"info": kernel_info(state["info"])})

    @property
    def learnable(self) -> bool:
        """Whether stage one has parameters to train."""
        return self.info.learnable

    @abc.abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill parameters and random buffers from `generator` (CPU)."""

    @abc.abstractmethod
    def forward(self, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Mix q [B, H, T, D], k [B, K, T, D], v [B, K, T, V] -> [B, H, T, V] in v's dtype, and the state after them.

        Without `call.needs_state` the state is None.
        """

    @abc.abstractmethod
    def weights(self, q: Tensor, k: Tensor, *, scaling: float, key_padding_mask: Tensor | None = None) -> Tensor:
        """Write out the weights [B, H, T, T] in fp32; quadratic, for reports and `output_attentions`.

        Rows of a kernel with `normalized` sum to one; other weights multiply the values before `apply_output`, with
        their sign and scale.
        """

    def apply_output(self, mixed: Tensor) -> Tensor:
        """Apply the kernel's output to the weighted sum of the values [B, H, T, V] in fp32.

        For every mixer, `forward` is `apply_output(weights @ v)`.
        """
        return mixed if self.output is None else self.output(mixed)


class BlockMixer(Mixer):
    """Softmax, or ReLU, of the scores inside blocks (`linearize.ops.block`). It remembers the tokens of one block."""

    def __init__(self, info: KernelInfo, config: Any, shape: HeadShape) -> None:
        super().__init__(info, config, shape)
        build: Any = info.build
        self.blocks = Blocks(config.block, shape.causal, build.softmax)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill the output's parameters; nothing is drawn."""
        if self.output is not None:
            self.output.reset_parameters()

    def forward(self, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        mixed, after = block_attention(
            call.q,
            call.k,
            call.v,
            self.blocks,
            scaling=call.scaling,
            key_padding_mask=call.key_padding_mask,
            initial_state=None if call.state is None else BlockState(**call.state),
        )
        return self.apply_output(mixed).to(call.v.dtype), after._asdict() if call.needs_state else None

    def weights(self, q: Tensor, k: Tensor, *, scaling: float, key_padding_mask: Tensor | None = None) -> Tensor:
        return block_weights(q, k, self.blocks, scaling=scaling, key_padding_mask=key_padding_mask)
