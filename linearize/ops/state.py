"""What the linear attention ops share: the running state, its stabiliser and the guarded division.

Shape letters of the whole package: B batch, H query heads, K key/value heads (K divides H), T tokens, D head size,
F feature size, V value size.

Keys may come with a *log-scale* `c` [B, K, T]: the feature vector of token j is then `exp(c_j) * phi_k[j]`, which is
how maps whose size grows like an exponential stay finite. Every op subtracts a running maximum of `c` over the keys a
query can see, never over later ones, and the maximum cancels between numerator and denominator.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

EPS = 1e-30
"""Smallest magnitude of a denominator. Sums are fp32 always, so this is far from fp32's smallest number (1e-38)."""

FLOOR = -1e30
"""Log-scale of "no key yet". Finite, because -inf minus -inf is NaN."""


class State(NamedTuple):
    """Everything that linear attention remembers of the keys and values it has seen.

    Attributes:
        kv: [B, K, F, V + 1] fp32, sum over keys of `phi(k) [v, 1]^T`; the last column is the denominator's sum.
            Without normalisation the column is absent: [B, K, F, V].
        log_scale: [B, K] fp32, the sums are to be read as `exp(log_scale) * kv`.
    """

    kv: Tensor
    log_scale: Tensor


class LinearOptions(TypedDict, total=False):
    """What every linear attention op takes beside features and values.

    Attributes:
        key_padding_mask: [B, T], true or 1 where there is a token; None: everywhere.
        log_scale: the keys' [B, K, T], see above; None: all 0.
        initial_state: the state before these tokens, or None.
        normalize: whether rows are divided by their sums (the default).
        eps: smallest magnitude of such a sum, `EPS` by default.
    """

    key_padding_mask: Tensor | None
    log_scale: Tensor | None
    initial_state: State | None
    normalize: bool
    eps: float


class LinearOp(Protocol):
    """The contract of the ops: phi_q [B, H, T, F], phi_k [B, K, T, F], v [B, K, T, V] -> [B, H, T, V] and the state.

    The output has the dtype of `v`, the state after the last token is fp32.
    """

    def __call__(
        self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]
    ) -> tuple[Tensor, State]:
        """Attend."""


def empty_state(phi_k: Tensor, v: Tensor, *, scaled: bool, normalize: bool = True) -> State:
    """Make the state before the first token, on the device of `phi_k` [B, K, T, F] and for values `v` [B, K, T, V].

    A map gives log-scales always or never (`scaled`); where it never does, the state's log-scale is 0 throughout.
    """
    batch, heads, _, features = phi_k.shape
    width = v.shape[-1] + int(normalize)
    kv = torch.zeros(batch, heads, features, width, dtype=torch.float32, device=phi_k.device)
    log_scale = torch.full((batch, heads), FLOOR if scaled else 0.0, dtype=torch.float32, device=phi_k.device)
    return State(kv, log_scale)


def without_padding(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return x [B, H, T, D] with zeros at padded tokens, whatever they hold: 0 times NaN would be NaN.

    The mask [B, T] is true or 1 where there is a token.
    """
    return x if key_padding_mask is None else x.masked_fill(~key_padding_mask[:, None, :, None].bool(), 0.0)


def with_ones(v: Tensor, normalize: bool, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return `v` in fp32 with one more column, of ones, that gathers the denominator: [B, K, T, V (+ 1)].

    Padded rows are zero throughout.
    """
    v = without_padding(v.float(), key_padding_mask)
    if not normalize:
        return v
    return torch.cat([v, without_padding(v.new_ones(*v.shape[:-1], 1), key_padding_mask)], dim=-1)


def masked_log_scale(phi_k: Tensor, log_scale: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """Return the keys' log-scale [B, K, T] in fp32 with padded keys at `FLOOR`; None where nothing is scaled."""
    if log_scale is None:
        return None
    log_scale = log_scale.float().expand(phi_k.shape[:-1])
    if key_padding_mask is None:
        return log_scale
    return log_scale.masked_fill(~key_padding_mask[:, None, :].bool(), FLOOR)


def divide(mixed: Tensor, eps: float) -> Tensor:
    """Split the last column off `mixed` [..., V + 1] and divide by it, its magnitude kept at `eps` or more."""
    numerator, denominator = mixed[..., :-1], mixed[..., -1:]
    guard = torch.where(denominator < 0, -eps, eps)
    return numerator / torch.where(denominator.abs() < eps, guard, denominator)


def guarded(total: Tensor, least: float | Tensor) -> Tensor:
    """Return row sums with their magnitude held at `least` or more; the in-place twin of the guard in `divide`."""
    return total.abs().clamp_(min=least).copysign_(total)


def group_queries(phi_q: Tensor, key_heads: int) -> Tensor:
    """View query features [B, H, T, F] as [B, K, H / K, T, F]: query head h reads key/value head h // (H / K)."""
    batch, heads, tokens, features = phi_q.shape
    return phi_q.reshape(batch, key_heads, heads // key_heads, tokens, features)
