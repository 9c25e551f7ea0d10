"""Code shared by the linear attention ops: options, the running state, its stabiliser and the guarded division.

Shape letters of the whole package: B batch, H query heads, K key/value heads (K divides H), T tokens, D head size,
F feature size, V value size.

Keys may come with a *log-scale* `c` [B, K, T]: the feature vector of token j is then `exp(c_j) * phi_k[j]`, so that
features which grow exponentially stay finite. Every op subtracts a running maximum of `c` over the keys that a query
can see, never over later keys; the maximum cancels between numerator and denominator.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-30
"""Smallest magnitude of a denominator. Sums are always fp32, whose smallest normal number is much smaller (1e-38)."""

FLOOR = -1e30
"""Log-scale of "no key yet". Finite, because -inf minus -inf is NaN."""


class State(NamedTuple):
    """Everything that linear attention remembers of the keys and values it has seen.

    Attributes:
        kv: [B, K, F, V + 1] fp32, sum over keys of `phi(k) [v, 1]^T`; the last column is the denominator's sum.
            Without normalisation the column is absent: [B, K, F, V].
        log_scale: [B, K] fp32; the true sums are `exp(log_scale) * kv`.
    """

    kv: Tensor
    log_scale: Tensor


class Context(Protocol):
    """What an op keeps for its backward pass: tensors, and other values as attributes of any name."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors, which autograd watches for changes in place."""

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...


class LinearOptions(TypedDict, total=False):
    """The keyword arguments of every linear attention op; `Options` describes them."""

    key_padding_mask: Tensor | None
    log_scale: Tensor | None
    initial_state: State | None
    normalize: bool
    eps: float


class Options(NamedTuple):
    """The options of a linear attention op, with their defaults.

    Attributes:
        key_padding_mask: [B, T], true or 1 at tokens; None if there is no padding.
        log_scale: the keys' log-scales [B, K, T] (see the module); None: all 0.
        initial_state: the state before these tokens, or None.
        normalize: whether rows are divided by their sums.
        eps: smallest magnitude of a row's sum.
    """

    key_padding_mask: Tensor | None = None
    log_scale: Tensor | None = None
    initial_state: State | None = None
    normalize: bool = True
    eps: float = EPS

    def start(self, phi_k: Tensor, v: Tensor) -> State:
        """Return the state before the tokens phi_k [B, K, T, F], v [B, K, T, V]: the given one, or an empty one."""
        if self.initial_state is not None:
            return self.initial_state
        return empty_state(phi_k, v, scaled=self.log_scale is not None, normalize=self.normalize)

    def keys(self, phi_k: Tensor) -> Tensor:
        """Return key features [B, K, T, F] in fp32 with zeros at padding."""
        return without_padding(phi_k.float(), self.key_padding_mask)

    def values(self, v: Tensor) -> Tensor:
        """Return values in fp32 with the denominator's column of ones, [B, K, T, V (+ 1)], and zeros at padding."""
        return with_ones(v, self.normalize, self.key_padding_mask)

    def scale(self, phi_k: Tensor) -> Tensor | None:
        """Return the log-scales [B, K, T] in fp32 with `FLOOR` at padding; None if nothing is scaled."""
        if self.log_scale is None:
            return None
        log_scale = self.log_scale.float().expand(phi_k.shape[:-1])
        if self.key_padding_mask is None:
            return log_scale
        return log_scale.masked_fill(~self.key_padding_mask[:, None, :].bool(), FLOOR)

    def divided(self, mixed: Tensor) -> Tensor:
        """Divide sums [..., V + 1] by their last column, or return sums [..., V] unchanged without `normalize`."""
        return divide(mixed, self.eps) if self.normalize else mixed


class LinearOp(Protocol):
    """The contract of the ops: phi_q [B, H, T, F], phi_k [B, K, T, F], v [B, K, T, V] -> [B, H, T, V] and the state.

    The output has the dtype of `v`; the state after the last token is fp32.
    """

    def __call__(
        self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]
    ) -> tuple[Tensor, State]:
        """Attend."""


def empty_state(phi_k: Tensor, v: Tensor, *, scaled: bool, normalize: bool = True) -> State:
    """Return the state before the first token, on the device of `phi_k` [B, K, T, F], for values `v` [B, K, T, V].

    A map returns log-scales always or never (`scaled`); if never, the state's log-scale stays 0.
    """
    batch, heads, _, features = phi_k.shape
    width = v.shape[-1] + int(normalize)
    kv = torch.zeros(batch, heads, features, width, dtype=torch.float32, device=phi_k.device)
    log_scale = torch.full((batch, heads), FLOOR if scaled else 0.0, dtype=torch.float32, device=phi_k.device)
    return State(kv, log_scale)


def without_padding(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return x [B, H, T, D] with zeros at padding, whatever was there: 0 times NaN would be NaN.

    The mask [B, T] is true or 1 at tokens.
    """
    return x if key_padding_mask is None else x.masked_fill(~key_padding_mask[:, None, :, None].bool(), 0.0)


def real_tokens(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return the mask [B, T] of x [B, H, T, D] as bool, true at tokens; all true if there is no padding."""
    if key_padding_mask is not None:
        return key_padding_mask.bool()
    return torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device)


def keys_up_to(k: Tensor, rows: Tensor | None) -> Tensor:
    """Return which of the keys k [B, K, S, D] are not after a query, [R, S] bool.

    The queries are at the places `rows` [R], or at all S places in order if it is None.
    """
    places = torch.arange(k.shape[2], device=k.device)
    return places <= (places if rows is None else rows)[:, None]


def with_ones(v: Tensor, normalize: bool, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return `v` in fp32 with a column of ones appended, which sums up the denominator: [B, K, T, V (+ 1)].

    Padded rows are zero.
    """
    v = v.float()
    return without_padding(F.pad(v, (0, 1), value=1.0) if normalize else v, key_padding_mask)


def all_finite(x: Tensor) -> bool:
    """Tell whether x holds neither NaN nor infinity, for sure: a sum that overflows counts as infinity too."""
    return math.isfinite(x.detach().sum())


def split_absurd(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split what causal queries see: x [..., T, X] -> x with 0 for NaN and infinity, and what to add to the outputs.

    The latter [..., T, X] is 0, and NaN from the first token on whose number is NaN or infinity.
    """
    return x.nan_to_num(0.0, 0.0, 0.0), (x * 0).cumsum(dim=-2)


def weigh(weights: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Multiply values by weights; NaN and infinity reach only the rows that see them, as 0 times NaN would be NaN.

    Args:
        weights: [..., G, R, S], zero where a key is hidden.
        values: [..., S, V].
        hidden: [..., R, S] bool, or fewer leading axes; the same for all G.

    Returns:
        [..., G, R, V].
    """
    groups = weights.shape[-3:-1]
    # Only on the CPU can values be read without waiting.
    if values.device.type == "cpu" and not is_tracing() and all_finite(values):
        return (weights.flatten(-3, -2) @ values).unflatten(-2, groups)
    absurd = ~values.isfinite()
    mixed = (weights.flatten(-3, -2) @ values.masked_fill(absurd, 0.0)).unflatten(-2, groups)
    reached = (~hidden).to(weights.dtype) @ absurd.to(weights.dtype)
    return mixed.masked_fill((reached > 0)[..., None, :, :], torch.nan)


def held(total: Tensor, least: Tensor | float) -> Tensor:
    """Return sums [...] with magnitudes of at least `least`, a constant where it applies; zero counts as positive."""
    return torch.where(total < 0, total.clamp(max=-least), total.clamp(min=least))


def divide(mixed: Tensor, eps: float) -> Tensor:
    """Split the last column off `mixed` [..., V + 1] and divide by it, its magnitude kept at `eps` or more."""
    return mixed[..., :-1] / held(mixed[..., -1:], eps)


def group_queries(phi_q: Tensor, key_heads: int) -> Tensor:
    """View query features [B, H, T, F] as [B, K, H / K, T, F]: query head h reads key/value head h // (H / K)."""
    batch, heads, tokens, features = phi_q.shape
    return phi_q.reshape(batch, key_heads, heads // key_heads, tokens, features)


def real_first(mask: Tensor) -> Tensor:
    """Return the order [..., T] that puts the tokens of `mask` [..., T] before the others and keeps their order."""
    real = mask.bool()
    # Count instead of sorting: ONNX has no stable sort.
    place = torch.where(real, real.cumsum(dim=-1), real.sum(dim=-1, keepdim=True) + (~real).cumsum(dim=-1)) - 1
    return inverse(place)


def inverse(order: Tensor) -> Tensor:
    """Return the order [..., T] that undoes another."""
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.zeros_like(order).scatter(-1, order, places)


def take(x: Tensor, order: Tensor) -> Tensor:
    """Pick tokens `order` [B, N] of x [B, H, T, D] or [B, H, T] -> [B, H, N, D] or [B, H, N]."""
    index = order[:, None] if x.ndim == 3 else order[:, None, :, None]
    return x.gather(2, index.expand(*x.shape[:2], -1, *x.shape[3:]))


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """Undo `take` with an order of all tokens: [B, H, T, D] -> [B, H, T, D]."""
    return take(x, inverse(order))


def is_tracing() -> bool:
    """Tell whether torch.compile, torch.export, torch.jit.trace or a transform of torch.func is tracing."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
