"""The loss of some rows and its gradient with respect to the kernel's products, in few passes and in place.

Row i of softmax's weights is t_i, the kernel's scores are s_ij = exp(c_ij) phi(q_i) . phi(k_j):

    positive maps:   L_i = log z_i - sum_j t_ij log s_ij,   z_i = sum_j s_ij,   dL_i / ds_ij = 1 / z_i - t_ij / s_ij

Maps whose scores can be negative need more, for a logarithm behind a clamp neither sees nor corrects them: z_i sums the
positive part only, at least a fraction of the row's magnitude (it cannot cross zero); the logarithm goes on as a
straight line below a small fraction of the row's mean (so that a wanted key with a negative score is pulled up); and
the negative mass over z_i is a penalty.

Shapes: n pairs of a batch entry and a key/value head, G query heads in each, C rows, S keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as nnf
from torch import Tensor

TINY = 1e-30
SIGNED_TINY = 1e-6
"""Smallest row mass of a signed map: its features are of the order of one."""

KNEE = 1e-2
"""Where the logarithm of a signed map becomes a line, as a fraction of the row's mean magnitude."""


def positive_rows(
    products: Tensor, target: Tensor, exponents: Tensor | None, spare: Tensor, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the loss summed over rows, and its gradient with respect to `products` (in the memory of `target`).

    Args:
        products: [n, G, C, S] phi(q_i) . phi(k_j), 0 where hidden; used up.
        target: [n, G, C, S] softmax's weights, 0 where hidden; used up.
        exponents: c_ij, which broadcast to them, very negative where hidden; None: all 0.
        spare: memory of that size.
        gradient: whether the gradient is wanted.
    """
    factors = None if exponents is None else exponents.exp()
    scores = products if factors is None else torch.mul(products, factors, out=spare)
    z = scores.sum(dim=-1, keepdim=True).clamp_(min=TINY)
    logs = torch.clamp(products, min=TINY, out=spare).log_()
    if exponents is not None:
        logs.add_(exponents)
    loss = z.log().sum() - torch.dot(target.view(-1), logs.view(-1))
    if not gradient:
        return loss, None
    # Where a product is nothing, its logarithm is cut off, and has no slope.
    target.div_(nnf.threshold(products, TINY, math.inf, inplace=True))
    mean = z.reciprocal() if factors is None else torch.div(factors, z, out=spare)
    return loss, torch.sub(mean, target, out=target)


def signed_rows(
    products: Tensor,
    target: Tensor,
    exponents: Tensor | None,
    spare: Tensor,
    *,
    seen: Tensor | int,
    penalty: float,
    grad: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The same for maps whose products can be negative; the gradient is made in `grad`, None where not wanted.

    Args:
        products: see `positive_rows`.
        target: see there; left as it is.
        exponents: see there.
        spare: see there.
        seen: how many keys a row sees: a number, or one per row [C, 1].
        penalty: weight of the negative mass.
        grad: memory for the gradient, [n, G, C, S].
    """
    factors = None if exponents is None else exponents.exp()
    scores = products if factors is None else products.mul_(factors)
    mass = torch.clamp(scores, min=0.0, out=spare).sum(dim=-1, keepdim=True)
    negative = (mass - scores.sum(dim=-1, keepdim=True)).clamp_(min=0.0)
    # The knee and the least normaliser are yardsticks: they are held constant in the gradient.
    least = KNEE * (mass + negative).clamp(min=SIGNED_TINY)
    z, knee = torch.maximum(mass, least), least / seen
    share = penalty * negative / z
    safe = torch.maximum(scores, knee, out=spare)
    if grad is not None:
        above, below = torch.where(mass > least, (1.0 - share) / z, 0.0), -penalty / z
        # `above` where a score is positive, `below` where it is negative.
        torch.sign(scores, out=grad).mul_((above - below) / 2).add_((above + below) / 2)
        grad.addcdiv_(target, safe, value=-1.0)
        if factors is not None:
            grad.mul_(factors)
    line = scores.sub_(safe)
    logs = torch.addcdiv(spare.log_(), line, knee, out=line)
    return z.log().sum() + share.sum() - torch.dot(target.view(-1), logs.view(-1)), grad
