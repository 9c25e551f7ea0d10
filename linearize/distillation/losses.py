"""Losses of stage one: how far a layer's kernel is from the frozen softmax, summed over queries and heads.

Cross-entropy of the weights (hedgehog eq. 6, flexformer L_awd). Row i of softmax's weights is t_i, the kernel's
products are s_ij, z_i = sum_j s_ij:

    L_i = log z_i - sum_j t_ij log s_ij,        dL_i / ds_ij = 1 / z_i - t_ij / s_ij

Loss and gradient come from one pass over blocks of rows, as fused cross-entropies do it; no T x T matrix is kept.

Maps whose products can be negative need more, for a logarithm behind a clamp neither sees nor mends them: z_i sums the
positive part only, at least a fraction of the row's magnitude (it cannot cross zero); the logarithm goes on as a
straight line below a small fraction of the row's mean (so that a wanted key with a negative product is pulled up); and
the negative mass over z_i is a penalty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linearize.fidelity.rows import group, kernel_rows, row_blocks, softmax_rows
from linearize.ops.state import FLOOR

TINY = 1e-30
SIGNED_TINY = 1e-6
"""Smallest row mass of a signed map: its features are of the order of one."""

KNEE = 1e-2
"""Where the logarithm of a signed map becomes a line, as a fraction of the row's mean magnitude."""


class Targets(NamedTuple):
    """What the frozen model shows of one layer.

    Attributes:
        q: [B, H, R, D] queries (all T, or the sampled ones).
        k: [B, K, T, D] keys.
        scaling: what scores are multiplied with.
        causal: the direction.
        key_padding_mask: [B, T], true where there is a token, or None.
        positions: [R] positions of sampled queries, or None.
    """

    q: Tensor
    k: Tensor
    scaling: float
    causal: bool
    key_padding_mask: Tensor | None = None
    positions: Tensor | None = None

    def valid_queries(self) -> Tensor | None:
        """Return [B, R] ones where the query is a token; None: all are."""
        if self.key_padding_mask is None:
            return None
        mask = self.key_padding_mask.float()
        return mask if self.positions is None else mask[:, self.positions]

    def size(self) -> float:
        """Return the number of valid queries times heads, what the sums are divided by."""
        batch, heads, queries, _ = self.q.shape
        valid = self.valid_queries()
        return float(batch * heads * queries) if valid is None else float(valid.sum()) * heads


def weights_loss(
    phi_q: Tensor, phi_k: Tensor, log_scale: Tensor | None, targets: Targets, *, negative_penalty: float | None = None
) -> Tensor:
    """Sum the cross-entropy of the kernel's weights against softmax's over valid queries and heads.

    Args:
        phi_q: [B, H, R, F] features of `targets.q`.
        phi_k: [B, K, T, F] features of `targets.k`.
        log_scale: [B, K, T] or None.
        targets: the frozen layer.
        negative_penalty: weight of the negative mass for maps whose weights can be negative; None for positive maps.

    Returns:
        A scalar with a gradient to the features; memory is linear in T.
    """
    return _WeightsLoss.apply(phi_q, phi_k, log_scale, targets, negative_penalty)


class _WeightsLoss(torch.autograd.Function):
    """The gradient is made in the forward pass, block by block."""

    @staticmethod
    def forward(
        ctx: Any, phi_q: Tensor, phi_k: Tensor, log_scale: Tensor | None, targets: Targets, penalty: float | None
    ) -> Tensor:
        key_heads = phi_k.shape[1]
        features, queries = group(phi_q, key_heads), group(targets.q, key_heads)
        grad_q, grad_k = torch.zeros_like(features), torch.zeros_like(phi_k)
        grad_scale = None if log_scale is None else torch.zeros_like(log_scale)
        total = phi_q.new_zeros(())
        valid = targets.valid_queries()
        blocks = row_blocks(
            targets.q,
            targets.k,
            causal=targets.causal,
            key_padding_mask=targets.key_padding_mask,
            positions=targets.positions,
        )
        for rows in blocks:
            target = softmax_rows(queries, targets.k, rows, targets.scaling)
            products, exponents = kernel_rows(features, phi_k, log_scale, rows)
            row = _signed_row if penalty is not None else _positive_row
            loss, grad = row(products, exponents, target, penalty or 0.0)
            if valid is not None:
                keep = valid[:, None, None, rows.part, None]
                loss, grad = loss * keep, grad * keep
            total += loss.sum()
            if grad_scale is not None:
                grad_scale[:, :, : rows.seen] += (grad * products).sum(dim=(2, 3))
            grad_q[:, :, :, rows.part] = grad @ phi_k[:, :, None, : rows.seen]
            flat = grad.flatten(2, 3).transpose(-1, -2)
            grad_k[:, :, : rows.seen] += flat @ features[:, :, :, rows.part].flatten(2, 3)
        ctx.save_for_backward(grad_q.reshape_as(phi_q), grad_k, grad_scale)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_q, grad_k, grad_scale = ctx.saved_tensors
        scale = None if grad_scale is None else grad_scale * grad_output
        return grad_q * grad_output, grad_k * grad_output, scale, None, None


def _positive_row(products: Tensor, exponents: Tensor | None, target: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return a block's losses [..., C, 1] and their gradient with respect to `products` [..., C, S]."""
    safe = products.clamp(min=TINY)
    factors = None if exponents is None else exponents.exp()
    z = (products if factors is None else products * factors).sum(dim=-1, keepdim=True).clamp(min=TINY)
    logs = safe.log() if exponents is None else safe.log() + exponents
    loss = z.log() - (target * logs).sum(dim=-1, keepdim=True)
    mean = 1.0 / z if factors is None else factors / z
    grad = mean - torch.where(products > TINY, target / safe, 0.0)
    # A left-padded row sees nothing: its target is all zero, and it counts nothing.
    seen = target.sum(dim=-1, keepdim=True)
    return loss * (seen > 0), grad * (seen > 0)


def _signed_row(products: Tensor, exponents: Tensor | None, target: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """The same for maps whose products can be negative; see the module's text."""
    factors = None if exponents is None else exponents.exp()
    scores = products if factors is None else products * factors
    positive = scores.clamp(min=0.0)
    negative = (positive - scores).sum(dim=-1, keepdim=True)
    mass = positive.sum(dim=-1, keepdim=True)
    least = KNEE * (mass + negative).clamp(min=SIGNED_TINY)
    z = torch.maximum(mass, least)
    keys = scores.shape[-1] if exponents is None else (exponents > FLOOR).sum(dim=-1, keepdim=True).clamp(min=1)
    knee = least / keys
    above = scores > knee
    safe = torch.where(above, scores, knee)
    logs = safe.log() + torch.where(above, 0.0, (scores - knee) / knee)
    loss = z.log() - (target * logs).sum(dim=-1, keepdim=True) + penalty * negative / z
    # The knee and the least normaliser are yardsticks: they are held constant in the gradient.
    slope = torch.where(mass > least, (1.0 - penalty * negative / z) / z, 0.0)
    grad = torch.where(scores > 0, slope, -penalty / z) - target / safe
    grad = grad if factors is None else grad * factors
    seen = target.sum(dim=-1, keepdim=True)
    return loss * (seen > 0), grad * (seen > 0)


def output_loss(out: Tensor, target: Tensor, targets: Targets) -> Tensor:
    """Sum the squared error of the head outputs over valid queries, relative to the target's mean square.

    A target's own size is divided out per head, so that one learning rate serves every layer and model.

    Args:
        out: [B, H, T, V] of the kernel.
        target: [B, H, T, V] of softmax.
        targets: the frozen layer, for its padding.
    """
    valid = targets.valid_queries()
    keep = torch.ones_like(target[:, 0, :, 0]) if valid is None else valid
    keep = keep[:, None, :, None]
    error = ((out.float() - target.float()).square() * keep).sum(dim=(0, 2, 3))
    power = (target.float().square() * keep).sum(dim=(0, 2, 3)).clamp(min=TINY)
    return (error / power).mean() * keep.sum() * target.shape[1]
