"""The losses of stage one for one layer: cross-entropy of the weights, and squared error of the head outputs.

Row i of softmax's weights is t_i, the kernel's scores are s_ij = exp(c_ij) phi(q_i) . phi(k_j):

    positive maps:   L_i = log z_i - sum_j t_ij log s_ij,   z_i = sum_j s_ij,   dL_i / ds_ij = 1 / z_i - t_ij / s_ij

Maps whose scores can be negative need more, because a clamped logarithm ignores negative scores. z_i sums only the
positive scores and is at least a fraction of the row's magnitude, so it cannot cross zero. Below a small fraction
of the row's mean the logarithm continues as a straight line, so a negative score is pulled up where softmax attends.
The negative mass divided by z_i is a penalty.

The two T x T matrices are walked in blocks of rows of one or a few heads, small enough to stay in the cache. Padding is
removed first, and blocks end at the last key that a row sees.

Shapes: n pairs of a batch entry and a key/value head, G query heads in each, C rows, S keys, D head size, F features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from linearize.attention.native import chooser
from linearize.fidelity.teacher import Rows, pieces, put, row_blocks, take
from linearize.kernels.base import Features
from linearize.ops import Window
from linearize.ops.state import FLOOR, without_padding
from linearize.ops.window import NearKeys

CPU_NUMBERS = 1 << 18
"""Numbers in one block's matrix on a CPU (1 MiB of fp32); a block has three or four such matrices."""

GPU_NUMBERS = 1 << 24
"""The same on other devices, which need large blocks."""

LEAST_ROWS = 128
"""Smallest number of rows in a block of long inputs: products of a few rows are slow."""

CAUSAL_ROWS = 64
"""Most rows in a causal block, or an eighth of all if that is more: every row is computed to the length of the last."""

TINY = 1e-30
SIGNED_TINY = 1e-6
"""Smallest row mass of a signed map, whose features are of the order of one."""

KNEE = 1e-2
"""Where the logarithm of a signed map becomes a line, as a fraction of the row's mean magnitude."""


class Targets(NamedTuple):
    """The softmax attention that a kernel learns to imitate, as computed by the frozen model.

    Attributes:
        q: [B, H, R, D] queries (all T, or the sampled ones).
        k: [B, K, T, D] keys.
        scaling: factor of the scores.
        causal: whether the attention is causal.
        key_padding_mask: [B, T], true at tokens, or None.
        positions: [R] ascending positions of sampled queries, or None.
        heads: [H] bool, true at the heads that count; None for all.
    """

    q: Tensor
    k: Tensor
    scaling: float
    causal: bool
    key_padding_mask: Tensor | None = None
    positions: Tensor | None = None
    heads: Tensor | None = None

    def sampled(self, positions: Tensor | None) -> Targets:
        """Keep only the queries at some positions [R]; None keeps all."""
        return self if positions is None else self._replace(q=self.q[:, :, positions], positions=positions)

    def counting(self, heads: list[int]) -> Targets:
        """Count only some heads."""
        if len(heads) == self.q.shape[1]:
            return self
        counts = torch.zeros(self.q.shape[1], dtype=torch.bool, device=self.q.device)
        counts[heads] = True
        return self._replace(heads=counts)

    def valid_queries(self) -> Tensor | None:
        """Return a mask [B, R] of the queries that are tokens; None if all are."""
        if self.key_padding_mask is None:
            return None
        mask = self.key_padding_mask.float()
        return mask if self.positions is None else mask[:, self.positions]

    def size(self) -> float:
        """Return the number of valid queries times heads that count, the divisor of the sums."""
        batch, heads, queries, _ = self.q.shape
        heads, valid = heads if self.heads is None else int(self.heads.sum()), self.valid_queries()
        return float(batch * heads * queries) if valid is None else float(valid.sum()) * heads


def cross_entropy(
    queries: Features,
    keys: Features,
    targets: Targets,
    penalty: float | None = None,
    window: Window | None = None,
    *,
    gradient: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the cross-entropy of the kernel's weights against softmax's (hedgehog eq. 6, flexformer L_awd).

    One pass over blocks of rows computes loss and gradients, as fused cross-entropies do.

    Args:
        queries: [B, H, R, F] features of `targets.q`, fp32; their log-scale only matters with a window.
        keys: [B, K, T, F] features of `targets.k`, fp32.
        targets: the frozen layer.
        penalty: weight of the negative mass for maps whose weights can be negative; None for positive maps.
        window: softmax window joined to a positive map, or None.
        gradient: whether to compute the gradients.

    Returns:
        The sum over valid queries and heads, and its gradients: of phi and log-scale of the queries, then of the keys.
        A gradient is None without `gradient`, and for a log-scale that is None.
    """
    walk = _Walk(targets, queries.phi, penalty, window, gradient=gradient)
    features = (*queries, *keys)
    gradients = [None if x is None or not gradient else torch.zeros_like(x) for x in features]
    for batch, tokens in pieces(targets.key_padding_mask):
        # Which of the given queries are among the kept tokens (None for all), and their places among them.
        rows, places = tokens, targets.positions
        if places is None:
            places = torch.arange(targets.k.shape[2] if tokens is None else len(tokens), device=targets.k.device)
        elif tokens is not None:
            rows = torch.isin(places, tokens).nonzero()[:, 0]
            places = torch.searchsorted(tokens, places[rows])
        kept = (rows, rows, tokens, tokens)
        parts = [None if x is None else take(x, batch, side) for x, side in zip(features, kept, strict=True)]
        found = walk.piece(take(targets.q, batch, rows), take(targets.k, batch, tokens), parts, places)
        if batch is None:
            return walk.total, found
        for whole, part, side in zip(gradients, found, kept, strict=True):
            if whole is not None and part is not None:
                put(whole, batch, side, part)
    return walk.total, gradients


@dataclass
class _Unit:
    """A few pairs that are walked together; the gradients are unused without `gradient`."""

    q: Tensor  # [n, G, R, D], scaled
    k: Tensor  # [n, S, D]
    phi_q: Tensor  # [n, G, R, F]
    phi_k: Tensor  # [n, S, F]
    query_scale: Tensor | None  # [n, G, R]
    log_scale: Tensor | None  # [n, S]
    near: NearKeys | None
    left_out: Tensor | None  # [n, G, 1, 1] bool, true at heads that do not count
    grad_q: Tensor
    grad_k: Tensor


class _Walk:
    """Walks one layer in blocks, and sums up its loss in `total`."""

    def __init__(
        self, targets: Targets, like: Tensor, penalty: float | None, window: Window | None, *, gradient: bool
    ) -> None:
        self.causal, self.scaling = targets.causal, targets.scaling
        self.penalty, self.window, self.gradient = penalty, window, gradient
        self.total, self.heads = like.new_zeros(()), targets.heads
        self.limit = CPU_NUMBERS if like.device.type == "cpu" else GPU_NUMBERS

    def piece(self, q: Tensor, k: Tensor, features: list[Tensor | None], places: Tensor) -> list[Tensor | None]:
        """Walk batch entries without padding, [b, H, R, ...] and [b, K, S, ...]; return the gradients of `features`."""
        groups, heads = q.shape[1] // k.shape[1], torch.arange(k.shape[1], device=k.device).repeat(k.shape[0])
        phi_q, query_scale = (None if x is None else _grouped(x, groups) for x in features[:2])
        phi_k, log_scale = (None if x is None else x.flatten(0, 1) for x in features[2:])
        assert phi_q is not None and phi_k is not None
        left_out = None
        if self.heads is not None:
            left_out = ~self.heads.view(1, -1, groups).expand(len(k), -1, -1).flatten(0, 1)[..., None, None]
        q, k, priority = _grouped(q, groups), k.flatten(0, 1), log_scale
        if priority is None:
            priority = phi_k.new_zeros(phi_k.shape[:2])
        grad_q, grad_k = (torch.zeros_like(x) if self.gradient else x for x in (phi_q, phi_k))
        rows, tokens = phi_q.shape[2], phi_k.shape[1]
        count = min(rows, max(-(-LEAST_ROWS // groups), self.limit // max(1, groups * tokens)))
        if self.causal:
            count = min(count, max(CAUSAL_ROWS, rows // 8))
        pairs = max(1, self.limit // max(1, groups * count * tokens))
        for start in range(0, len(k), pairs):
            part = slice(start, start + pairs)
            near = None
            if self.window is not None:
                near = NearKeys(self.window, priority[None, part], k[None, part], chooser(k), heads[part])
            unit = _Unit(
                q[part].float() * self.scaling,
                k[part].float(),
                phi_q[part],
                phi_k[part],
                None if query_scale is None else query_scale[part],
                None if log_scale is None else log_scale[part],
                near,
                None if left_out is None else left_out[part],
                grad_q[part],
                grad_k[part],
            )
            for block in row_blocks(places, tokens, max(1, count), causal=self.causal):
                self._block(unit, block)
        if not self.gradient:
            return [None] * 4
        # s_ij = exp(c_j) phi(q_i) . phi(k_j): a log-scale's gradient is features . gradient.
        found = [
            grad_q,
            None if query_scale is None else (grad_q * phi_q).sum(dim=-1),
            grad_k,
            None if log_scale is None else (grad_k * phi_k).sum(dim=-1),
        ]
        given = zip(found, features, strict=True)
        return [None if g is None or x is None else g.reshape(x.shape) for g, x in given]

    def _block(self, unit: _Unit, rows: Rows) -> None:
        """Add the loss of some rows, and their gradients to the unit's."""
        seen, edge = rows.seen, rows.edge
        queries, features = unit.q[:, :, rows.part], unit.phi_q[:, :, rows.part].flatten(1, 2)
        shape = (*queries.shape[:3], seen)
        scores = (queries.flatten(1, 2) @ unit.k[:, :seen].transpose(1, 2)).view(shape)
        _hide(scores, edge, -math.inf)
        target = scores.softmax(dim=-1)
        near = None if unit.near is None else unit.near.rows(rows.places, seen, queries)
        exponents = self._exponents(unit, rows, scores, near)
        products = (features @ unit.phi_k[:, :seen].transpose(1, 2)).view(shape)
        if near is not None:
            products.masked_fill_(near, 1.0)
        _hide(products, edge, 0.0)
        if unit.left_out is not None:
            target.masked_fill_(unit.left_out, 0.0)
        if self.penalty is None:
            own, cross, grad = positive_rows(products, target, exponents, gradient=self.gradient)
        else:
            counts = rows.places[:, None] + 1 if self.causal else seen
            own, cross, grad = signed_rows(
                products, target, exponents, seen=counts, penalty=self.penalty, gradient=self.gradient
            )
        self.total += (own if unit.left_out is None else own.masked_fill(unit.left_out, 0.0)).sum() - cross
        if grad is None:
            return
        _hide(grad, edge, 0.0)
        if unit.left_out is not None:
            grad.masked_fill_(unit.left_out, 0.0)
        if near is not None:
            grad.masked_fill_(near, 0.0)
        flat = grad.flatten(1, 2)
        unit.grad_q[:, :, rows.part] = (flat @ unit.phi_k[:, :seen]).view(*shape[:3], -1)
        unit.grad_k[:, :seen].baddbmm_(flat.transpose(1, 2), features)

    def _exponents(self, unit: _Unit, rows: Rows, scores: Tensor, near: Tensor | None) -> Tensor | None:
        """Return the exponents of the kernel's weights, minus the largest that a row sees; None if all are 0.

        Without a window they are c_j, [n, 1, 1, S] or causal [n, 1, C, S], and `FLOOR` where hidden. With one they are
        softmax's scores of near keys and a_i + c_j of far ones, [n, G, C, S].
        """
        log_scale = None if unit.log_scale is None else unit.log_scale[:, : rows.seen]
        if near is not None:
            exponents = torch.zeros_like(scores)
            if log_scale is not None:
                exponents += log_scale[:, None, None]
            if unit.query_scale is not None:
                exponents += unit.query_scale[:, :, rows.part, None]
            # Hidden keys have the score -inf here; a hidden far key must not determine the row's shift.
            exponents = torch.where(near | scores.isneginf(), scores, exponents)
            exponents -= exponents.amax(dim=-1, keepdim=True)
            return exponents.clamp_(min=FLOOR)
        if log_scale is None:
            return None
        if not rows.causal:
            return (log_scale - log_scale.amax(dim=-1, keepdim=True)).clamp_(min=FLOOR)[:, None, None]
        largest = log_scale.cummax(dim=-1).values[:, rows.places]
        exponents = (log_scale[:, None] - largest[..., None]).clamp_(min=FLOOR)[:, None]
        _hide(exponents, rows.edge, FLOOR)
        return exponents


def _grouped(x: Tensor, groups: int) -> Tensor:
    """View x [b, H, R, ...] as [b K, G, R, ...]."""
    return x.unflatten(1, (-1, groups)).flatten(0, 1)


def _hide(block: Tensor, edge: Tensor | None, value: float) -> None:
    """Set a block [n, G, C, S] to `value` at keys that a row does not see; `edge` covers the last ones."""
    if edge is not None:
        block[..., -edge.shape[1] :].masked_fill_(edge, value)


def positive_rows(
    products: Tensor, target: Tensor, exponents: Tensor | None, *, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the two terms of the loss: log z per row [n, G, C, 1], and what is subtracted, summed over rows.

    The third result is the loss's gradient with respect to `products`, or None.

    Args:
        products: [n, G, C, S] phi(q_i) . phi(k_j), 0 where hidden; overwritten.
        target: [n, G, C, S] softmax's weights, 0 where hidden; overwritten.
        exponents: c_ij, which broadcast to that shape, very negative where hidden; None if all are 0.
        gradient: whether to compute the gradient.
    """
    factors = None if exponents is None else exponents.exp()
    z = (products if factors is None else products * factors).sum(dim=-1, keepdim=True).clamp_(min=TINY)
    logs = products.clamp(min=TINY).log_()
    if exponents is not None:
        logs.add_(exponents)
    terms = z.log(), torch.dot(target.view(-1), logs.view(-1))
    if not gradient:
        return *terms, None
    # The logarithm of a product that is almost zero is cut off and has no slope.
    target.div_(nnf.threshold(products, TINY, math.inf, inplace=True))
    return *terms, target.neg_().add_(z.reciprocal() if factors is None else factors / z)


def signed_rows(
    products: Tensor,
    target: Tensor,
    exponents: Tensor | None,
    *,
    seen: Tensor | int,
    penalty: float,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do the same as `positive_rows` for maps whose products can be negative.

    Further arguments:
        seen: how many keys a row sees: a number, or one per row [C, 1].
        penalty: weight of the negative mass.
    """
    factors = None if exponents is None else exponents.exp()
    scores = products if factors is None else products * factors
    mass = scores.clamp(min=0.0).sum(dim=-1, keepdim=True)
    negative = (mass - scores.sum(dim=-1, keepdim=True)).clamp_(min=0.0)
    # The knee and the least normaliser are constants in the gradient.
    least = KNEE * (mass + negative).clamp(min=SIGNED_TINY)
    z, knee = torch.maximum(mass, least), least / seen
    share = penalty * negative / z
    safe = torch.maximum(scores, knee)
    logs = safe.log() + (scores - safe) / knee
    terms = z.log() + share, torch.dot(target.view(-1), logs.view(-1))
    if not gradient:
        return *terms, None
    above, below = torch.where(mass > least, (1.0 - share) / z, 0.0), -penalty / z
    # `above` where a score is positive, `below` where it is negative.
    grad = scores.sign().mul_((above - below) / 2).add_((above + below) / 2).addcdiv_(target, safe, value=-1.0)
    return *terms, grad if factors is None else grad.mul_(factors)


def output_loss(out: Tensor, target: Tensor, targets: Targets) -> Tensor:
    """Sum the squared error of the head outputs over the valid queries and heads that count.

    In each row of the batch, a head's error is divided by the mean square of the head's target over all tokens. So one
    learning rate fits every layer and model, and a row's loss depends on no other row of its batch.

    Args:
        out: [B, H, T, V] of the kernel, for all tokens.
        target: [B, H, T, V] of softmax.
        targets: the frozen layer, for its padding, sampled queries and heads.
    """
    mask = targets.key_padding_mask
    difference, target = (without_padding(x, mask) for x in (out.float() - target.float(), target.float()))
    tokens = out.shape[2] if mask is None else mask.float().sum(dim=1).clamp(min=1.0)[:, None]
    power = (target.square().sum(dim=(2, 3)) / tokens).clamp(min=TINY)
    if targets.positions is not None:
        difference = difference[:, :, targets.positions]
    errors = difference.square().sum(dim=(2, 3)) / power
    return (errors if targets.heads is None else errors[:, targets.heads]).sum()
