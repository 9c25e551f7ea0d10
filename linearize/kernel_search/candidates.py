"""Candidates: kernels with arguments by a label that people type, and what each would be in every layer of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedModel

from linearize.errors import ConfigError
from linearize.kernel_search.config import CANDIDATES, REFERENCE
from linearize.modeling.plan import SOFTMAX, LayerPlan, Plan
from linearize.options import parse_pairs
from linearize.registry import HYBRID, kernel_info, make_config
from linearize.surgery.plan import replan


@dataclass(frozen=True)
class Candidate:
    """A kernel with its arguments.

    Attributes:
        label: as it was typed, such as "hedgehog:tied=false".
        kernel: its name.
        arguments: its arguments, a window among them.
    """

    label: str
    kernel: str
    arguments: Mapping[str, object] = field(default_factory=dict)


def parse_candidate(text: str) -> Candidate:
    """Read "hedgehog" or "luna:channels=4:window=32".

    Raises:
        ConfigError: for an unknown kernel or argument, a wrong value, or a preset.
    """
    name, *pairs = text.strip().split(":")
    info = kernel_info(name)
    if info.preset is not None:
        raise ConfigError(
            f"candidates: {name!r} is a plan for all layers of a model, not a kernel of one; leave it out"
        )
    arguments = parse_pairs(pairs, f"candidates, in {text.strip()!r}")
    make_config(info, {key: value for key, value in arguments.items() if key not in HYBRID})
    return Candidate(text.strip(), name, arguments)


def parse_candidates(texts: Sequence[str], *, softmax: bool) -> list[Candidate]:
    """Read all candidates.

    Args:
        texts: one each; "softmax" is passed over, as the budget says whether layers may stay softmax.
        softmax: whether they may.

    Raises:
        ConfigError: for one that is not right, two that are alike, or nothing to choose between.
    """
    found = [parse_candidate(text) for text in texts if text.strip() != SOFTMAX]
    labels = [one.label for one in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"candidates: {label!r} is named twice; name it once")
    if not found or (len(found) == 1 and not softmax):
        got = f"one candidate ({labels[0]})" if found else "no candidate"
        raise ConfigError(
            f"candidates: got {got}, and nothing to choose between; name two or more, or convert with --kernel NAME"
        )
    return found


@dataclass(frozen=True)
class Layout:
    """What every candidate would be in every layer that is searched.

    Attributes:
        base: the plan whose converted layers are searched.
        layers: those layers, in their order, by their number.
        candidates: what can be chosen.
        plans: of every candidate, and of the reference, each layer's plan by label and number.
        reference: the label of what plans are compared with.
    """

    base: Plan
    layers: tuple[LayerPlan, ...]
    candidates: tuple[Candidate, ...]
    plans: Mapping[str, Mapping[int, LayerPlan]]
    reference: str

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of what can be chosen."""
        return tuple(one.label for one in self.candidates)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the layers."""
        return tuple(number_of(layer) for layer in self.layers)

    def plan(self, choice: Sequence[str], reasons: Mapping[int, str] | None = None) -> Plan:
        """Return the plan of a choice: one label per layer, or "softmax"."""
        wanted = dict(zip(self.numbers, choice, strict=True))
        layers = []
        for layer in self.base.layers:
            label = None if layer.index is None else wanted.get(layer.index)
            if label == SOFTMAX:
                reason = (reasons or {}).get(number_of(layer), "kept by the search")
                layer = layer.bare(reason=reason)
            elif label is not None:
                layer = self.plans[label][number_of(layer)]
            layers.append(layer)
        return replace(self.base, layers=tuple(layers))


def number_of(layer: LayerPlan) -> int:
    """Return the number of a layer that can be converted."""
    assert layer.index is not None
    return layer.index


def lay_out(
    model: PreTrainedModel,
    base: Plan,
    texts: Sequence[str],
    *,
    softmax: bool,
    max_length: int | None = None,
    arguments: Mapping[str, Mapping[int, Mapping[str, object]]] | None = None,
) -> Layout:
    """Plan every candidate for every layer that is searched.

    Args:
        model: the model.
        base: a plan whose converted layers are searched.
        texts: candidates; of the default ones those that cannot serve the model are left out.
        softmax: whether layers may stay softmax.
        max_length: longest input that the result shall take, for kernels that depend on it.
        arguments: further arguments by candidate and layer, such as widths.

    Raises:
        ConfigError: if a candidate that was asked for cannot serve the model, or there is nothing to choose between.
    """
    asked = tuple(texts) != CANDIDATES
    found = parse_candidates(texts, softmax=softmax)
    layers = base.converted
    plans: dict[str, dict[int, LayerPlan]] = {}
    kept: list[Candidate] = []
    for one in [*found, Candidate(REFERENCE, REFERENCE)]:
        if one.label in plans:
            continue
        own = (arguments or {}).get(one.label, {})
        wanted = {
            number_of(layer): (one.kernel, {**one.arguments, **own.get(number_of(layer), {})}) for layer in layers
        }
        try:
            made = replan(model, base, wanted, max_length=max_length)
        except ConfigError as error:
            if one in found and asked:
                raise ConfigError(f"candidates: {one.label!r} cannot serve this model: {error}") from error
            continue
        plans[one.label] = {number_of(layer): layer for layer in made.converted if number_of(layer) in wanted}
        kept += [one] if one in found else []
    if len(kept) < 1 + (not softmax):
        raise ConfigError("candidates: fewer than two of them can serve this model; name others with --candidates")
    reference = REFERENCE if REFERENCE in plans else kept[0].label
    return Layout(base, layers, tuple(kept), plans, reference)
