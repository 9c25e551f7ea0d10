"""How the native op is to attend, and what it returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttendOptions(NamedTuple):
    """Options of `Engine.attend` and of its gradient.

    Attributes:
        causal: whether queries see only keys up to their own.
        scale: factor of q and k before the map.
        eps: smallest magnitude of a denominator.
        mask: key padding mask [B, T] or None.
        log_scale: [B, K, T] to add to that of the keys' features, or None.
        query_scale: [B, H, T] for the queries, or None; only a window reads it.
        priority: [B, K, T] by which exact keys are chosen, or None.
        exact: leave the weights as they are: where gradients are taken.
    """

    causal: bool
    scale: float
    eps: float
    mask: Tensor | None = None
    log_scale: Tensor | None = None
    query_scale: Tensor | None = None
    priority: Tensor | None = None
    exact: bool = False


class Attended(NamedTuple):
    """What `Engine.attend` returns.

    Attributes:
        out: [B, H, T, V] in the dtype of v.
        kv: of the state after, [B, K, F, V + 1] in fp32.
        log_scale: of the state after, [B, K].
    """

    out: Tensor
    kv: Tensor
    log_scale: Tensor


class Gradients(NamedTuple):
    """What `Engine.gradients` returns.

    Attributes:
        q: the gradient of q.
        k: the gradient of k.
        v: the gradient of v.
        weights: of the `MAP_WEIGHTS` of every map, keys' first, each as the weight, or None where there is none.
        log_scale: of the options' `log_scale` [B, K, T], or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: tuple[Tensor | None, ...]
    log_scale: Tensor | None


NEVER = 2**31 - 1
"""In `WindowAttended.until`: always exact."""


class WindowAttended(NamedTuple):
    """What `WindowCalls.window` returns.

    Attributes:
        out: [B, H, T, V] in the dtype of v.
        kv: of the tokens that have left the window, [B, K, F, V + 1] in fp32.
        log_scale: the same, [B, K].
        tops: [B, H, T] in fp32: a row's weights were taken relative to exp(top).
        sums: [B, H, T] in fp32: the sum of a row's weights, so taken.
        until: [B, K, T] in int32: from which query on a key outside the window is not exact, `NEVER` or 0 where that
            depends on no query; None without exact keys.
    """

    out: Tensor
    kv: Tensor
    log_scale: Tensor
    tops: Tensor
    sums: Tensor
    until: Tensor | None


class Attending(NamedTuple):
    """What the gradient of a window starts from, all in fp32, and what it gives.

    Attributes:
        q: queries [B, H, T, D], times the scaling.
        k: keys [B, K, T, D].
        v: values [B, K, T, V].
        phi_q: features [B, H, T, F], so that their products are weights relative to the rows' levels.
        phi_k: features [B, K, T, F], zero for padding and sinks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    phi_q: Tensor
    phi_k: Tensor
