"""How many features each layer gets of a total: its share by the effective rank of its queries and keys.

The effective rank (Roy and Vetterli 2007) of vectors with covariance eigenvalues l_i is exp(H(l / sum l)), with H the
entropy: how many directions they really have. Degrees of freedom for the width of each layer: arXiv 2507.03340.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import observed
from linearize.attention.layer import LinearAttention
from linearize.errors import ConfigError
from linearize.kernel_search.candidates import number_of, parse_candidate
from linearize.modeling.plan import SOFTMAX, Plan
from linearize.registry import HYBRID, KernelInfo, kernel_info, make_config
from linearize.teacher.observe import run_body, softmax_output

ARGUMENTS = ("features", "frequencies", "channels")
"""Arguments by which kernels are told how many features they have, features being a multiple of them."""
STEP = 8
"""Widths are multiples of so many features, as far as a kernel has them."""


@torch.no_grad()
def effective_ranks(
    model: PreTrainedModel,
    hosts: Mapping[int, LinearAttention],
    batches: Iterable[Mapping[str, Tensor]],
    accelerator: Accelerator,
) -> dict[int, float]:
    """Return for each layer the effective rank of its queries and keys, as a mean over heads.

    Args:
        model: the frozen model.
        hosts: its layers by number.
        batches: held-out data.
        accelerator: says the device.
    """
    number_of_host = {id(host): number for number, host in hosts.items()}
    second: dict[int, Tensor] = {}

    def observe(
        layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        number = number_of_host[id(layer)]
        keep = torch.ones_like(k[:, 0, :, 0], dtype=torch.float32) if mask is None else mask.float()
        found = [_second_moment(x, keep) for x in (q, k)]
        both = torch.cat(found).double().cpu()
        second[number] = second[number] + both if number in second else both
        return softmax_output(layer, q, k, v, mask, scaling) if layer.shape.causal else None

    with observed(model, observe):
        for batch in batches:
            run_body(model, {name: x.to(accelerator.device) for name, x in batch.items()})
    return {
        number: float(torch.stack([effective_rank(one) for one in found]).mean()) for number, found in second.items()
    }


def _second_moment(x: Tensor, keep: Tensor) -> Tensor:
    """Return the sums of x x^T over tokens, per head: x [B, H, T, D], keep [B, T] -> [H, D, D]."""
    x = x.float() * keep[:, None, :, None]
    return torch.einsum("bhtd,bhte->hde", x, x)


def effective_rank(moment: Tensor) -> Tensor:
    """Return exp of the entropy of a second moment's [D, D] eigenvalues, between 1 and D."""
    values = torch.linalg.eigvalsh(moment).clamp(min=0)
    shares = values / values.sum().clamp(min=1e-30)
    return torch.exp(-(shares * shares.clamp(min=1e-30).log()).sum())


def share_out(ranks: Mapping[int, float], mean: int, step: int = STEP) -> dict[int, int]:
    """Share `mean` features per layer out by rank, in multiples of `step`, at least one each; the total is kept.

    What is left over by rounding goes to the layers that lost most by it.
    """
    total = max(len(ranks), round(mean * len(ranks) / step))
    whole = sum(ranks.values())
    exact = {n: total * rank / whole for n, rank in ranks.items()}
    found = {n: max(1, int(x)) for n, x in exact.items()}
    while sum(found.values()) < total:
        n = max(found, key=lambda n: (exact[n] - found[n], -n))
        found[n] += 1
    while sum(found.values()) > total:
        n = min((n for n in found if found[n] > 1), key=lambda n: (exact[n] - found[n], n))
        found[n] -= 1
    return {n: count * step for n, count in found.items()}


def width_argument(info: KernelInfo, given: Mapping[str, object]) -> tuple[str, int] | None:
    """Return the argument that sets a kernel's features, and the features per unit of it; None where there is none."""
    known = {field.name for field in dataclasses.fields(info.config)}
    names = [x for x in ARGUMENTS if x in known and x not in given]
    if not names or info.feature_dim is None:
        return None
    one, two = (info.feature_dim(make_config(info, {**given, names[0]: n}), 64) for n in (STEP, 2 * STEP))
    return (names[0], one // STEP) if two == 2 * one and one % STEP == 0 else None


def width_arguments(
    texts: Sequence[str], base: Plan, ranks: Mapping[int, float], mean: int
) -> dict[str, dict[int, dict[str, object]]]:
    """Return for every candidate whose width can be chosen its argument per layer.

    Args:
        texts: candidates; one whose width is given keeps it.
        base: the plan whose converted layers are searched.
        ranks: by layer number.
        mean: features per head, as a mean over the layers.

    Raises:
        ConfigError: if no candidate's width can be chosen.
    """
    widths = share_out({number_of(layer): ranks[number_of(layer)] for layer in base.converted}, mean)
    found: dict[str, dict[int, dict[str, object]]] = {}
    for text in texts:
        if text.strip() == SOFTMAX:
            continue
        one = parse_candidate(text)
        own = {key: value for key, value in one.arguments.items() if key not in HYBRID}
        named = width_argument(kernel_info(one.kernel), own)
        if named is not None:
            found[one.label] = {n: {named[0]: max(1, round(width / named[1]))} for n, width in widths.items()}
    if not found:
        raise ConfigError(
            "widths: no candidate's number of features can be chosen; add one such as hedgehog, flexformer_n or t2r, "
            "or leave --widths out"
        )
    return found
