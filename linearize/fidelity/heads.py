"""Choose the query heads that keep softmax: those with the largest shares in the error of a conversion.

Copying and retrieval look up a single token, which a sum over all tokens cannot do; few heads do this (2 % of the heads
carry more than 95 % of retrieval: https://arxiv.org/abs/2602.11374). All heads move together, step by step, from
softmax to their window. Integrated gradients (Sundararajan et al. 2017, https://arxiv.org/abs/1703.01365, eq. 1) along
this path divide the error among the heads: the shares add up to the error.

Heads look up at different distances, even those that share a key head. So the error is also divided on a row as long as
those to train on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from linearize.attention.interface import linear_attentions, observed
from linearize.attention.layer import LinearAttention, Mask
from linearize.attention.parts import HEADS, NEAR, ROUTED, SCALED, check_parts
from linearize.conversion.plan import change_hybrids
from linearize.core.errors import ConfigError
from linearize.core.events import Advanced, Callback, Started, ignore
from linearize.core.registry import kernel_info
from linearize.fidelity.ablate import changed, undone, without_kernel
from linearize.fidelity.teacher import Batch, last_states, softmax_heads_output
from linearize.modeling.model import evaluating
from linearize.modeling.plan import Plan
from linearize.modeling.weights import device_of

POINTS = 4
"""Number of steps from softmax to the window."""

WINDOWS = 8
"""Windows are narrowed so that a row has at least this many: in a row of two windows, few heads look beyond theirs."""

ROWS, TOKENS = 2, 512
"""Most rows per batch, and tokens per row of a causal model, used for the choice: every step needs a backward pass."""

LONGEST, SEGMENT = 4_096, 32
"""Most tokens of the one long row of a causal model, and tokens of the segments that it repeats."""


def shortened(batch: Batch, causal: bool) -> dict[str, Tensor]:
    """Return the first `ROWS` rows of a batch; for a causal model, fields [B, T] are cut to `TOKENS` tokens."""
    rows = {name: value[:ROWS] for name, value in batch.items()}
    return {name: x[:, :TOKENS] if causal and x.ndim == 2 else x for name, x in rows.items()}


def repeated(batch: Batch, segment: int | None = None) -> dict[str, Tensor]:
    """Return rows [B, T] whose second half repeats the first, so that a model must copy; padded rows are unchanged.

    With `segment`, the second half has the segments of that many tokens in reverse order, so that distances vary.
    """
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or ids.shape[1] < 4 or (mask is not None and not bool(mask.all())):
        return dict(batch)
    half = ids[:, : ids.shape[1] // 2]
    again = half if segment is None else torch.cat(half.split(segment, dim=1)[::-1], dim=1)
    twice = torch.cat([half, again], dim=1)
    return {"input_ids": twice} | ({} if mask is None else {"attention_mask": torch.ones_like(twice)})


def longest_row(batch: Batch) -> dict[str, Tensor]:
    """Return the longest row [1, T] of a batch of texts without its padding, up to `LONGEST` tokens; {} for images."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None:
        return {}
    longest = 0 if mask is None else int(mask.sum(dim=1).argmax())
    row = ids[longest] if mask is None else ids[longest, mask[longest].bool()]
    return {"input_ids": row[None, :LONGEST]}


@contextmanager
def recomputed(model: PreTrainedModel) -> Iterator[None]:
    """Keep no activations of the model's blocks: the backward pass computes them again.

    Gradient checkpointing of transformers needs training mode, with its dropout.
    """
    with ExitStack() as undo:
        for block in (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)):
            # Accelerate's hooks replace `forward` of the instance.
            undo.callback(vars(block).update, {name: x for name, x in vars(block).items() if name == "forward"})
            undo.callback(delattr, block, "forward")
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield


def head_shares(
    model: PreTrainedModel, batches: Sequence[Batch], on_event: Callback = ignore, points: int = POINTS
) -> dict[str, Tensor]:
    """Return the share of each head in the error of a conversion whose kernels are untrained.

    Args:
        model: a converted model; it is unchanged afterwards. Layers with a window are judged by the window alone.
        batches: model inputs; they are moved to the model's device.
        on_event: called with `Advanced` after every step.
        points: number of steps from softmax to the window.

    Returns:
        [H] per converted layer, by its module in the plan. The shares add up to the squared relative error of the last
        hidden state.

    Raises:
        ConfigError: if the model returns no hidden states.
    """
    layers = linear_attentions(model.base_model)
    for layer in layers.values():
        check_parts(layer.hybrid, NEAR | ROUTED | SCALED | HEADS, "keep-softmax-heads")
    device = device_of(model)
    shares = {name: torch.zeros(layer.shape.heads, dtype=torch.float64) for name, layer in layers.items()}
    names = {id(layer): name for name, layer in layers.items()}
    power = 0.0
    with undone(map(without_kernel, layers.values())), evaluating(model), recomputed(model), torch.enable_grad():
        for number, batch in enumerate(batches):
            batch = {name: value.to(device) for name, value in batch.items()}
            with torch.no_grad(), observed(model, lambda *_: None):
                wanted = _states(model, batch)
            power += float(wanted.square().sum())
            for point in range(points):
                gates = {
                    name: torch.full((len(share),), (point + 0.5) / points, device=device, requires_grad=True)
                    for name, share in shares.items()
                }

                def mix(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scaling: float) -> Tensor:
                    gate = gates[names[id(layer)]][:, None, None]  # noqa: B023
                    softmax = softmax_heads_output(layer, q, k, v, mask, scaling)
                    return torch.lerp(softmax, layer(q, k, v, mask, scaling), gate.to(v.dtype))

                with observed(model, mix):
                    error = (_states(model, batch) - wanted).square().sum()
                    # Texts leave the layers of a model's other part, which reads images, without a gradient.
                    grads = torch.autograd.grad(error, list(gates.values()), materialize_grads=True)
                for share, grad in zip(shares.values(), grads, strict=True):
                    share += grad.cpu().double() / points
                on_event(Advanced(number * points + point + 1, len(batches) * points))
    return {name: share / max(power, 1e-30) for name, share in shares.items()}


def too_many_heads(count: int, heads: int) -> ConfigError:
    """Return the error for more heads that keep softmax than there are."""
    return ConfigError(f"keep-softmax-heads: got {count}, but the converted layers have {heads} heads that can keep it")


def keep_heads(
    model: PreTrainedModel,
    plan: Plan,
    count: int,
    batches: Sequence[Batch],
    on_event: Callback = ignore,
    *,
    trained_on: Batch | None = None,
    points: int = POINTS,
) -> Plan:
    """Make the heads with the largest shares in the error keep softmax, in place, and return the changed plan.

    Args:
        model: a converted model.
        plan: its plan.
        count: number of heads.
        batches: model inputs (such as `input_ids` [B, T]), cut by `shortened`; for causal models, rows with repeated
            halves are added.
        on_event: called with `Started` for each length of rows, and `Advanced` after every step.
        trained_on: rows to train on. If the longest has over `TOKENS` tokens, a causal model also reads its first half,
            and that half's segments in reverse order.
        points: number of steps from softmax to the window; time is proportional to it.

    Raises:
        ConfigError: if there are fewer heads in layers that can keep heads, or the model returns no hidden states.
    """
    causal = any(layer.shape.causal for layer in plan.converted)
    short = [shortened(batch, causal) for batch in batches]
    groups = [short]
    if causal:
        groups = [short + [repeated(batch) for batch in short]]
        row = longest_row(trained_on or {})
        if row and row["input_ids"].shape[1] > TOKENS:
            groups.append([repeated(row, SEGMENT)])
    found = []
    for group in groups:
        tokens = max((x.shape[1] for batch in group for x in batch.values() if x.ndim == 2), default=None)
        rows = "" if tokens is None else f", rows of {tokens:,} tokens"
        on_event(Started(f"finding the heads that need softmax{rows}"))
        narrow = None if tokens is None else max(1, tokens // WINDOWS)
        windows = [(layer, layer.hybrid, layer.hybrid.window) for layer in linear_attentions(model).values()]
        with undone(
            changed(layer, replace(hybrid, window=min(width, narrow)))
            for layer, hybrid, width in windows
            if width and narrow
        ):
            found.append(head_shares(model, group, on_event, points))
    ranked: list[tuple[float, str, int]] = []
    for name, layer in linear_attentions(model.base_model).items():
        if kernel_info(layer.kernel).windowed:
            share = torch.stack([shares[name] for shares in found]).sum(dim=0)
            ranked += [(value, name, head) for head, value in enumerate(share.tolist())]
    ranked.sort(reverse=True)
    if count > len(ranked):
        raise too_many_heads(count, len(ranked))
    chosen: dict[str, list[int]] = {}
    for _, name, head in ranked[:count]:
        chosen.setdefault(name, []).append(head)
    kept = {
        layer.module: replace(layer.hybrid, softmax_heads=tuple(sorted(chosen[layer.module])))
        for layer in plan.converted
        if layer.module in chosen
    }
    return change_hybrids(model, kept)


def _states(model: PreTrainedModel, batch: Batch) -> Tensor:
    states = last_states(model, batch)
    if states is None:
        raise ConfigError(
            "keep-softmax-heads: the model returns no hidden states to compare; name the heads, such as 4:0,11:7"
        )
    return states.float()
