"""The result of a search: the plan, why each layer has its kernel, and error against cost of all plans tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from linearize.core.errors import ConfigError
from linearize.core.parsing import write_file
from linearize.core.registry import Values
from linearize.fidelity import plots_style as style
from linearize.kernel_search.candidates import Layout
from linearize.kernel_search.costs import Costs
from linearize.kernel_search.table import TOLERANCE, Choice, Table
from linearize.kernel_search.whole import WholeError
from linearize.modeling.plan import SOFTMAX, Plan
from linearize.training.run import Report
from linearize.training.states import RunState

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

WORTH, LEAST = 0.01, 1e-6
"""A mixed plan is worth it if its error is smaller by this share, and by this amount: less is rounding error."""
PLAN, EVERYWHERE = "the plan", " everywhere"
"""Parts of the names of points."""


@dataclass(frozen=True, kw_only=True)
class SearchStep(Report):
    """Reported to the caller after every step.

    Attributes:
        stage: "search".
        candidates: number of candidates in training, over all layers; those that diverged are left out.
        loss: their mean loss.
        losses: always empty, as there are too many.
        held_out: always None, as errors are measured at the end.
    """

    stage: ClassVar[str] = "search"
    candidates: int
    loss: float
    losses: dict[str, float] = field(default_factory=dict)
    held_out: float | None = None

    @property
    def phase(self) -> str:
        """The number of candidates in training, as text."""
        return f"{self.candidates} candidates"


@dataclass(frozen=True)
class Point:
    """One choice for all layers: the error of the whole model's output, and the cost of its attention layers.

    Attributes:
        name: "the plan" or "luna everywhere".
        kernels: labels, with the number of layers of each.
        error: whole model compared with its original: divergence of the logits in nats, or for a model without a head
            the relative error of its last hidden state.
        hidden: relative error of the last hidden state.
        cosine: mean cosine of the pooled outputs.
        share: time of all attention layers, as a share of their time under softmax.
        seconds: time of all attention layers for one sequence of the measured length.
        efficient: whether no other point is both closer and cheaper.
    """

    name: str
    kernels: str
    error: float
    hidden: float
    cosine: float
    share: float
    seconds: float
    efficient: bool = False

    def beats(self, other: Point) -> bool:
        """Whether this point is closer or cheaper than another, and worse in neither."""
        mine, theirs = (self.error, self.share), (other.error, other.share)
        return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]


@dataclass(frozen=True)
class LayerChoice:
    """The choice for one layer, with its reason.

    Attributes:
        layer: number of the layer.
        module: name of its module.
        label: the chosen candidate, or "softmax".
        error: relative error of the layer's output with this candidate; 0 for softmax.
        share: time with this candidate, as a share of the layer's time under softmax.
        weight: how much of the layer's squared error reaches the whole model's score.
        why: the reason in a sentence.
        tried: error, share and divergence of every candidate, by label.
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
    """The result of a search.

    Attributes:
        plan: the chosen plan; `linearize.apply` carries it out.
        layers: the choice for each layer.
        points: error against cost of the plan and of others, the plan first.
        figure: kind of a point's `error`: "logits, nats", "logits, share of variance" or "last hidden state".
        length: input length in tokens at which costs were measured.
        limit: maximum cost, as a share of softmax's.
        budget: the budget that the user gave.
        reference: the label that plans are compared with.
        steps: number of optimizer steps done.
        tried: number of plans that were tried on the whole model.
        noisy: whether the machine was too noisy while costs were measured.
        seconds: duration.
        kernels: trained parameters and buffers of the chosen kernels by module, for `load_kernels`.
        history: one record per step.
        state: state from which a resumed run returns this result at once, or None.
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
    state: RunState | None = field(default=None, repr=False)

    @property
    def why(self) -> dict[int, str]:
        """Why each layer has its kernel, by number."""
        return {layer.layer: layer.why for layer in self.layers}

    @property
    def gain(self) -> float | None:
        """Relative reduction of the error compared with the reference everywhere; None if that has no error."""
        reference = f"{self.reference}{EVERYWHERE}"
        errors = [point.error for point in self.points if point.name in (reference, f"{PLAN}, {reference}")]
        return 1 - self.points[0].error / errors[0] if errors and errors[0] > 0 else None

    @property
    def uniform(self) -> Point | None:
        """The cheapest single kernel for all layers that is as good as the plan: within the limit and `WORTH`."""
        plan, *others = self.points
        alike = [
            point
            for point in others
            if point.name.endswith(EVERYWHERE)
            and point.name != f"{SOFTMAX}{EVERYWHERE}"
            and point.share <= self.limit * TOLERANCE
            and point.error - plan.error < max(LEAST, WORTH * point.error)
        ]
        return min(alike, key=lambda point: point.share, default=None)

    def load_kernels(self, model: PreTrainedModel) -> None:
        """Load the kernels trained in the search into a model that the plan was applied to.

        Raises:
            ConfigError: if the model has other kernels, or none; it is not changed then.
        """
        from linearize.attention.interface import linear_attentions

        layers = linear_attentions(model.base_model)
        for module, tensors in self.kernels.items():
            mine = layers[module].state_dict() if module in layers else None
            if mine is None or {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in tensors.items()}:
                raise ConfigError(
                    f"load_kernels: {module!r} of this {type(model).__name__} has another kernel than the search's "
                    "plan, or none; carry the plan out first: linearize.apply(model, result.plan)"
                )
        for module, tensors in self.kernels.items():
            layers[module].load_state_dict(tensors)

    def to_dict(self) -> dict[str, object]:
        """Return plain data, for `--json` and for the checkpoint's record."""
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
        }


def short(choice: Sequence[str]) -> str:
    """Return a choice as text: the labels with their numbers of layers, the most frequent first."""
    return ", ".join(f"{count} x {label}" for label, count in Counter(choice).most_common())


def make_points(
    errors: Mapping[Choice, WholeError], names: Mapping[Choice, str], table: Table, costs: Costs
) -> list[Point]:
    """Return the points of the named choices, in order."""
    points = []
    for choice, name in names.items():
        whole, seconds = errors[choice], 0.0
        for row, label in zip(costs.values(), choice, strict=True):
            cost = row[table.reference if label == SOFTMAX else label]
            seconds += cost.softmax_seconds * (1.0 if label == SOFTMAX else cost.share)
        figures = whole.error, whole.hidden, whole.cosine, table.cost(choice), seconds
        points.append(Point(name, short(choice), *figures))
    return [replace(point, efficient=not any(other.beats(point) for other in points)) for point in points]


def named_choices(chosen: Choice, table: Table) -> dict[Choice, str]:
    """Return the choices to show, with their names: the plan, one kernel everywhere, and softmax."""
    names = {chosen: PLAN}
    for label in dict.fromkeys([table.reference, SOFTMAX, *table.everywhere()]):
        choice, name = (label,) * len(table.rows), f"{label}{EVERYWHERE}"
        names[choice] = f"{PLAN}, {name}" if choice == chosen else name
    return names


def layer_choices(choice: Choice, layout: Layout, table: Table) -> tuple[LayerChoice, ...]:
    """Return the choice for each layer, with its figures and its reason."""
    why = reasons(choice, table)
    choices = []
    for (number, layer), label in zip(layout.layers.items(), choice, strict=True):
        row = table.rows[number]
        error, share = (0.0, 1.0) if label == SOFTMAX else (row[label].error or 0.0, row[label].share)
        figures = ("error", "share", "diverged")
        tried = {x: {name: getattr(entry, name) for name in figures} for x, entry in row.items()}
        weight = table.weights.get(number, 1.0)
        choices.append(LayerChoice(number, layer.module, label, error, share, weight, why[number], tried))
    return tuple(choices)


def reasons(choice: Choice, table: Table) -> dict[int, str]:
    """Return the reason for each layer's kernel, by layer number."""
    texts = {}
    for (number, row), label in zip(table.rows.items(), choice, strict=True):
        best, entry = table.best_of(number), row.get(label)
        least = row[best].error or 0.0
        figures = "" if entry is None else f"error {entry.error:.3g}, {best} {least:.3g}"
        if entry is None:  # Softmax is no candidate.
            text = f"kept softmax: with {best}, the closest, the layer's output would have an error of {least:.3g}"
            if number in table.weights:
                text += f", which alone gives the whole model a squared error of {table.weights[number] * least**2:.3g}"
        elif label == best:
            tried = {x: row[x] for x in table.allowed if x in row}
            others = sorted(
                (e.error, x) for x, e in tried.items() if x != label and e.error is not None and not e.diverged
            )
            text = f"the closest of {len(tried)} candidates: error {least:.3g}"
            text += f", next {others[0][1]} with {others[0][0]:.3g}" if others else ""
        elif len(set(choice)) == 1:
            text = f"{figures}; the whole model is closest with {label} in every layer"
        elif entry.share < row[best].share:
            text = (
                f"at {entry.share:.3g} times softmax's time, error {entry.error:.3g}; {best}, the closest, has "
                f"{least:.3g} at {row[best].share:.3g}, more than the budget has for this layer"
            )
        else:
            text = figures
        texts[number] = text
    return texts


def write_plot(result: SearchResult, path: str) -> None:
    """Plot error against time of all points by name, with a line through those that no other beats, as a PNG file."""
    figure = style.new_figure(6.4, 4.0)
    axes = figure.subplots()
    front = sorted((point.seconds, point.error) for point in result.points if point.efficient)
    label = "no other plan is both faster and closer"
    axes.plot(*zip(*front, strict=True), color=style.THIRD, linestyle=":", zorder=1, label=label)
    kinds: dict[str, tuple[str, Values]] = {
        PLAN: ("the plan", {"color": style.LINEAR, "marker": "*", "s": 160, "zorder": 3}),
        SOFTMAX: ("softmax", {"color": style.SOFTMAX, "marker": "o", "s": 40, "zorder": 2}),
        "": ("another plan", {"color": style.THIRD, "marker": "s", "s": 40, "zorder": 2}),
    }
    of_kind: dict[str, list[Point]] = {start: [] for start in kinds}
    for point in result.points:
        of_kind[next(start for start in kinds if point.name.startswith(start))].append(point)
    for start, (label, look) in kinds.items():
        if points := of_kind[start]:
            axes.scatter([x.seconds for x in points], [x.error for x in points], label=label, **look)
    for point in of_kind[""]:
        where = (point.seconds, point.error)
        axes.annotate(point.name, where, xytext=(6, -10), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.margins(0.18)
    axes.legend(fontsize=7, frameon=False)
    title = f"Whole model compared with its original ({result.figure})"
    style.tidy(axes, title, f"seconds, all attention layers, {result.length:,} tokens", f"error, {result.figure}")
    write_file(path, "--plot", style.to_png(figure)[0])
