"""Walk the two T x T matrices of stage one, softmax's weights and the kernel's scores, in blocks: never whole.

A block is some rows of one head, or of a few heads where they are small: small enough to stay in the cache. What
padding hides is left out before, what the future hides is not visited, and the memory of a block is that of the next.

Shapes: n pairs of a batch entry and a key/value head, G query heads in each, C rows, S keys, D head size, F features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from linearize.distillation.row_loss import positive_rows, signed_rows
from linearize.distillation.targets import Targets
from linearize.kernels.base import Features
from linearize.ops import Window
from linearize.ops.window import NearKeys
from linearize.ops.state import FLOOR
from linearize.teacher.rows import pieces, put, take

CPU_NUMBERS = 1 << 18
"""Numbers in one block's matrix on a CPU (1 MiB of fp32); there are three or four such matrices."""

GPU_NUMBERS = 1 << 24
"""The same on other devices, which want large blocks."""

LEAST_ROWS = 128
"""Rows in a block of long inputs, even if it grows: products of a few rows are slow."""

CAUSAL_ROWS = 64
"""Rows in a causal block, or an eighth of all if that is more: its first rows are shown the last one's past."""


def cross_entropy_(
    queries: Features,
    keys: Features,
    targets: Targets,
    penalty: float | None = None,
    window: Window | None = None,
    *,
    gradient: bool,
) -> Tensor:
    """Return the cross-entropy of the kernel's weights against softmax's (hedgehog eq. 6, flexformer L_awd).

    It is summed over valid queries and heads. Loss and gradient come from one pass over blocks of rows, as fused
    cross-entropies do it; with `gradient`, the features BECOME their gradients.

    Args:
        queries: [B, H, R, F] features of `targets.q`, fp32; their log-scale counts with a window only.
        keys: [B, K, T, F] features of `targets.k`, fp32.
        targets: the frozen layer.
        penalty: weight of the negative mass for maps whose weights can be negative; None for positive maps.
        window: joined to a positive map; None: none.
        gradient: whether to overwrite the features and log-scales with the loss's gradients.
    """
    walk = _Walk(targets.causal, penalty, gradient, queries.phi, window)
    for batch, tokens in pieces(targets.key_padding_mask):
        rows, places = _places(targets, tokens)
        frozen = take(targets.q, batch, rows), take(targets.k, batch, tokens)
        mapped = [
            Features(take(phi, batch, some), None if scale is None else take(scale, batch, some))
            for (phi, scale), some in ((queries, rows), (keys, tokens))
        ]
        walk.piece(*frozen, mapped[0], mapped[1], targets.scaling, places)
        if gradient and batch is not None:
            for whole, mine, some in ((queries, mapped[0], rows), (keys, mapped[1], tokens)):
                for x, part in zip(whole, mine, strict=True):
                    if x is not None and part is not None:
                        put(x, batch, some, part)
    return walk.total


def _places(targets: Targets, keys: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Return which of the given queries are among the kept tokens (None: all), and where among them they stand."""
    if targets.positions is None:
        tokens = targets.k.shape[2] if keys is None else len(keys)
        return keys, torch.arange(tokens, device=targets.k.device)
    if keys is None:
        return None, targets.positions
    queries = torch.isin(targets.positions, keys).nonzero()[:, 0]
    return queries, torch.searchsorted(keys, targets.positions[queries])


@dataclass
class _Unit:
    """A few pairs that are walked together; the gradients are None where they are not wanted."""

    q: Tensor  # [n, G, R, D], scaled
    k: Tensor  # [n, S, D]
    phi_q: Tensor  # [n, G, R, F]
    phi_k: Tensor  # [n, S, F]
    log_scale: Tensor | None  # [n, S]
    query_scale: Tensor | None  # [n, G, R]
    near: NearKeys | None
    grad_q: Tensor | None = None
    grad_k: Tensor | None = None


@dataclass
class _Walk:
    """One layer's walk: what is asked, the memory of the blocks and the sum so far."""

    causal: bool
    penalty: float | None
    gradient: bool
    like: Tensor
    window: Window | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = self.like.new_zeros(())
        self.limit = CPU_NUMBERS if self.like.device.type == "cpu" else GPU_NUMBERS

    def piece(
        self,
        q: Tensor,
        k: Tensor,
        queries: Features,
        keys_: Features,
        scaling: float,
        places: Tensor,
    ) -> None:
        """Walk batch entries without padding, [b, H, R, ...] and [b, K, S, ...]; the features become gradients."""
        (phi_q, query_scale), (phi_k, log_scale) = queries, keys_
        batch, key_heads, keys, _ = phi_k.shape
        groups, rows = phi_q.shape[1] // key_heads, phi_q.shape[2]
        count = min(rows, max(-(-LEAST_ROWS // groups), self.limit // max(1, groups * keys)))
        if self.causal:
            count = min(count, max(CAUSAL_ROWS, rows // 8))
        for part, some in _pairs(batch, key_heads, max(1, self.limit // max(1, groups * count * keys))):
            heads = slice(some.start * groups, some.stop * groups)
            whole_q, whole_k = phi_q[part, heads], phi_k[part, some]
            scale = None if log_scale is None else log_scale[part, some]
            row_scale = None if query_scale is None else query_scale[part, heads]
            near = None
            if self.window is not None:
                zeros = whole_k.new_zeros(whole_k.shape[:3])
                near = NearKeys(self.window, zeros if scale is None else scale)
            unit = _Unit(
                (q[part, heads].float() * scaling).unflatten(1, (-1, groups)).flatten(0, 1),
                k[part, some].float().flatten(0, 1),
                whole_q.unflatten(1, (-1, groups)).flatten(0, 1),
                whole_k.flatten(0, 1),
                None if scale is None else scale.flatten(0, 1),
                None if row_scale is None else row_scale.unflatten(1, (-1, groups)).flatten(0, 1),
                near,
            )
            self._unit(unit, places, count)
            if unit.grad_q is None or unit.grad_k is None:
                continue
            if scale is not None:
                # s_ij = exp(c_j) phi(q_i) . phi(k_j): what a key's features get along themselves, its log-scale gets.
                scale.copy_((unit.grad_k * unit.phi_k).sum(dim=-1).view_as(scale))
            if row_scale is not None:
                row_scale.copy_((unit.grad_q * unit.phi_q).sum(dim=-1).view_as(row_scale))
            whole_q.copy_(unit.grad_q.view_as(whole_q))
            whole_k.copy_(unit.grad_k.view_as(whole_k))

    def _unit(self, unit: _Unit, places: Tensor, count: int) -> None:
        if self.gradient:
            unit.grad_q, unit.grad_k = torch.empty_like(unit.phi_q), torch.zeros_like(unit.phi_k)
        for start in range(0, len(places), max(1, count)):
            part = slice(start, start + count)
            self._block(unit, part, places[part])

    def _block(self, unit: _Unit, part: slice, places: Tensor) -> None:
        """Add the loss of some rows, and their gradients to the unit's."""
        seen = int(places[-1]) + 1 if self.causal else unit.k.shape[1]
        features = unit.phi_q[:, :, part].flatten(1, 2)
        shape = (*unit.q[:, :, part].shape[:3], seen)
        hidden = _hidden(places, seen) if self.causal else None
        scores = self._product("scores", unit.q[:, :, part].flatten(1, 2), unit.k[:, :seen], shape)
        _hide(scores, hidden, -math.inf)
        target = torch.softmax(scores, dim=-1, out=self._buffer("target", shape))
        near = None if unit.near is None else unit.near.rows(places, seen)
        exponents = None
        if near is not None:
            exponents = self._hybrid_exponents(unit, part, scores, near, shape)
        elif unit.log_scale is not None:
            exponents = _exponents(unit.log_scale[:, :seen], places, self.causal)
        products = self._product("scores", features, unit.phi_k[:, :seen], shape)
        if near is not None:
            products.masked_fill_(near, 1.0)
        _hide(products, hidden, 0.0)
        spare = self._buffer("spare", shape)
        if self.penalty is None:
            loss, grad = positive_rows(products, target, exponents, spare, gradient=self.gradient)
        else:
            loss, grad = signed_rows(
                products,
                target,
                exponents,
                spare,
                seen=places[:, None] + 1 if self.causal else seen,
                penalty=self.penalty,
                grad=self._buffer("grad", shape) if self.gradient else None,
            )
        self.total += loss
        if grad is None or unit.grad_q is None or unit.grad_k is None:
            return
        _hide(grad, hidden, 0.0)
        if near is not None:
            grad.masked_fill_(near, 0.0)
        flat = grad.flatten(1, 2)
        unit.grad_q[:, :, part] = (flat @ unit.phi_k[:, :seen]).view(*shape[:3], -1)
        unit.grad_k[:, :seen].baddbmm_(flat.transpose(1, 2), features)

    def _hybrid_exponents(
        self, unit: _Unit, part: slice, scores: Tensor, near: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        """Return softmax's scores of near keys and a_i + c_j of far ones, minus the row's largest: [n, G, C, S]."""
        exponents = self._buffer("exponents", shape)
        exponents.zero_()
        if unit.log_scale is not None:
            exponents += unit.log_scale[:, None, None, : shape[-1]]
        if unit.query_scale is not None:
            exponents += unit.query_scale[:, :, part, None]
        # Hidden keys have the score -inf here; a far one among them must not decide the row's shift.
        torch.where(near | scores.isneginf(), scores, exponents, out=exponents)
        exponents -= exponents.amax(dim=-1, keepdim=True)
        return exponents.clamp_(min=FLOOR)

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return uninitialised memory of a shape: the same memory for the same name."""
        numbers = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < numbers:
            self.buffers[name] = self.like.new_empty(numbers)
        return self.buffers[name][:numbers].view(shape)

    def _product(self, name: str, rows: Tensor, keys: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return rows [n, G C, D] times keys [n, S, D] as [n, G, C, S], in memory that is used again."""
        out = self._buffer(name, shape)
        torch.bmm(rows, keys.transpose(1, 2), out=out.flatten(1, 2))
        return out


def _pairs(batch: int, heads: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Cut batch entries times heads into groups of at most `count`: whole entries, or some heads of one."""
    if count >= heads:
        step = count // heads
        for start in range(0, batch, step):
            yield slice(start, min(start + step, batch)), slice(0, heads)
        return
    for entry in range(batch):
        for start in range(0, heads, count):
            yield slice(entry, entry + 1), slice(start, min(start + count, heads))


def _hidden(places: Tensor, seen: int) -> Tensor:
    """Return [C, E]: which of the last E keys, those after the first row's place, lie after each row's own."""
    edge = torch.arange(int(places[0]) + 1, seen, device=places.device)
    return edge > places[:, None]


def _hide(block: Tensor, hidden: Tensor | None, value: float) -> None:
    """Set a block [n, G, C, S] to `value` where the future is."""
    if hidden is not None and hidden.shape[1]:
        block[..., -hidden.shape[1] :].masked_fill_(hidden, value)


def _exponents(log_scale: Tensor, places: Tensor, causal: bool) -> Tensor:
    """Return c_ij minus the largest that row i sees: [n, 1, 1, S], causal [n, 1, C, S]; `FLOOR` where hidden."""
    if not causal:
        return (log_scale - log_scale.amax(dim=-1, keepdim=True)).clamp_(min=FLOOR)[:, None, None]
    largest = log_scale.cummax(dim=-1).values[:, places]
    exponents = (log_scale[:, None] - largest[..., None]).clamp_(min=FLOOR)[:, None]
    _hide(exponents, _hidden(places, log_scale.shape[-1]), FLOOR)
    return exponents
