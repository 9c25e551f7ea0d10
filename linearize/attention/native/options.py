"""Options and results of the native op."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttendOptions(NamedTuple):
    """Options of `Engine.attend` and of its gradient.

    Attributes:
        causal: whether a query sees only keys up to its own position.
        scale: factor of q and k before the map.
        eps: smallest magnitude of a denominator.
        mask: key padding mask [B, T] or None.
        log_scale: [B, K, T], added to the log-scale of the keys' features, or None.
        query_scale: [B, H, T], the same for the queries, or None; used only with a window.
        priority: [B, K, T], by which exact keys are chosen, or None.
        exact: whether to never round the weights; needed for gradients.
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
    """The result of `Engine.attend`.

    Attributes:
        out: [B, H, T, V] in the dtype of v.
        kv: sums of the state after the tokens, [B, K, F, V + 1] in fp32.
        log_scale: log-scale of that state, [B, K].
    """

    out: Tensor
    kv: Tensor
    log_scale: Tensor


class Gradients(NamedTuple):
    """The result of `Engine.gradients`.

    Attributes:
        q: the gradient of q.
        k: the gradient of k.
        v: the gradient of v.
        weights: the gradients of the `MAP_WEIGHTS` of every map, the keys' map first; None for absent weights.
        log_scale: the gradient of the options' `log_scale` [B, K, T], or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: tuple[Tensor | None, ...]
    log_scale: Tensor | None


NEVER = 2**31 - 1
"""Value in `WindowAttended.until` of a key that stays exact."""


class WindowAttended(NamedTuple):
    """The result of `Engine.window`.

    Attributes:
        out: [B, H, T, V] in the dtype of v.
        kv: sums over the tokens that have left the window, [B, K, F, V + 1] in fp32.
        log_scale: log-scale of these sums, [B, K].
        tops: [B, H, T] in fp32: the weights of a row are relative to exp(top).
        sums: [B, H, T] in fp32: the sum of a row's relative weights.
        until: [B, K, T] in int32: the query from which a key outside the window is no longer exact; `NEVER` or 0 if
            that does not depend on the query; None without exact keys.
        chosen: [B, H, T, n] in int64: the blocks that each query looks up; None without routed blocks.
    """

    out: Tensor
    kv: Tensor
    log_scale: Tensor
    tops: Tensor
    sums: Tensor
    until: Tensor | None
    chosen: Tensor | None = None


class Attending(NamedTuple):
    """The inputs of the gradient of a window, all in fp32; also their gradients.

    Attributes:
        q: queries [B, H, T, D], times the scaling.
        k: keys [B, K, T, D].
        v: values [B, K, T, V].
        phi_q: features [B, H, T, F], scaled so that their products are weights relative to the rows' levels.
        phi_k: features [B, K, T, F], zero for padding and sinks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    phi_q: Tensor
    phi_k: Tensor
