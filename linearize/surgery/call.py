"""One call of an attention function, as a trial run saw it."""

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
        mask: "causal", "bidirectional", "none", "local" (windows, chunks), "own" (any other that
            transformers made) or "bias" (something added to the scores).
        altered: what else changes the scores, in words.
        is_causal: what holds for the host: what it says at the call, or else its module's own flag.
        declared: what it says at the call; None: nothing.
        window: up to how many tokens a local mask hides nothing that a full one shows; None: none.
        refused: why it cannot be converted, where the trial run could tell; empty: no reason known.
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
