"""A call of an attention function in a trial run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass
class Call:
    """One call of the attention function.

    Attributes:
        module: the host's attention module.
        query: shape of q, [B, H, T, D].
        key: shape of k, [B, K, S, D].
        value: shape of v, [B, K, S, V].
        mask: "causal", "bidirectional", "none", "local" (windows, chunks), "own" (another mask made by
            transformers) or "bias" (something added to the scores).
        altered: what else changes the scores, in words.
        is_causal: the host's direction: that of the call, or else its module's flag.
        declared: the direction that the call states; None: it states none.
        window: largest length at which a local mask hides no more than a full one; None: no local mask.
        refused: why it cannot be converted, if the trial run shows that; empty: no reason known.
    """

    module: nn.Module
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: str
    altered: str
    is_causal: bool
    declared: bool | None = None
    window: int | None = None
    refused: str = ""
