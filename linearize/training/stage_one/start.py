"""Start a hybrid's learned log-scales in closed form, by two weighted least-squares fits on a few rows.

Alongside a softmax window, a far weight exp(a_i + c_j) phi(q_i) . phi(k_j) should be exp(s_ij), where
s_ij = scaling q_i . k_j. With a_i = w . q_i + b and c_j = u . k_j (`linearize.attention.hybrid`) two sums are
minimised:

    over u, w, b:   sum over queries i and far keys j of  t_ij (s_ij - log phi(q_i) . phi(k_j) - a_i - c_j)^2
    then w, b:      sum over queries i of  m_i (1 - m_i) (wanted_i - a_i)^2,
                    wanted_i = logsumexp_j s_ij - logsumexp_j (log phi(q_i) . phi(k_j) + c_j), far keys only

t_ij is softmax's weight, and m_i the sum of the far keys' weights. The second fit gives the far keys the same total
weight as softmax does; m_i (1 - m_i) is the curvature of stage one's cross-entropy in a_i.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from linearize.attention.layer import LinearAttention
from linearize.attention.native import chooser
from linearize.attention.parts import HEADS, NEAR, ROUTED, SCALED, check_parts
from linearize.core.registry import SCALES
from linearize.fidelity.teacher import all_rows, frozen_output, pieces, score_rows, take
from linearize.ops.state import group_queries
from linearize.ops.window import NearKeys, Window
from linearize.training.stage_one.loss import Targets
from linearize.training.stage_one.observer import KernelTrainer

RIDGE = 1e-2
"""Penalty on squared parameters, as a share of the mean diagonal of the normal equations."""
ROWS = 4
"""Most rows that are fitted."""
QUERIES = 1024
"""Queries per row that are fitted, evenly spaced, in rows of at least twice as many tokens."""
JUDGED = 2
"""Held-out batches on which a fit is compared with zero scales."""
SMALL = 1e-3
"""Products phi(q) . phi(k) are at least this share of their mean over a query's far keys."""


@torch.no_grad()
def start_scales(
    trainer: KernelTrainer, batches: Iterator[Mapping[str, Tensor]], held_out: Sequence[Mapping[str, Tensor]]
) -> None:
    """Fit the log-scales that are zero, in place; a layer whose held-out loss does not fall keeps zero.

    Args:
        trainer: the trainer of stage one. With several processes, each fits its own rows, and the mean is used.
        batches: model inputs; the first rows of the first batch are used, if a layer needs them.
        held_out: batches to compare on.
    """
    fresh = [loss for loss in trainer.layers if has_zero_scales(loss.layer)]
    if not fresh:
        return
    trainer.measure(held_out[:JUDGED])
    before = [loss.mean for loss in fresh]

    def observe(
        layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        for loss in trainer.by_host.get(id(layer), []):
            if loss in fresh:
                with torch.autocast(device_type=q.device.type, enabled=False):
                    fit_scales(loss.layer, Targets(q, k, scaling, layer.shape.causal, mask))
        return frozen_output(layer, q, k, v, mask, scaling)

    trainer.run_frozen({name: value[:ROWS] for name, value in next(batches).items()}, observe)
    for loss in fresh:
        for tensor in _fitted(loss.layer):
            tensor.copy_(trainer.reduce(tensor) / trainer.accelerator.num_processes)
    trainer.measure(held_out[:JUDGED])
    for loss, worst in zip(fresh, before, strict=True):
        if not loss.mean < worst:
            for tensor in _fitted(loss.layer):
                tensor.zero_()


def has_zero_scales(layer: LinearAttention) -> bool:
    """Tell whether a layer has a window, and log-scales that are zero."""
    if layer.hybrid.window is None or layer.hybrid.scale == SCALES[0]:
        return False
    mixer = layer.map_mixer
    scales = [scale for scale in (mixer.query_scale, mixer.key_scale) if scale is not None]
    # The hidden units of a network are random; their output weights are zero.
    return not any(bool(x.any()) for scale in scales for x in (scale.weight, scale.bias, scale.out) if x is not None)


def _fitted(layer: LinearAttention) -> tuple[Tensor, Tensor, Tensor]:
    mixer = layer.map_mixer
    queries, keys = mixer.query_scale, mixer.key_scale
    assert queries is not None and queries.bias is not None and keys is not None
    return queries.weight, queries.bias, keys.weight


@torch.no_grad()
def fit_scales(layer: LinearAttention, targets: Targets) -> None:
    """Fit the scales of a layer with a window, in place; they stay zero if no query has far keys.

    Args:
        layer: a layer whose scales are zero.
        targets: queries and keys of the frozen layer for all tokens.
    """
    check_parts(layer.hybrid, NEAR | ROUTED | SCALED | HEADS, "start of the scales")
    mixer = layer.map_mixer
    window, size = mixer.form(targets.scaling), layer.shape.head_dim
    assert window is not None
    key_heads, groups = layer.shape.key_heads, layer.shape.heads // layer.shape.key_heads
    unknowns = groups * (size + 1) + size
    moments = torch.zeros(key_heads, unknowns, unknowns, dtype=torch.float64)
    right = torch.zeros(key_heads, unknowns, dtype=torch.float64)
    for x, seen, scores, products, total in _blocks(layer, targets, replace(window, exact_keys=0)):
        keys, weights = seen[:, :, None], (scores - total).exp()
        errors = weights * torch.where(weights > 0, scores - products, 0.0)
        of_queries = x.transpose(-1, -2) @ (weights.sum(dim=-1, keepdim=True) * x)
        crossed = x.transpose(-1, -2) @ (weights @ keys)
        of_keys = keys.transpose(-1, -2) @ (weights.sum(dim=(2, 3))[:, :, None, :, None] * keys)
        for g in range(groups):
            part = slice(g * (size + 1), (g + 1) * (size + 1))
            moments[:, part, part] += _summed(of_queries[:, :, g])
            moments[:, part, -size:] += _summed(crossed[:, :, g])
            moments[:, -size:, part] += _summed(crossed[:, :, g].transpose(-1, -2))
        moments[:, -size:, -size:] += _summed(of_keys[:, :, 0])
        right[:, :-size] += _summed((x.transpose(-1, -2) @ errors.sum(dim=-1, keepdim=True)).flatten(2))
        right[:, -size:] += _summed((errors.sum(dim=(2, 3))[:, :, None] @ seen)[:, :, 0])
    solved = _solve(moments, right)
    _add(layer, solved[:, :-size].reshape(-1, size + 1), solved[:, -size:])
    moments = torch.zeros(key_heads, groups, size + 1, size + 1, dtype=torch.float64)
    right = torch.zeros(key_heads, groups, size + 1, dtype=torch.float64)
    for x, _, scores, products, total in _blocks(layer, targets, window):
        logs = scores.logsumexp(dim=-1)
        mass = (logs - total[..., 0]).exp()
        wanted = torch.where(mass > 0, logs - products.logsumexp(dim=-1), 0.0)
        weighted = x * (mass * (1 - mass))[..., None]
        moments += _summed(weighted.transpose(-1, -2) @ x)
        right += _summed((weighted * wanted[..., None]).sum(dim=-2))
    _add(layer, _solve(moments, right).flatten(0, 1))


def _blocks(
    layer: LinearAttention, targets: Targets, window: Window
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Walk blocks of queries of b rows.

    Yields:
        The queries [b, K, G, C, D + 1], each with a 1 appended; the keys [b, K, S, D]; the scores s_ij of far keys and
        the kernel's log-weights of them, [b, K, G, C, S], -inf elsewhere and in heads that keep softmax; and the
        logsumexp of s_ij over all keys that a query sees [b, K, G, C, 1].
    """
    mixer = layer.map_mixer
    count = layer.shape.key_heads
    counts = targets.counting(mixer.heads).heads
    left_out = None if counts is None else ~counts.view(count, -1, 1, 1)
    for batch, tokens in pieces(targets.key_padding_mask):
        q, k = (take(x, batch, tokens) for x in (targets.q, targets.k))
        queries, keys = mixer.mapped(q, k, scaling=targets.scaling)
        assert queries.log_scale is not None and keys.log_scale is not None
        near = NearKeys(window, keys.log_scale, k, chooser(k))
        key_scale, every = keys.log_scale, max(1, q.shape[2] // QUERIES)
        some, phi_q, query_scale = (
            group_queries(side[:, :, every - 1 :: every], count)
            for side in (q, queries.phi, queries.log_scale[..., None])
        )
        for rows in all_rows(q, targets.causal, every):
            x, phi = (side[:, :, :, rows.part].float() for side in (some, phi_q))
            hidden = near.rows(rows.places, rows.seen, x.flatten(0, 1))
            hidden = hidden.unflatten(0, (-1, count)) if hidden.ndim == 4 else hidden
            seen, phi_k = (side[:, :, : rows.seen].float() for side in (k, keys.phi))
            scores = score_rows(some, k, rows, targets.scaling)
            if rows.visible is not None:
                hidden = hidden | ~rows.visible
            if left_out is not None:
                hidden = hidden | left_out
            total = scores.logsumexp(dim=-1, keepdim=True)
            products = (phi @ phi_k[:, :, None].transpose(-1, -2)).masked_fill_(hidden, 0.0)
            mean = products.sum(dim=-1, keepdim=True) / (~hidden).sum(dim=-1, keepdim=True).clamp(min=1)
            products = products.maximum(SMALL * mean).clamp(min=1e-30).log()
            products = products + query_scale[:, :, :, rows.part] + key_scale[:, :, None, None, : rows.seen]
            scores, products = (side.masked_fill(hidden, -torch.inf) for side in (scores, products))
            yield torch.cat([x, torch.ones_like(x[..., :1])], dim=-1), seen, scores, products, total


def _summed(values: Tensor) -> Tensor:
    """Add up rows [b, ...] in fp64."""
    return values.cpu().double().sum(dim=0)


def _solve(moments: Tensor, right: Tensor) -> Tensor:
    """Solve the normal equations [..., n, n] x = [..., n] with a ridge; x is 0 where both sides are 0."""
    ridge = (RIDGE * moments.diagonal(dim1=-2, dim2=-1).mean(dim=-1)).clamp(min=1e-12)
    identity = torch.eye(moments.shape[-1], dtype=moments.dtype)
    return torch.linalg.solve(moments + ridge[..., None, None] * identity, right)


def _add(layer: LinearAttention, of_queries: Tensor, of_keys: Tensor | None = None) -> None:
    """Add w and b [H, D + 1], and u [K, D], to the scales."""
    weight, bias, keys = _fitted(layer)
    weight += of_queries[:, :-1].to(weight)
    bias += of_queries[:, -1].to(bias)
    if of_keys is not None:
        keys += of_keys.to(keys)
