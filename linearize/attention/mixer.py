"""A mixer replaces softmax in one layer: the base class, and the mixer of kernels that attend inside blocks of tokens.

The mixer of feature-map kernels, the largest family, is in `linearize.attention.feature_map`.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor, nn

from linearize.attention.call import AttentionCall, MixerState
from linearize.attention.parts import taken_heads
from linearize.attention.shape import HeadShape
from linearize.core.registry import PLAIN, Hybrid, KernelInfo, Values, kernel_info
from linearize.kernels.base import Kernel, Output
from linearize.ops import Blocks, BlockState, block_attention, block_weights

IMPLEMENTATION = "linearize"
"""The name under which transformers knows the attention function of converted models."""
LOCAL_AS_FULL = "linearize_local_as_full"
"""Its name if every layer with a sliding window or chunks was converted as full attention."""
EAGER = "linearize_eager"
"""Its name for hosts that support only eager softmax: they expect masks as numbers to add to the scores."""


class Mixer(nn.Module, abc.ABC):
    """Turns q, k, v into the heads' outputs at linear cost.

    Attributes:
        info: the kernel's facts.
        config: the kernel's arguments.
        shape: sizes and direction of the attention.
        positive: whether the weights can never be negative.
        output: the module after the weighted sum of the values, or None.
        hybrid: the layer's additions to the kernel.
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
        """Return the state for copying and pickling: the kernel's name instead of its facts, no cached results."""
        state = {**self.__dict__, "info": self.info.name}
        return state | {"memory": {}} if "memory" in state else state

    def __setstate__(self, state: Values) -> None:
        super().__setstate__(state | {"info": kernel_info(state["info"])})

    @property
    def heads(self) -> list[int]:
        """The query heads that the kernel computes; all others keep softmax."""
        return sorted(set(range(self.shape.heads)) - taken_heads(self.hybrid))

    @property
    def learnable(self) -> bool:
        """Whether stage one has parameters to train."""
        return bool(self.heads) and next(self.parameters(), None) is not None

    @abc.abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill parameters and random buffers from `generator` (CPU)."""

    @abc.abstractmethod
    def forward(self, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Mix q [B, H, T, D], k [B, K, T, D], v [B, K, T, V] -> [B, H, T, V] in v's dtype, and the state after them.

        The state is None unless `call.needs_state`.
        """

    @abc.abstractmethod
    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scaling: float,
        key_padding_mask: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the full weights [B, H, T, T] in fp32; quadratic, for reports and `output_attentions`.

        With `rows` [R], only those of the queries of these tokens, [B, H, R, T]; q [B, H, T, D] still has all queries.
        The rows of a `normalized` kernel sum to one; other weights are signed and scaled as they multiply the values
        before `apply_output`.
        """

    def apply_output(self, mixed: Tensor) -> Tensor:
        """Apply the kernel's output to the weighted sum of the values [B, H, T, V] in fp32.

        For every mixer, `forward` equals `apply_output(weights @ v)`.
        """
        return mixed if self.output is None else self.output(mixed)


class BlockMixer(Mixer):
    """Softmax or ReLU of the scores inside blocks (`linearize.ops.block`). Its state is the tokens of one block."""

    def __init__(self, info: KernelInfo, config: Any, shape: HeadShape) -> None:
        super().__init__(info, config, shape)
        build: Any = info.build
        self.blocks = Blocks(config.block, shape.causal, build.softmax)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill the parameters of the output module; nothing is random."""
        if self.output is not None:
            self.output.reset_parameters()

    def forward(self, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Mix -> [B, H, T, V], as `Mixer.forward` does; the state is the tokens of the last block."""
        mask, before = call.key_padding_mask, None if call.state is None else BlockState(**call.state)
        mixed, after = block_attention(
            call.q, call.k, call.v, self.blocks, scaling=call.scaling, key_padding_mask=mask, initial_state=before
        )
        return self.apply_output(mixed).to(call.v.dtype), after._asdict() if call.needs_state else None

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scaling: float,
        key_padding_mask: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the weights as `Mixer.weights` does."""
        return block_weights(q, k, self.blocks, scaling=scaling, key_padding_mask=key_padding_mask, rows=rows)
