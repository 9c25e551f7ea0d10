"""Choose the query heads that stay softmax: those with the largest shares in a conversion's error.

Copying and retrieval look up one token, which a sum over all tokens cannot do; few heads do it (2 % of the heads carry
more than 95 % of retrieval: 2602.11374). All heads are moved from softmax to their window together, and the error along
the way is divided among them by integrated gradients (Sundararajan et al. 2017, https://arxiv.org/abs/1703.01365,
eq. 1): the shares add up to the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions, observed
from linearize.attention.layer import LinearAttention
from linearize.conversion.plan import change_hybrids
from linearize.core.errors import ConfigError
from linearize.fidelity.ablate import without_kernel
from linearize.fidelity.teacher import last_states, softmax_heads_output
from linearize.modeling.model import evaluating
from linearize.modeling.plan import Plan

POINTS = 4
"""Steps between softmax and the window."""

ROWS, TOKENS = 2, 512
"""Most rows of a batch, and tokens of a causal model's row, that the heads are chosen on: every point is a backward."""


def shortened(batch: Mapping[str, Tensor], causal: bool) -> dict[str, Tensor]:
    """Return the first rows of a batch; those of a causal model end after `TOKENS` tokens."""
    rows = {name: value[:ROWS] for name, value in batch.items()}
    return {name: x[:, :TOKENS] if causal and x.ndim == 2 else x for name, x in rows.items()}


def repeated(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return rows whose second half repeats the first, which a model must copy; padded rows are unchanged."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or ids.shape[1] < 4 or (mask is not None and not bool(mask.all())):
        return dict(batch)
    half = ids[:, : ids.shape[1] // 2]
    twice = torch.cat([half, half], dim=1)
    return {"input_ids": twice} | ({} if mask is None else {"attention_mask": torch.ones_like(twice)})


def head_shares(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the shares of the heads in the error that a conversion without trained kernels makes.

    Args:
        model: a converted model; it is unchanged afterwards. A layer with a window is judged by its window alone.
        batches: model inputs; they are moved to the model's device.

    Returns:
        [H] per converted layer, by its host module. They add up to the squared relative error of the last hidden state.

    Raises:
        ConfigError: if the model returns no hidden states.
    """
    layers = linear_attentions(model)
    device = next(model.parameters()).device
    shares = {name: torch.zeros(layer.shape.heads, dtype=torch.float64) for name, layer in layers.items()}
    names = {id(layer): name for name, layer in layers.items()}
    restores = [restore for layer in layers.values() if (restore := without_kernel(layer)) is not None]
    power = 0.0
    try:
        with evaluating(model), torch.enable_grad():
            for batch in batches:
                batch = {name: value.to(device) for name, value in batch.items()}
                with torch.no_grad(), observed(model, lambda *_: None):
                    wanted = _states(model, batch)
                power += float(wanted.square().sum())
                for point in range(POINTS):
                    gates = {
                        name: torch.full((len(share),), (point + 0.5) / POINTS, device=device, requires_grad=True)
                        for name, share in shares.items()
                    }

                    def mix(
                        layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
                    ) -> Tensor:
                        gate = gates[names[id(layer)]][:, None, None]  # noqa: B023
                        softmax = softmax_heads_output(layer, q, k, v, mask, scaling)
                        return torch.lerp(softmax, layer(q, k, v, mask, scaling), gate.to(v.dtype))

                    with observed(model, mix):
                        error = (_states(model, batch) - wanted).square().sum()
                    grads = torch.autograd.grad(error, list(gates.values()))
                    for share, grad in zip(shares.values(), grads, strict=True):
                        share += grad.double().cpu() / POINTS
    finally:
        for restore in restores:
            restore()
    return {name: share / max(power, 1e-30) for name, share in shares.items()}


def keep_heads(model: PreTrainedModel, plan: Plan, count: int, batches: Iterable[Mapping[str, Tensor]]) -> Plan:
    """Keep the heads with the largest shares in the error as softmax, in place, and return the changed plan.

    Args:
        model: a converted model.
        plan: its plan.
        count: how many heads.
        batches: model inputs, of which `shortened` takes a part; of causal models also rows with repeated halves.

    Raises:
        ConfigError: if layers that can keep heads have fewer of them, or the model returns no hidden states.
    """
    causal = any(layer.shape.causal for layer in plan.converted)
    batches = [shortened(batch, causal) for batch in batches]
    if causal:
        batches += [repeated(batch) for batch in batches]
    can_keep = {layer.module for layer in plan.converted if hasattr(_layer(model, layer.module).mixer, "softmax_heads")}
    shares = head_shares(model, batches)
    ranked = sorted(
        ((float(share), name, head) for name, of in shares.items() for head, share in enumerate(of)), reverse=True
    )
    ranked = [entry for entry in ranked if _module(model, entry[1]) in can_keep]
    if count > len(ranked):
        raise ConfigError(f"keep-softmax-heads: got {count}, but the converted layers have {len(ranked)} heads")
    chosen: dict[str, list[int]] = {}
    for _, name, head in ranked[:count]:
        chosen.setdefault(_module(model, name), []).append(head)
    kept = {
        layer.module: replace(layer.hybrid, softmax_heads=tuple(sorted(chosen[layer.module])))
        for layer in plan.converted
        if layer.module in chosen
    }
    return change_hybrids(model, kept)


def _layer(model: PreTrainedModel, module: str) -> Any:
    return model.base_model.get_submodule(f"{module}.linear_attention")


def _module(model: PreTrainedModel, name: str) -> str:
    """Return a host module's name in a plan, which starts at the base model."""
    prefix = f"{model.base_model_prefix}."
    return name.removeprefix(prefix) if model.base_model is not model else name


def _states(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    states = last_states(model, batch)
    if states is None:
        raise ConfigError(
            "keep-softmax-heads: the model returns no hidden states to judge heads by; name heads, such as 4:0,11:7"
        )
    return states.float()
