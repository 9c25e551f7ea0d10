"""How a checkpoint was made: the record `provenance` in its config.json, with a type for every field that is read.

The record comes from whoever made the checkpoint. Reading never fails: a value of the wrong type counts as missing.
"""

from __future__ import annotations

import functools
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

MOST_POINTS = 8
"""Most plans of a search that are shown."""


@dataclass(frozen=True)
class DataOptions:
    """Options that name a stage's data: one data set, or several with their weights."""

    dataset: str | dict[str, float] | None = None
    text_column: str | None = None
    image_column: str | None = None


@dataclass(frozen=True)
class LayerFidelity:
    """How close one layer's attention is to softmax, as in `linearize.fidelity.measure`."""

    module: str | None = None
    kl: float | None = None
    total_variation: float | None = None
    negative_share: float | None = None
    output_error: float | None = None


@dataclass(frozen=True)
class Fidelity:
    """How close all layers' attention is to softmax."""

    mean: dict[str, float] = field(default_factory=dict)
    layers: tuple[LayerFidelity, ...] = ()


@dataclass(frozen=True)
class StageOne:
    """What stage one did."""

    steps: int | None = None
    stopped: str | None = None
    before: Fidelity = field(default_factory=Fidelity)
    after: Fidelity = field(default_factory=Fidelity)
    options: DataOptions = field(default_factory=DataOptions)


@dataclass(frozen=True)
class WholeError:
    """How far a whole model is from its original: relative errors by layer, pooled cosine, logits."""

    layers: dict[str, float] = field(default_factory=dict)
    cosine: float | None = None
    logits: float | None = None

    @property
    def text(self) -> str:
        """One line for people."""
        figures = {
            "last hidden state, relative error": list(self.layers.values())[-1] if self.layers else None,
            "pooled cosine": self.cosine,
            "logits": self.logits,
        }
        return ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if value is not None)


@dataclass(frozen=True)
class Alignment:
    """What the alignment did; `train` names the weights that it trained."""

    steps: int | None = None
    teacher: str | None = None
    train: str | None = None
    before: WholeError | None = None
    after: WholeError | None = None
    options: DataOptions = field(default_factory=DataOptions)


@dataclass(frozen=True)
class OriginalResult:
    """What the original reached on the task of stage two."""

    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StageTwo:
    """What stage two did, as `linearize.training.stage_two.save.tuning_record` writes it."""

    task: str | None = None
    data: str | None = None
    columns: tuple[str, ...] = ()
    label_column: str | None = None
    split: str | None = None
    seed: int | None = None
    facts: dict[str, float] = field(default_factory=dict)
    max_length: int | None = None
    steps: int | None = None
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    chance: float | None = None
    above_chance: bool = False
    original: OriginalResult = field(default_factory=OriginalResult)


@dataclass(frozen=True)
class PlanPoint:
    """One plan that a search tried.

    Attributes:
        name: of the plan.
        kernels: how many layers have which kernel.
        error: of the whole model against its original.
        share: of softmax's time that the plan's attentions take.
        efficient: whether no plan that was tried is both closer and cheaper.
    """

    name: str | None = None
    kernels: str | None = None
    error: float | None = None
    share: float | None = None
    efficient: bool = False

    @property
    def is_chosen(self) -> bool:
        """Whether it is the plan that the search chose, or a form of it."""
        return (self.name or "").startswith("the plan")


@dataclass(frozen=True)
class LayerChoice:
    """Why a search gave a layer its kernel."""

    layer: int | None = None
    why: str | None = None


@dataclass(frozen=True)
class Search:
    """What a search tried and chose, as in `linearize.kernel_search.result`."""

    points: tuple[PlanPoint, ...] = ()
    layers: tuple[LayerChoice, ...] = ()
    figure: str | None = None
    length: int | None = None
    limit: float | None = None
    budget: dict[str, float] = field(default_factory=dict)
    reference: str | None = None
    steps: int | None = None
    plans_tried: int | None = None


@dataclass(frozen=True)
class PlanFile:
    """What a plan file says: why each layer has its kernel, by the layer's number."""

    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Provenance:
    """How a checkpoint was made.

    Attributes:
        base_model: name of the original.
        base_is_local: whether that was a folder, so that it must not be looked for on the Hub.
        dataset: what stage one read; None: the built-in data.
        seed: of the conversion.
        longest_row: tokens of the longest row of stage one and of the alignment.
        commands: command lines that made the checkpoint, in order.
        options: the conversion's own.
        distillation: stage one.
        alignment: of the whole model.
        finetuning: stage two.
        search: chose the kernels.
        plan: the file that chose the kernels.
        kernel_merit: what the kernels add to their windows, as in `linearize.fidelity.ablate.KernelMerit`.
        record: all of it, as it is in config.json.
    """

    base_model: str | None = None
    base_is_local: bool = False
    dataset: str | None = None
    seed: int | None = None
    longest_row: int | None = None
    commands: tuple[str, ...] = ()
    options: DataOptions = field(default_factory=DataOptions)
    distillation: StageOne | None = None
    alignment: Alignment | None = None
    finetuning: StageTwo | None = None
    search: Search | None = None
    plan: PlanFile = field(default_factory=PlanFile)
    kernel_merit: dict[str, float] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any] | None) -> Provenance:
        """Read a record, such as `config.linearize.get("provenance")`."""
        return replace(_read(cls, record or {}), record=record or {})

    def to_dict(self) -> dict[str, Any]:
        """Return the whole record, with the fields that this class does not know."""
        return dict(self.record)

    @property
    def weights_were_trained(self) -> bool:
        """Whether the alignment or stage two trained weights of the original; the model's softmax is no longer its."""
        aligned = self.alignment is not None and self.alignment.train not in (None, "kernels")
        return "finetuning" in self.record or aligned

    @property
    def row_length(self) -> int | None:
        """Tokens of the longest row of the last stage; None if the record does not say."""
        task = self._task_row_length
        return _length(self.longest_row) if task is None else task

    @property
    def longest_row_length(self) -> int | None:
        """Tokens of the longest row of any stage; None if the record does not say."""
        lengths = (_length(self.longest_row), self._task_row_length)
        return max((length for length in lengths if length is not None), default=None)

    @property
    def _task_row_length(self) -> int | None:
        """Tokens of stage two's longest row, after it was cut."""
        if self.finetuning is None:
            return None
        lengths = (_length(self.finetuning.facts.get("longest_row")), _length(self.finetuning.max_length))
        return min((length for length in lengths if length is not None), default=None)

    @property
    def plan_points(self) -> list[PlanPoint]:
        """Plans of a search to show: the chosen one first, its reference, softmax, and efficient others by cost."""
        if self.search is None:
            return []
        named = ("softmax everywhere", f"{self.search.reference} everywhere")
        known = [point for point in self.search.points if point.error is not None and point.share is not None]
        shown = [point for point in known if point.efficient or point.name in named or point.is_chosen]
        shown.sort(key=lambda point: (not point.is_chosen, point.name not in named))
        return sorted(shown[:MOST_POINTS], key=lambda point: (not point.is_chosen, point.share))

    @property
    def search_sentence(self) -> str:
        """What the search was asked for; empty if no search chose the kernels."""
        search = self.search
        if search is None or search.limit is None or search.length is None:
            return ""
        kept = int(search.budget.get("softmax", 0))
        text = f"A search chose the kernel of every layer within {search.limit:.3g} of softmax's time at "
        text += f"{search.length:,} tokens" + (f", where {kept} may stay softmax" if kept else "")
        return f"{text}. Error: {search.figure}, of the whole model on held-out data, before it was trained further"

    @property
    def reasons(self) -> dict[int, str]:
        """Why each layer has its kernel, by its number: what the search says, else the plan file."""
        reasons = {int(number): why for number, why in self.plan.why.items() if number.isdecimal() and len(number) < 10}
        for choice in self.search.layers if self.search is not None else ():
            if choice.layer is not None and choice.why:
                reasons[choice.layer] = choice.why
        return {number: why for number, why in reasons.items() if why}

    def choice_rows(self) -> list[tuple[str, str]]:
        """Return label and value of the plans that a search tried, and why each layer has its kernel."""
        figure = None if self.search is None else self.search.figure
        rows = []
        for point in self.plan_points:
            text = f"{point.kernels}: error {point.error:.4g} ({figure}), {point.share:.3g} of softmax's time"
            rows.append((f"search, {point.name}", text))
        return rows + [(f"why layer {number}", why) for number, why in sorted(self.reasons.items())]

    def training_rows(self) -> list[tuple[str, str]]:
        """Return label and value of what the record says about training."""
        rows = []
        if self.search is not None:
            rows.append(("search", f"{self.search.steps} steps, {self.search.plans_tried} plans tried"))
        if (stage := self.distillation) is not None:
            data = self.dataset or "the built-in data"
            rows.append(("stage one", f"{stage.steps} steps on {data} ({stage.stopped})"))
            for side, mean in (("before", stage.before.mean), ("after", stage.after.mean)):
                if mean:
                    figures = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in mean.items()]
                    rows.append((f"fidelity {side}", ", ".join(figures)))
        if (aligned := self.alignment) is not None:
            teacher = aligned.teacher or "its own softmax"
            rows.append(("alignment", f"{aligned.steps} steps with {teacher}, trained: {aligned.train}"))
            errors = (("before", aligned.before), ("after", aligned.after))
            rows += [(f"whole model {side}", error.text) for side, error in errors if error is not None]
        if (tuned := self.finetuning) is not None:
            rows.append(("stage two", f"{tuned.task} on {tuned.data}, {tuned.steps} steps"))
            rows += [(f"metric {name}", f"{value:.4g}") for name, value in tuned.metrics.items()]
            if tuned.chance is not None:
                rows.append(("chance", f"{tuned.chance:.4g}{'' if tuned.above_chance else ', not above it'}"))
        return rows


def weights_were_trained(record: Mapping[str, Any] | None) -> bool:
    """Tell whether the alignment or stage two trained weights of the original, by a checkpoint's record."""
    return Provenance.from_dict(record).weights_were_trained


def _length(tokens: float | None) -> int | None:
    return int(tokens) if tokens is not None and tokens > 0 else None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name != "record"}


def _read(kind: Any, record: Mapping[str, Any]) -> Any:
    values = {name: _fit(hint, record.get(name)) for name, hint in _hints(kind).items()}
    return kind(**{name: value for name, value in values.items() if value is not None})


def _fit(hint: Any, value: Any) -> Any:
    """Return a value as a type hint has it, items of a wrong type left out; None if the value itself is of another."""
    if isinstance(hint, types.UnionType):
        fitting = (_fit(kind, value) for kind in hint.__args__ if kind is not types.NoneType)
        return next((fitted for fitted in fitting if fitted is not None), None)
    if is_dataclass(hint):
        return _read(hint, value) if isinstance(value, Mapping) else None
    container, inner = typing.get_origin(hint), typing.get_args(hint)
    if container is tuple and isinstance(value, (list, tuple)):
        return tuple(fitted for item in value if (fitted := _fit(inner[0], item)) is not None)
    if container is dict and isinstance(value, Mapping):
        return {str(key): fitted for key, item in value.items() if (fitted := _fit(inner[1], item)) is not None}
    if container is not None:
        return None
    if hint is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # False for NaN as well.
        return float(value) if is_number and abs(value) <= sys.float_info.max else None
    return value if type(value) is hint else None
