"""The mixer of kernels that attend inside non-overlapping blocks of tokens; see `linearize.ops.block`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.attention.mixer import HeadShape, Mixer, MixerState
from linearize.ops import BlockState, block_attention, block_weights
from linearize.registry import KernelInfo


class BlockMixer(Mixer):
    """Softmax, or ReLU, of the scores inside blocks. It remembers the tokens of one block."""

    def __init__(self, info: KernelInfo, config: Any, shape: HeadShape) -> None:
        super().__init__(info, config, shape)
        build: Any = info.build
        self.options = {"block": config.block, "causal": shape.causal, "softmax": build.softmax}

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill what follows the attention; nothing is drawn."""
        if self.output is not None:
            self.output.reset_parameters()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        key_padding_mask: Tensor | None = None,
        state: MixerState | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, MixerState | None]:
        """See `Mixer.forward`."""
        out: Any = block_attention(
            q,
            k,
            v,
            scaling=scaling,
            key_padding_mask=key_padding_mask,
            initial_state=None if state is None else BlockState(**state),
            return_state=return_state,
            **self.options,
        )
        mixed, after = out if return_state else (out, None)
        return self.finish(mixed).to(v.dtype), None if after is None else after._asdict()

    def weights(self, q: Tensor, k: Tensor, *, scaling: float, key_padding_mask: Tensor | None = None) -> Tensor:
        """See `Mixer.weights`."""
        return block_weights(q, k, scaling=scaling, key_padding_mask=key_padding_mask, **self.options)
