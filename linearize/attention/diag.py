"""DiagAttention: ordinary attention inside non-overlapping blocks of w tokens.

Paper: Qin et al. 2022, "The Devil in Linear Transformer" (TransNormer), https://arxiv.org/abs/2210.10340, section 4.3;
ReLA: Zhang, Titov and Sennrich 2021, "Sparse Attention with Linear Units", https://arxiv.org/abs/2104.07012.

    diag_softmax: o_i = sum_j softmax_j(scaling q_i . k_j) v_j            over the j of i's block
    diag_rela:    o_i = g * RMSNorm(sum_j relu(scaling q_i . k_j) v_j)    g: [V] learned per query head, 1 at the start

Blocks are counted by tokens, padding left out. In causal models a query sees what is in its block and not after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linearize.attention.mixer import HeadShape, Mixer, MixerState
from linearize.attention.norm import rms_norm
from linearize.ops import BlockState, block_attention, block_weights
from linearize.registry import KernelInfo, option


@dataclass(frozen=True)
class DiagConfig:
    """Arguments of `diag_softmax` and `diag_rela`."""

    block: int = option(64, "tokens per block, w", low=1, high=65536)


class DiagAttention(Mixer):
    """Softmax inside blocks. Nothing to learn."""

    softmax = True

    def __init__(self, info: KernelInfo, config: Any, shape: HeadShape) -> None:
        super().__init__(info, config, shape)
        self.options: dict[str, Any] = {"block": config.block, "causal": shape.causal, "softmax": self.softmax}

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Do nothing."""

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


class DiagRela(DiagAttention):
    """ReLU of the scores inside blocks, the sum normalised."""

    softmax = False

    def __init__(self, info: KernelInfo, config: Any, shape: HeadShape) -> None:
        super().__init__(info, config, shape)
        self.gain = nn.Parameter(torch.empty(shape.heads, shape.value_dim, dtype=torch.float32))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start with a gain of 1."""
        with torch.no_grad():
            self.gain.fill_(1.0)

    def finish(self, mixed: Tensor) -> Tensor:
        """Normalise the sums [B, H, T, V]."""
        return rms_norm(mixed) * self.gain.float()[:, None]
