"""Candidates of a search: kernels with arguments, labelled as the user typed them, their plans and their modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.conversion.plan import replan
from linearize.core.errors import ConfigError
from linearize.core.options import parse_pairs
from linearize.core.registry import HYBRID, kernel_info, make_config
from linearize.kernel_search.config import CANDIDATES, REFERENCE
from linearize.modeling.plan import SOFTMAX, LayerPlan, Plan

Candidate = tuple[str, Mapping[str, object]]
"""A kernel's name and its arguments, which may include a window."""


def parse_candidate(text: str) -> Candidate:
    """Parse a candidate such as "hedgehog" or "luna:channels=4:window=32".

    Raises:
        ConfigError: for an unknown kernel or argument, a wrong value, or a preset.
    """
    name, *pairs = text.split(":")
    info = kernel_info(name)
    if info.preset is not None:
        raise ConfigError(
            f"candidates: {name!r} is a plan for all layers of a model, not a kernel of one; leave it out"
        )
    arguments = parse_pairs(pairs, f"candidates, in {text!r}")
    make_config(info, {key: value for key, value in arguments.items() if key not in HYBRID})
    return name, arguments


def parse_candidates(texts: Sequence[str], *, softmax: bool) -> dict[str, Candidate]:
    """Parse all candidates, by label.

    Args:
        texts: the candidates; "softmax" is ignored, as the budget determines whether layers may stay softmax.
        softmax: whether layers may stay softmax.

    Raises:
        ConfigError: for an invalid or duplicate candidate, or too few candidates to choose between.
    """
    candidates: dict[str, Candidate] = {}
    for label in map(str.strip, texts):
        if label in candidates:
            raise ConfigError(f"candidates: {label!r} is named twice; name it once")
        if label != SOFTMAX:
            candidates[label] = parse_candidate(label)
    if len(candidates) < 1 + (not softmax):
        got = f"one candidate ({next(iter(candidates))})" if candidates else "no candidate"
        raise ConfigError(
            f"candidates: got {got}, and nothing to choose between; name two or more, or convert with --kernel NAME"
        )
    return candidates


def windows_alone(candidates: Mapping[str, Candidate]) -> dict[str, Candidate]:
    """Return the candidates' windows without a kernel, as a kernel that does not improve on them only costs time."""
    windows: dict[str, Candidate] = {}
    for _, arguments in candidates.values():
        if "window" in arguments:
            alone = {name: arguments[name] for name in ("window", "sinks") if name in arguments}
            windows[":".join(["none", *(f"{name}={value}" for name, value in alone.items())])] = ("none", alone)
    return windows


@dataclass(frozen=True)
class Layout:
    """The plans of every candidate for every searched layer.

    Attributes:
        base: the plan whose converted layers are searched.
        layers: the searched layers by number, in order.
        labels: the candidates that can be chosen.
        plans: layer plans of every candidate and of the reference, by label and layer number.
        reference: the label that plans are compared with.
    """

    base: Plan
    layers: Mapping[int, LayerPlan]
    labels: tuple[str, ...]
    plans: Mapping[str, Mapping[int, LayerPlan]]
    reference: str

    def plan(self, choice: Sequence[str], reasons: Mapping[int, str]) -> Plan:
        """Return the plan of a choice: a label or "softmax" per layer; `reasons` say why layers stay softmax."""
        return self.base.with_layers(
            layer.bare(reason=reasons[number]) if label == SOFTMAX else self.plans[label][number]
            for (number, layer), label in zip(self.layers.items(), choice, strict=True)
        )


def lay_out(
    model: PreTrainedModel, base: Plan, texts: Sequence[str], *, softmax: int, max_length: int | None = None
) -> Layout:
    """Plan every candidate for every searched layer.

    Args:
        model: the model.
        base: a plan whose converted layers are searched.
        texts: candidates; default ones that do not fit the model are left out.
        softmax: number of layers that may stay softmax.
        max_length: longest input of the result, for kernels that depend on it.

    Raises:
        ConfigError: if a requested candidate does not fit the model, there are too few to choose between, or all
            layers may stay softmax.
    """
    asked = parse_candidates(texts, softmax=softmax > 0)
    candidates = {**asked, **windows_alone(asked)}
    layers = {layer.index: layer for layer in base.converted if layer.index is not None}
    if softmax >= len(layers):
        raise ConfigError(
            f"search: got {len(layers)} layers to search, of which {softmax} may stay softmax; expected at least one "
            "that must become linear; lower the budget's softmax=N, or search more layers"
        )
    plans: dict[str, dict[int, LayerPlan]] = {}
    for label, candidate in {**candidates, REFERENCE: (REFERENCE, {})}.items():
        try:
            planned = replan(model, base, dict.fromkeys(layers, candidate), max_length=max_length)
        except ConfigError as error:
            if label in asked and tuple(texts) != CANDIDATES:
                raise ConfigError(f"candidates: {label!r} does not fit this model: {error}") from error
            continue
        plans[label] = {layer.index: layer for layer in planned.converted if layer.index is not None}
    labels = tuple(label for label in plans if label in candidates)
    if len(labels) < 1 + (not softmax):
        raise ConfigError("candidates: fewer than two of them fit this model; name others with --candidates")
    return Layout(base, layers, labels, plans, REFERENCE if REFERENCE in plans else labels[0])


Key = tuple[int, str]
"""Number of a layer and label of a candidate."""


class Candidates:
    """Every candidate of every layer as a module, with the layer of the frozen model that provides its q, k and v.

    Attributes:
        hosts: the searched layers of the frozen model, by number.
        modules: the candidates, by layer number and label.
    """

    def __init__(self, layout: Layout, model: PreTrainedModel, device: torch.device) -> None:
        attentions = linear_attentions(model.base_model)
        self.hosts = {number: attentions[layer.module] for number, layer in layout.layers.items()}
        self.number_of = {id(host): number for number, host in self.hosts.items()}
        self.modules: dict[Key, LinearAttention] = {}
        for label, plans in layout.plans.items():
            for number, layer in plans.items():
                module = LinearAttention(*layer.mixer)
                module.reset_parameters(layout.base.seed + number)
                self.modules[number, label] = module.to(device).eval().requires_grad_(False)

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of all candidates by name, detached but not copied."""
        return {
            f"{number}/{label}.{name}": tensor
            for (number, label), module in self.modules.items()
            for name, tensor in module.state_dict().items()
        }
