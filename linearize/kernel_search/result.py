"""What a search has found: the plan, why each layer has its kernel, and error against cost of all that was tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, ClassVar

from linearize.distillation.run import Report
from linearize.kernel_search.candidates import Layout, number_of
from linearize.kernel_search.costs import Cost
from linearize.kernel_search.swaps import Chosen
from linearize.kernel_search.table import Table
from linearize.kernel_search.whole import Choice, WholeError
from linearize.modeling.plan import SOFTMAX, Plan

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from linearize.distillation.state import RunState


@dataclass(frozen=True)
class SearchStep(Report):
    """Reported to the caller after every step.

    Attributes:
        stage: "search".
        step: steps done.
        steps: steps planned.
        rung: which round of halving, from 1.
        rungs: how many there are.
        candidates_left: how many learn, over all layers.
        loss: mean loss over them.
        losses: none: there are too many.
        held_out: none: errors are measured when a rung is over.
        best: the best plan so far in short; empty before the first rung is over.
        seconds: since the start, earlier parts of a resumed run included.
    """

    stage: ClassVar[str] = "search"
    step: int
    steps: int
    rung: int
    rungs: int
    candidates_left: int
    loss: float
    best: str
    learning_rate: float
    seconds: float
    losses: dict[str, float] = field(default_factory=dict)
    held_out: float | None = None

    @property
    def phase(self) -> str:
        """What is being done."""
        return f"{self.candidates_left} candidates left"


@dataclass(frozen=True)
class Point:
    """One choice for all layers: how far the whole model's output is, and what its attentions cost.

    Attributes:
        name: what it is.
        kernels: labels and how many layers have each.
        error: whole model against its original: divergence of the logits in nats, or of a model without a head the
            relative error of its last hidden state.
        hidden: relative error of the last hidden state.
        cosine: mean cosine of the pooled outputs.
        share: of the time of all attentions under softmax.
        seconds: of all attentions, one sequence of the measured length.
        bytes: peak memory of the largest attention; None where it was not measured.
        efficient: whether no other point is both closer and cheaper.
    """

    name: str
    kernels: str
    error: float
    hidden: float
    cosine: float
    share: float
    seconds: float
    bytes: int | None = None
    efficient: bool = False


@dataclass(frozen=True)
class LayerChoice:
    """What one layer gets, and why.

    Attributes:
        layer: its number.
        module: its module.
        label: the candidate, or "softmax".
        error: of the layer's output under it, relative; 0 for softmax.
        share: of the layer's time under softmax.
        weight: how much of its squared error reaches the whole model's score.
        why: in a sentence.
        tried: error, share and steps of every candidate, by label.
    """

    layer: int
    module: str
    label: str
    error: float
    share: float
    weight: float
    why: str
    tried: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass
class SearchResult:
    """What a search has found.

    Attributes:
        plan: the plan that was chosen; `linearize.apply` carries it out.
        layers: each layer's choice.
        points: error against cost of the plan and of others, the plan first.
        figure: what a point's `error` is: "logits, nats", "logits, share of variance" or "last hidden state".
        length: tokens at which costs were measured.
        limit: of the cost, as a share of softmax's.
        budget: as it was asked for.
        reference: the label that plans are compared with.
        steps: optimizer steps done.
        tried: plans that greedy swaps tried.
        noisy: whether the machine was too noisy while costs were measured.
        seconds: duration.
        kernels: trained parameters and buffers of the chosen kernels by module, for `load_kernels`.
        history: one record per step.
        ranks: effective ranks by layer number, where widths were chosen by them.
        state: what a run that is resumed needs to give this result at once, or None.
    """

    plan: Plan
    layers: tuple[LayerChoice, ...]
    points: tuple[Point, ...]
    figure: str
    length: int
    limit: float
    budget: Mapping[str, object]
    reference: str
    steps: int
    tried: int
    noisy: bool
    seconds: float
    kernels: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    history: list[SearchStep] = field(default_factory=list, repr=False)
    ranks: Mapping[int, float] | None = None
    state: RunState | None = field(default=None, repr=False)

    @property
    def why(self) -> dict[int, str]:
        """Why each layer has its kernel, by number."""
        return {layer.layer: layer.why for layer in self.layers}

    @property
    def gain(self) -> float | None:
        """How much smaller the error is than with the reference everywhere, as a share; None where that has none."""
        reference = f"{self.reference} everywhere"
        errors = [one.error for one in self.points if one.name in (reference, f"the plan, {reference}")]
        return 1 - self.points[0].error / errors[0] if errors and errors[0] > 0 else None

    @property
    def uniform(self) -> Point | None:
        """One kernel in every layer that is as good as the plan: no dearer, and not further by `WORTH` or more."""
        plan, *others = self.points
        alike = [
            one
            for one in others
            if one.name.endswith(" everywhere")
            and one.name != f"{SOFTMAX} everywhere"
            and one.share <= self.limit * (1 + 1e-9)
            if one.error - plan.error < max(LEAST, WORTH * one.error)
        ]
        return min(alike, key=lambda one: one.share, default=None)

    def load_kernels(self, model: PreTrainedModel) -> None:
        """Give a model that the plan was applied to what the search has taught its kernels."""
        from linearize.attention.interface import linear_attentions

        layers = linear_attentions(model.base_model)
        for module, tensors in self.kernels.items():
            layers[module].load_state_dict(tensors)

    def to_dict(self) -> dict[str, object]:
        """Return plain data, for people and for the checkpoint's record."""
        return {
            "kernels": dict(Counter(layer.label for layer in self.layers)),
            "layers": [asdict(layer) for layer in self.layers],
            "points": [asdict(point) for point in self.points],
            "figure": self.figure,
            "length": self.length,
            "limit": self.limit,
            "budget": dict(self.budget),
            "reference": self.reference,
            "error_below_reference": self.gain,
            "steps": self.steps,
            "plans_tried": self.tried,
            "noisy": self.noisy,
            "seconds": self.seconds,
            **({} if self.ranks is None else {"ranks": {str(n): rank for n, rank in self.ranks.items()}}),
        }


WORTH, LEAST = 0.01, 1e-6
"""A gain is worth a mixed plan if it is this share of the error, and this much: less is the rounding of sums."""


def short(choice: Sequence[str]) -> str:
    """Write a choice as labels and how many layers have each, the most frequent first."""
    return ", ".join(f"{count} x {label}" for label, count in Counter(choice).most_common())


def mark_efficient(points: Sequence[Point]) -> tuple[Point, ...]:
    """Mark the points that no other one beats in error and cost."""
    from dataclasses import replace

    def beaten(one: Point) -> bool:
        return any(
            other.error <= one.error
            and other.share <= one.share
            and (other.error, other.share) != (one.error, one.share)
            for other in points
        )

    return tuple(replace(one, efficient=not beaten(one)) for one in points)


def point(
    name: str, choice: Sequence[str], error: WholeError, table: Table, costs: Mapping[int, Mapping[str, Cost]]
) -> Point:
    """Return the point of a choice."""
    seconds, memory = 0.0, []
    for (number, own), label in zip(costs.items(), choice, strict=True):
        some = next(iter(own.values()))
        seconds += some.softmax_seconds * (1.0 if label == SOFTMAX else table.rows[number][label].share)
        memory.append(some.softmax_bytes if label == SOFTMAX else own[label].bytes)
    largest = None if any(count is None for count in memory) else max(count for count in memory if count is not None)
    return Point(
        name,
        short(choice),
        error.error,
        error.hidden,
        error.cosine,
        table.cost(choice),
        seconds,
        largest,
    )


def named_choices(chosen: Choice, table: Table, sweep: Sequence[Choice]) -> dict[Choice, str]:
    """Name the choices whose points are shown: the plan, one kernel everywhere, softmax, and the best at other costs.

    One kernel everywhere: the reference, and whatever learned to the end in all layers.
    """
    layers = len(table.rows)
    found = {chosen: "the plan"}
    for label in dict.fromkeys([table.reference, SOFTMAX, *table.everywhere()]):
        choice, name = (label,) * layers, f"{label} everywhere"
        found[choice] = f"the plan, {name}" if choice == chosen else name
    for choice in sweep:
        found.setdefault(choice, f"closest at cost {table.cost(choice):.3g}")
    return found


def layer_choices(choice: Choice, layout: Layout, table: Table, why: Mapping[int, str]) -> tuple[LayerChoice, ...]:
    """Return each layer's choice with its figures."""
    found = []
    for layer, label in zip(layout.layers, choice, strict=True):
        number = number_of(layer)
        row = table.rows[number]
        error, share = (0.0, 1.0) if label == SOFTMAX else (row[label].error or 0.0, row[label].share)
        tried = {
            x: {"error": e.error, "share": e.share, "steps": e.steps, "diverged": e.diverged} for x, e in row.items()
        }
        weight = table.weights.get(number, 1.0)
        found.append(LayerChoice(number, layer.module, label, error, share, weight, why[number], tried))
    return tuple(found)


def reasons(chosen: Chosen, table: Table) -> dict[int, str]:
    """Say why each layer has its kernel."""
    swapped = {number: swap for swap in chosen.swaps for number in swap.numbers}
    total = table.error(chosen.choice)
    found = {}
    for (number, row), label in zip(table.rows.items(), chosen.choice, strict=True):
        best = table.best_of(number)
        if label == SOFTMAX:
            own = row[best].error or 0.0
            text = f"kept softmax: of {best}, the closest, the layer's output would have the error {own:.3g}"
            if number in table.weights:
                text += f", and the whole model's squared error {table.weights[number] * own**2:.3g} by it alone"
        elif label == best:
            others = sorted(
                (e.error, x) for x, e in row.items() if x != label and e.error is not None and not e.diverged
            )
            text = f"the closest of {len(row)} candidates: error {row[label].error:.3g}"
            text += f", next {others[0][1]} with {others[0][0]:.3g}" if others else ""
        else:
            one, other = row[label], row[best]
            part = table.weights.get(number, 1.0) * (one.error or 0.0) ** 2 / total if total > 0 else 0.0
            text = (
                f"at {one.share:.3g} of softmax's time, error {one.error:.3g}, where {best}, the closest, takes "
                f"{other.share:.3g} for {other.error:.3g}: more than the budget has for this layer ({part:.0%} of the "
                "plan's error is from here)"
            )
            if one.share >= other.share:
                text = f"error {one.error:.3g}, where {best} has {other.error:.3g}"
        if number in swapped:
            swap = swapped[number]
            was = swap.was[swap.numbers.index(number)]
            text += f"; in place of {was} as the whole model says: {swap.before:.3g} > {swap.after:.3g}"
        found[number] = text
    return found
