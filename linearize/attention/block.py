"""The mixer of kernels that attend inside non-overlapping blocks of tokens (`linearize.ops.block`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.attention.call import AttentionCall, MixerState
from linearize.attention.mixer import Mixer
from linearize.attention.shape import HeadShape
from linearize.core.registry import KernelInfo
from linearize.ops import Blocks, BlockState, block_attention, block_weights


class BlockMixer(Mixer):
    """Softmax, or ReLU, of the scores inside blocks. It remembers the tokens of one block."""

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
