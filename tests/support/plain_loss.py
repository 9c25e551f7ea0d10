"""Stage one's loss of one layer on one document, written out with T x T weights in fp64: the reference of the matrix.

It shares only the kernel's own modules (map, inputs, output) with the code that it checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

KNEE, TINY = 1e-2, 1e-30


def plain_loss(
    mixer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    asked: Sequence[int],
    *,
    scaling: float,
    output: bool,
    penalty: float | None,
    inputs: Any = None,
) -> tuple[Tensor, int]:
    """Return the sum of the loss over the asked queries and the kernel's heads, and their number.

    Args:
        mixer: the layer's mixer; the result has a gradient to its parameters.
        q: [H, T, D] of one document, without padding.
        k: [K, T, D].
        v: [K, T, V].
        asked: the places of the queries that count.
        scaling: factor of the scores.
        output: whether to return the squared error of the outputs, or else the cross-entropy of the weights.
        penalty: weight of the negative mass; None for positive maps.
        inputs: the module before the map, with the statistics before the step, or None.
    """
    heads, tokens, groups = q.shape[0], q.shape[1], q.shape[0] // k.shape[0]
    places = torch.arange(tokens)
    visible = places[:, None] >= places if mixer.shape.causal else torch.ones(tokens, tokens, dtype=torch.bool)
    key_of = [head // groups for head in range(heads)]
    scores = scaling * q.double() @ k[key_of].double().mT
    target = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    weights, sums, logs = plain_weights(mixer, scores, visible, q, k, scaling, inputs)
    total, count = torch.zeros((), dtype=torch.float64), 0
    kept = set(mixer.hybrid.softmax_heads)
    out = mixer.apply_output((weights @ v[key_of].double() / sums)[None].float())[0].double() if output else None
    for head in range(heads):
        if head in kept:
            continue
        wanted = target[head] @ v[key_of[head]].double()
        for place in asked:
            count += 1
            if out is not None:
                total = total + (out[head, place] - wanted[place]).square().sum() * tokens / wanted.square().sum()
            elif penalty is None:
                row = logs[head, place, visible[place]] - weights[head, place].sum().clamp(min=TINY).log()
                total = total - (target[head, place, visible[place]] * row).sum()
            else:
                row = weights[head, place, visible[place]]
                total = total + signed(row, target[head, place, visible[place]], penalty)
    return total, count


def plain_weights(
    mixer: Any, scores: Tensor, visible: Tensor, q: Tensor, k: Tensor, scaling: float, inputs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights [H, T, T], what the kernel divides their rows by [H, T, 1], and the weights' logarithms."""
    if hasattr(mixer, "blocks"):
        block = torch.arange(len(visible)) // mixer.blocks.size
        visible = visible & (block[:, None] == block)
        relu = scores.relu().masked_fill(~visible, 0.0)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) if mixer.blocks.softmax else relu
        return weights, torch.ones_like(scores[..., :1]), weights
    products, exponents, sizes = kernel_terms(mixer, scaling, q, k, inputs)
    far = products * exponents.exp()
    judged = largest_channels(q, 8) @ k.double().repeat_interleave(len(q) // len(k), 0).mT
    near = near_keys(mixer, exponents, visible, judged)
    weights = torch.where(near, scores.exp(), far).masked_fill(~visible, 0.0)
    # The logarithm of a weight that is almost zero is cut off and has no slope.
    logs = products.clamp(min=TINY).log() + torch.where(products > TINY, exponents, exponents.detach())
    logs = torch.where(near, scores, logs)
    if not mixer.keys.normalize:
        return weights, torch.ones_like(scores[..., :1]), logs
    sums = weights.sum(dim=-1, keepdim=True)
    if mixer.hybrid.window is None and mixer.keys.floor:
        least = mixer.keys.floor * (sizes * exponents.exp()).masked_fill(~visible, 0.0).sum(dim=-1, keepdim=True)
        sums = torch.where(sums.abs() < least.detach(), torch.where(sums < 0, -1.0, 1.0) * least.detach(), sums)
    return weights, sums.clamp(min=TINY) if mixer.positive else sums, logs


def kernel_terms(mixer: Any, scaling: float, q: Tensor, k: Tensor, inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return phi(q_i) . phi(k_j), a_i + c_j, and the products of the features' magnitudes, all [H, T, T]."""
    heads, tokens, groups = q.shape[0], q.shape[1], q.shape[0] // k.shape[0]
    x, y, places = q.float()[None], k.float()[None], torch.arange(tokens)[None].float()
    if inputs is not None:
        x, y = inputs(x, y, None)
    factor = scaling**0.5 if mixer.keys.scale_inputs else 1.0
    keys = mixer.keys.forward_keys(y * factor, places)
    if mixer.queries is not None:
        sides = [mixer.queries.forward_queries(x * factor, places)]
        order = list(range(heads))
    else:
        # Query head h of group g has the map of its key head: all heads with the same place in their group at once.
        sides = [mixer.keys.forward_queries(x[:, g::groups] * factor, places) for g in range(groups)]
        order = [g * len(k) + head for head in range(len(k)) for g in range(groups)]
    phi = torch.cat([side.phi[0] for side in sides])[order].double()
    phi_k = keys.phi[0].double().repeat_interleave(groups, dim=0)
    a = torch.zeros(heads, tokens, dtype=torch.float64)
    c = torch.zeros(len(k), tokens, dtype=torch.float64)
    if keys.log_scale is not None:
        c = c + keys.log_scale[0]
        a = a + torch.cat([side.log_scale[0] for side in sides])[order]
    if mixer.key_scale is not None:
        c = c + learned(mixer.key_scale, y[0])
    if mixer.query_scale is not None:
        a = a + learned(mixer.query_scale, x[0])
    if mixer.hybrid.trained_length is not None:
        a = a - 2 * ((places[0] + 1) / mixer.hybrid.trained_length).clamp(min=1.0).log()
    exponents = a[:, :, None] + c.repeat_interleave(groups, dim=0)[:, None]
    return phi @ phi_k.mT, exponents, phi.abs() @ phi_k.abs().mT


def learned(scale: Any, x: Tensor) -> Tensor:
    """Return w . x + b + sum_i o_i tanh(h_i . x + g_i), [H, T] of x [H, T, D]."""
    result = torch.einsum("hd,htd->ht", scale.weight, x)
    if scale.bias is not None:
        result = result + scale.bias[:, None]
    if scale.hidden is None:
        return result
    units = torch.tanh(torch.einsum("hud,htd->htu", scale.hidden, x) + scale.hidden_bias[:, None])
    return result + torch.einsum("hu,htu->ht", scale.out, units)


@torch.no_grad()
def largest_channels(q: Tensor, count: int) -> Tensor:
    """Return queries [H, T, D] in fp64, zero but for the channels of largest magnitude."""
    return q.double() * (q.abs() >= q.abs().sort(dim=-1).values[..., -min(count, q.shape[-1]), None])


def near_keys(mixer: Any, exponents: Tensor, visible: Tensor, scores: Tensor) -> Tensor:
    """Return which keys get softmax's score, [H, T, T]: those of the window, sinks, exact keys and routed blocks.

    Blocks are chosen by the scores [H, T, T].
    """
    hybrid, causal = mixer.hybrid, mixer.shape.causal
    near = torch.zeros(exponents.shape, dtype=torch.bool)
    if hybrid.window is None:
        return near
    for head, rows in enumerate(exponents):
        for i, row in enumerate(rows):
            seen = visible[i].nonzero()[:, 0].tolist()
            window = [j for j in seen if (i - j < hybrid.window if causal else abs(i - j) <= hybrid.window // 2)]
            near[head, i, window] = True
            rest = [j for j in seen if j >= hybrid.sinks and not (causal and j in window)]
            best = sorted(rest, key=(-row).tolist().__getitem__)[: hybrid.exact_keys]
            near[head, i, [j for j in seen if j < hybrid.sinks] + best] = True
            if head in (hybrid.routed_heads or range(len(exponents))):
                near[head, i, looked_up(hybrid, set(seen) - set(window), scores[head, i])] = True
    return near


def looked_up(hybrid: Any, far: set[int], scores: Tensor) -> list[int]:
    """Return the keys of the blocks that a row looks up, given the keys outside its window and scores of all [T]."""
    count, size = hybrid.blocks
    blocks = [range(first, min(first + size, len(scores))) for first in range(0, len(scores), size)]
    candidates = [block for block in blocks if far & set(block) and block[-1] >= hybrid.sinks]
    best = sorted(candidates, key=lambda block: -float(scores[list(block)].max()))[:count]
    return [j for block in best for j in block]


def signed(row: Tensor, target: Tensor, penalty: float) -> Tensor:
    """Return the loss of one row of weights that can be negative [S]."""
    mass, size = row.clamp(min=0.0).sum(), row.detach().abs().sum()
    least = KNEE * size
    z = torch.maximum(mass, least)
    knee = least / len(row)
    logs = torch.where(row > knee, row.clamp(min=1e-300).log(), knee.log() + (row - knee) / knee)
    return z.log() + penalty * (-row).clamp(min=0.0).sum() / z - (target * logs).sum()
