"""What a stage that is over has found, and what to do next: from its log and its result, as data.

Nothing is run here: the figures are those that the stage has measured, and every advice follows from one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from linearize.errors import ConfigError
from linearize.heads import HEADS, head_of_class
from linearize.jobs.trend import Trend, trend
from linearize.modeling.plan import LayerPlan, Plan
from linearize.registry import kernel_info, make_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from linearize.alignment.loop import AlignResult
    from linearize.alignment.measure import Closeness
    from linearize.distillation.loop import DistillResult
    from linearize.fidelity.ablate import KernelMerit
    from linearize.fidelity.measure import Fidelity

FAR = 2.0
"""Times the mean of the layers from which on the worst of them is an exception that softmax may stay in."""
CLOSE = 0.01
"""Nats, or share of the output's norm, below which a layer needs no help."""
WINDOW = 64
"""Tokens of the window that is proposed."""
NEGATIVE = 0.01
"""Share of negative weights that is worth a word."""


@dataclass(frozen=True)
class WorstLayer:
    """The layer that is furthest from softmax.

    Attributes:
        module: the host module.
        index: its number, as `--keep-softmax` takes it; None where it cannot be said.
        figure: what it is worst by.
        value: that figure.
        mean: the mean of all layers.
        helps: what makes it better, as options of `convert`, the first one first.
    """

    module: str
    index: int | None
    figure: str
    value: float
    mean: float
    helps: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One sentence."""
        name = self.module if self.index is None else f"{self.index} ({self.module})"
        text = f"{name}, {self.figure} {self.value:.3f}, {self.mean:.3f} on average"
        return f"{text}; what helps: {', or '.join(self.helps)}" if self.helps else text


@dataclass(frozen=True)
class Lengths:
    """How long inputs may be, and how long those were that were learned from and measured on.

    Attributes:
        seen: tokens of the longest held-out row, after padding was left out.
        promised: tokens that the model takes.
    """

    seen: int
    promised: int

    @property
    def text(self) -> str:
        """One sentence."""
        if self.seen >= self.promised:
            return f"seen at the whole length that the model takes, {self.promised:,} tokens"
        return (
            f"seen on rows of up to {self.seen:,} tokens, but the model takes {self.promised:,}: what it does beyond "
            "those seen has not been measured"
        )


@dataclass(frozen=True)
class Findings:
    """What a stage has found.

    Attributes:
        trends: whether the held-out loss of each stage was still falling, by the stage's name.
        worst: the worst layer; None where layers are not measured, or there is but one.
        merit: what the kernels bring over their windows alone; None without windows.
        lengths: lengths seen and promised; None where that is no matter of length.
        load: the lines of Python that load the checkpoint.
        command: the next command.
        why: why that one, in a few words.
    """

    trends: dict[str, Trend]
    worst: WorstLayer | None
    lengths: Lengths | None
    load: str
    command: str
    why: str
    merit: KernelMerit | None = None

    def lines(self) -> list[str]:
        """Return sentences for people."""
        found = [f"Verdict, {stage}: {one.text}." for stage, one in self.trends.items()]
        found += [f"Control, after stage one: {self.merit.text}."] if self.merit else []
        found += [f"Worst layer: {self.worst.text}."] if self.worst else []
        found += [f"Lengths: {self.lengths.text}."] if self.lengths else []
        return [*found, f"Load it: {self.load}", f"Next, {self.why}: {self.command}"]

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


def stage_one_trend(result: DistillResult, steps: int) -> Trend:
    """Judge stage one's held-out loss: of the last group of layers, where they were trained in groups.

    Args:
        result: a `linearize.distillation.loop.DistillResult`.
        steps: steps asked for, of one group.
    """
    before = max(0, result.history[-1].steps - steps) if result.history else 0
    points = [(one.step - before, one.held_out) for one in result.history if one.held_out is not None]
    done = result.history[-1].step - before if result.history else 0
    return trend([point for point in points if point[0] > 0], done)


def alignment_trend(result: AlignResult) -> Trend:
    """Judge the alignment's held-out loss, of its last phase: the phases measure different things.

    Args:
        result: a `linearize.alignment.loop.AlignResult`.
    """
    last = result.history[-1].phase if result.history else None
    before = max((one.step for one in result.history if one.phase != last), default=0)
    points = [
        (one.step - before, one.held_out) for one in result.history if one.phase == last and one.held_out is not None
    ]
    return trend(points, result.history[-1].step - before if result.history else 0)


def stage_two_trend(history: Iterable[Mapping[str, float]], steps: int, best_step: int) -> Trend:
    """Judge stage two's loss on the rows that the kept state was chosen on, or else on the validation rows.

    Args:
        history: the trainer's log.
        steps: steps done.
        best_step: the step whose weights were kept; 0 for those that it began with.
    """
    found = _held_out_trend(history, steps)
    return found if best_step or found.verdict == "falling" else Trend("start", steps)


def _held_out_trend(history: Iterable[Mapping[str, float]], steps: int) -> Trend:
    entries = [one for one in history if one.get("step")]
    for name in ("eval_selection", "eval_loss"):
        points: dict[int, float] = {}
        for one in entries:
            if name in one:
                points.setdefault(int(one["step"]), float(one[name]))
        if points:
            return trend(sorted(points.items()), steps)
    return Trend("unknown", steps)


def worst_of_layers(fidelity: Fidelity, plan: Plan) -> WorstLayer | None:
    """Return the layer whose weights are furthest from softmax's, with what helps it.

    Args:
        fidelity: a `linearize.fidelity.measure.Fidelity`, after stage one.
        plan: the plan of the conversion.
    """
    if len(fidelity.layers) < 2:
        return None
    name, said = "kl", "KL"
    if any(layer.kl is None for layer in fidelity.layers):
        name, said = "output_error", "relative error of the output"
    worst = max(fidelity.layers, key=lambda layer: getattr(layer, name))
    value, mean = float(getattr(worst, name)), fidelity.mean(name) or 0.0
    # Names in a plan begin at the base model.
    layer = next((one for one in plan.converted if f".{worst.module}".endswith(f".{one.module}")), None)
    helps: tuple[str, ...] = ()
    if layer is not None and value >= CLOSE:
        helps = what_helps(layer, value / max(mean, 1e-30), worst.negative_share or 0.0)
    return WorstLayer(worst.module, None if layer is None else layer.index, said, value, mean, helps)


def worst_of_blocks(closeness: Closeness, plan: Plan) -> WorstLayer | None:
    """Return the block in which the error of the hidden states grows most: errors are passed on from block to block.

    Args:
        closeness: a `linearize.alignment.measure.Closeness`, after the alignment.
        plan: the plan of the conversion.
    """
    blocks = {name: error for name, error in closeness.layers.items() if name != "output"}
    if len(blocks) < 2:
        return None
    grows, before = {}, 0.0
    for name, error in blocks.items():
        grows[name], before = error - before, error
    worst = max(grows, key=lambda name: grows[name])
    mean = sum(grows.values()) / len(grows)
    # Names in a plan begin at the base model, and are those of attentions.
    layer = next((one for one in plan.converted if _inside(one.module, worst)), None)
    helps: tuple[str, ...] = ()
    if layer is not None and grows[worst] >= CLOSE:
        helps = what_helps(layer, grows[worst] / max(mean, 1e-30), 0.0)
    figure = "growth of the hidden states' error"
    return WorstLayer(worst, None if layer is None else layer.index, figure, grows[worst], mean, helps)


def _inside(attention: str, block: str) -> bool:
    """Tell whether an attention of the base model lies in a block of the whole one (`bert.encoder.layer.0`)."""
    parts = block.split(".")
    return any(f"{attention}.".startswith(f"{'.'.join(parts[start:])}.") for start in range(len(parts)))


def what_helps(layer: LayerPlan, times: float, negative: float) -> tuple[str, ...]:
    """Return options of `convert` that bring a layer closer to softmax, the likeliest first.

    Args:
        layer: its plan.
        times: how many times the mean of all layers its figure is.
        negative: share of its weights that are negative.
    """
    info = kernel_info(layer.kernel)
    found = []
    if times >= FAR and layer.index is not None:
        found.append(f"softmax stays in it (--keep-softmax {layer.index})")
    if negative > NEGATIVE:
        found.append("a kernel whose weights cannot be negative")
    if not info.learnable:
        found.append("a kernel that learns (--kernel hedgehog)")
    wider = wider_argument(layer)
    if wider is not None:
        found.append(f"more features (--kernel-arg {wider})")
    if info.windowed and layer.hybrid.window is None:
        found.append(f"near tokens under softmax (--window {WINDOW})")
    return tuple(found)


def wider_argument(layer: LayerPlan) -> str | None:
    """Return NAME=VALUE of the argument that doubles a kernel's features; None where there is none."""
    info = kernel_info(layer.kernel)
    if info.feature_dim is None:
        return None
    config, size = make_config(info, layer.arguments), layer.shape.head_dim
    features = info.feature_dim(config, size)
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if isinstance(value, bool) or not isinstance(value, int | None):
            continue
        for wider in (2 * value,) if value else (features, 2 * features):
            try:
                changed = make_config(info, {**layer.arguments, one.name: wider})
            except ConfigError:
                continue
            if info.feature_dim(changed, size) == 2 * features:
                return f"{one.name}={wider}"
    return None


def longest_row(batches: Iterable[Mapping[str, Tensor]]) -> int | None:
    """Return the tokens of the longest row of some batches, without padding; None where they hold no text."""
    longest = 0
    for batch in batches:
        if "input_ids" not in batch:
            return None
        mask = batch.get("attention_mask")
        rows = batch["input_ids"].shape[1] if mask is None else int(mask.sum(dim=1).max())
        longest = max(longest, rows)
    return longest or None


def lengths_of(seen: int | None, promised: int | None) -> Lengths | None:
    """Put two lengths together; None where one is not known."""
    return None if seen is None or promised is None else Lengths(min(seen, promised), promised)


def load_lines(model: PreTrainedModel, folder: object, *, embedder: bool = False) -> str:
    """Return the lines of Python that load a checkpoint, on one line.

    Args:
        model: the model that was saved.
        folder: where.
        embedder: whether it is a sentence embedder.
    """
    converted = bool(getattr(model.config, "linearize", None))
    before = "import linearize; " if converted else ""
    if embedder:
        return f"{before}from sentence_transformers import SentenceTransformer; SentenceTransformer({str(folder)!r})"
    head = head_of_class(type(model).__name__) or HEADS["feature-extraction"]
    name = head.auto_class
    return f"{before}from transformers import {name}; {name}.from_pretrained({str(folder)!r})"
