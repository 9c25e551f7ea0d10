"""What a checkpoint says of how its kernels were chosen: by a search, or by a plan in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MOST_POINTS = 8
"""Plans that are shown of those that a search has tried."""


@dataclass(frozen=True)
class PlanPoint:
    """One plan that a search has tried.

    Attributes:
        name: what it is.
        kernels: how many layers have which.
        error: of the whole model against its original.
        share: of softmax's time that its attentions take.
        efficient: whether nothing that was tried is closer and cheaper.
    """

    name: str
    kernels: str
    error: float
    share: float
    efficient: bool


def points(provenance: Mapping[str, object]) -> list[PlanPoint]:
    """Return the plan, the one that it is compared with, softmax, and others that nothing beats; the plan first."""
    searched = mapping(provenance.get("search"))
    named = ("softmax everywhere", f"{searched.get('reference')} everywhere")
    found = []
    for one in _mappings(searched.get("points")):
        name, error, share = str(one.get("name")), number(one.get("error")), number(one.get("share"))
        efficient = one.get("efficient") is True
        if error is not None and share is not None and (efficient or name in named or name.startswith("the plan")):
            found.append(PlanPoint(name, str(one.get("kernels")), error, share, efficient))
    # Of many the named ones stay.
    found.sort(key=lambda one: (not one.name.startswith("the plan"), one.name not in named))
    return sorted(found[:MOST_POINTS], key=lambda one: (not one.name.startswith("the plan"), one.share))


def sentence(provenance: Mapping[str, object]) -> str:
    """Say what a search was asked for; empty where none chose the kernels."""
    searched = mapping(provenance.get("search"))
    limit, length = number(searched.get("limit")), searched.get("length")
    if limit is None or not isinstance(length, int):
        return ""
    kept = mapping(searched.get("budget")).get("softmax")
    text = f"A search chose the kernel of every layer within {limit:.3g} of softmax's time at {length:,} tokens"
    text += f", where {kept} may stay softmax" if isinstance(kept, int) and kept else ""
    return (
        f"{text}. Error: {searched.get('figure')}, of the whole model on held-out data, before it was trained further"
    )


def reasons(provenance: Mapping[str, object]) -> dict[int, str]:
    """Return why each layer has its kernel, by its number, as a search or a plan file says."""
    given = mapping(mapping(provenance.get("plan")).get("why"))
    found = {int(layer): str(why) for layer, why in given.items() if layer.isdecimal() and len(layer) < 10 and why}
    for one in _mappings(mapping(provenance.get("search")).get("layers")):
        layer, why = one.get("layer"), one.get("why")
        if isinstance(layer, int) and why:
            found[layer] = str(why)
    return found


def chosen_rows(provenance: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return label and value of error and cost of the plans shown, and why each layer has its kernel."""
    figure = mapping(provenance.get("search")).get("figure")
    rows = [
        (f"search, {one.name}", f"{one.kernels}: error {one.error:.4g} ({figure}), {one.share:.3g} of softmax's time")
        for one in points(provenance)
    ]
    return rows + [(f"why layer {layer}", why) for layer, why in sorted(reasons(provenance).items())]


def search_row(provenance: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return label and value of what a search has taught the kernels."""
    searched = mapping(provenance.get("search"))
    if not searched:
        return []
    said = f"{searched.get('steps')} steps, {searched.get('plans_tried')} plans tried in swaps"
    return [("search", said)]


def mapping(value: object) -> dict[str, object]:
    """Return what a record holds, nothing where it is no mapping."""
    return value if isinstance(value, dict) else {}


def _mappings(value: object) -> list[dict[str, object]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def number(value: object) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
