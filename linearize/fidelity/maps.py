"""The full weight matrices of softmax and of the kernel on one short input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.layer import LinearAttention, Mask
from linearize.attention.masks import softmax_weights
from linearize.core.errors import DataError
from linearize.fidelity.teacher import Batch, show

MAX_TOKENS = 1024
"""Largest number of tokens of the input, because there are T x T numbers per layer and head."""


@dataclass(frozen=True)
class LayerMaps:
    """The weights of one layer on one input of T real tokens; everything is on the CPU in fp32.

    Attributes:
        module: name of the host module.
        layer: the converted layer itself.
        softmax: weights of its frozen softmax [H, T, T].
        linear: signed weights of the kernel [H, T, T]; if the kernel does not normalise, each row is divided by the sum
            of its magnitudes, so that it can be compared with softmax.
        q: queries [H, T, D].
        k: keys [K, T, D].
        scaling: the host's scaling factor of the scores.
    """

    module: str
    layer: LinearAttention
    softmax: Tensor
    linear: Tensor
    q: Tensor
    k: Tensor
    scaling: float

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.layer.kernel

    def distances(self) -> Tensor:
        """Return the total variation between softmax's and the kernel's weights, averaged over queries: [H]."""
        return 0.5 * (self.softmax - self.linear).abs().sum(dim=-1).mean(dim=-1)


@torch.no_grad()
def attention_maps(model: PreTrainedModel, batch: Batch) -> list[LayerMaps]:
    """Return the weights of every converted layer on one input without padding.

    Args:
        model: a converted model; it is unchanged afterwards.
        batch: inputs of the model, a single row (such as `input_ids` [1, T]).

    Returns:
        One entry per converted layer, in the order of the layers.

    Raises:
        DataError: if there is more than one row, or more than `MAX_TOKENS` tokens.
    """
    maps: list[LayerMaps] = []

    def visit(name: str, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scaling: float) -> None:
        tokens = k.shape[2]
        if q.shape[0] != 1 or tokens > MAX_TOKENS:
            raise DataError(
                f"attention maps: got {q.shape[0]} inputs of {tokens} tokens, expected one input of at most "
                f"{MAX_TOKENS} tokens; shorten it"
            )
        softmax = softmax_weights(q.float(), k.float(), None, scaling=scaling, causal=layer.shape.causal)
        linear = layer.mixer.weights(q, k, scaling=scaling, key_padding_mask=mask)
        if not layer.mixer.info.normalized:
            # Without a denominator the sum of the weights may be negative; the sum of magnitudes is not.
            linear = linear / linear.abs().sum(dim=-1, keepdim=True).clamp(min=1e-30)
        softmax, linear, q, k = (x[0].float().cpu() for x in (softmax, linear, q, k))
        maps.append(LayerMaps(name, layer, softmax, linear, q, k, scaling))

    show(model, [batch], visit)
    return maps
