"""`kernels --for MODEL`: what a model's attentions are, and what each kernel costs and was measured to reach there."""

from __future__ import annotations

from dataclasses import dataclass

from linearize.attention.factory import build_mixer, count_parameters, state_bytes
from linearize.attention.shape import HeadShape
from linearize.checkpoint.inspect import inspect_checkpoint
from linearize.checkpoint.loading import load_model, model_type
from linearize.conversion.plan import plan
from linearize.conversion.positions import current_length
from linearize.core.errors import ConfigError
from linearize.core.registry import KernelInfo, kernel_infos
from linearize.evaluation.bench.measured import CAUSAL, FORWARD, default_quality, speed_of
from linearize.jobs.advice import line
from linearize.modeling.plan import LayerPlan

SHORT = 512
"""Tokens up to which linear attention gains little; see docs/benchmarks/speed.md."""
LONG = 4096
"""Tokens proposed for a model that takes few."""


@dataclass(frozen=True)
class Candidate:
    """A kernel in a model, with its default arguments.

    Attributes:
        kernel: its name.
        why_not: why the model cannot have it; empty if it can.
        features: features per head, of the largest head; None for kernels without features.
        parameters: number of parameters that it adds to the model.
        state: bytes of the state that decoding keeps per sequence, all layers; None without features.
        kl: nats per query from softmax, if measured.
        experiment: key of that measurement.
        times: how many times faster than SDPA, if measured.
        choose: when to choose it.
    """

    kernel: str
    why_not: str
    features: int | None
    parameters: int
    state: int | None
    kl: float | None
    experiment: str | None
    times: float | None
    choose: str


@dataclass(frozen=True)
class Advice:
    """What suits a model.

    Attributes:
        model: its name.
        attentions: number of attentions that can become linear.
        causal: whether tokens see only earlier tokens.
        head_dims: sizes of the heads.
        longest: tokens that it takes; None if unlimited or unknown.
        candidates: all kernels; those that fit come first, in the order of their measurements.
        picks: the best kernel by what it is best at: "closest", "fastest", "smallest state that learns".
        notes: further remarks.
        command: the proposed conversion.
    """

    model: str
    attentions: int
    causal: bool
    head_dims: tuple[int, ...]
    longest: int | None
    candidates: tuple[Candidate, ...]
    picks: dict[str, str]
    notes: tuple[str, ...]
    command: str


def advise(name: str) -> Advice:
    """Advise on the kernel for a model.

    Args:
        name: Hub name or folder of a model, converted or not.

    Raises:
        LinearizeError: if it cannot be loaded, or has no attention that could become linear.
    """
    layers, longest, converted = _attentions(name)
    shapes = [layer.shape for layer in layers]
    candidates = [_candidate(info, shapes, longest) for info in kernel_infos() if info.preset is None]
    # Experiments do not compare with each other; within one the closest comes first.
    candidates.sort(key=lambda one: (one.why_not != "", one.experiment or "z", one.kl or 0.0, one.kernel))
    fits = [candidate for candidate in candidates if not candidate.why_not]
    picks = _picks(fits)
    causal, short = any(shape.causal for shape in shapes), longest is not None and longest <= SHORT
    notes = {
        "It is converted already; another kernel starts from the original.": converted,
        f"It takes {longest} tokens, and so short inputs gain little: convert it with --max-length {LONG} or more.": (
            short
        ),
        "It is causal: decoding keeps the state below in place of a cache that grows.": causal,
        "Its heads are small, and so are the maps: more features (hedgehog, features=128; flexformer_n, "
        "frequencies=64) come closer, above all for texts that are compared token by token.": (
            max(shape.head_dim for shape in shapes) <= 32
        ),
    }
    kernel = picks.get("closest", fits[0].kernel if fits else "hedgehog")
    return Advice(
        name,
        len(layers),
        causal,
        tuple(sorted({shape.head_dim for shape in shapes})),
        longest,
        tuple(candidates),
        picks,
        tuple(note for note, applies in notes.items() if applies),
        line("convert", name, {"kernel": kernel, "max_length": LONG if short else None}),
    )


def _attentions(name: str) -> tuple[list[LayerPlan], int | None, bool]:
    """Return the attentions that can become linear, the longest input, and whether they already are linear."""
    if model_type(name) == "linearize":
        info = inspect_checkpoint(name)
        assert info.plan is not None
        return [layer for layer in info.plan.layers if layer.index is not None], info.max_length, True
    loaded = load_model(name)
    layers = [layer for layer in plan(loaded.model, "elu").layers if layer.index is not None]
    return layers, current_length(loaded.model) if loaded.modality == "text" else None, False


def _candidate(info: KernelInfo, shapes: list[HeadShape], longest: int | None) -> Candidate:
    arguments: dict[str, object] = {"max_positions": longest or LONG} if info.maximum_positions else {}
    config, why_not = info.config(**arguments), ""
    for shape in dict.fromkeys(shapes):
        try:
            build_mixer(info.name, arguments, shape)
        except ConfigError as error:
            why_not = why_not or str(error)
    features, quality = info.feature_dim, default_quality(info.name)
    speed = speed_of(info.name, CAUSAL if any(shape.causal for shape in shapes) else FORWARD)
    return Candidate(
        info.name,
        why_not,
        None if features is None else max(features(config, shape.head_dim) for shape in shapes),
        sum(count_parameters(info.name, arguments, shape) for shape in shapes),
        state_bytes(info, config, shapes),
        None if quality is None else quality.kl,
        None if quality is None else quality.experiment.key,
        None if speed is None else speed.times,
        info.choose,
    )


def _picks(fits: list[Candidate]) -> dict[str, str]:
    """Return the best by each figure, among the kernels whose closeness was measured."""
    measured = [candidate for candidate in fits if candidate.kl is not None]
    if not measured:
        return {}
    first = [candidate for candidate in measured if candidate.experiment == measured[0].experiment]
    picks = {"closest": min(first, key=lambda one: one.kl or 0.0).kernel}
    if timed := [candidate for candidate in first if candidate.times is not None]:
        picks["fastest"] = max(timed, key=lambda one: one.times or 0.0).kernel
    if learned := [candidate for candidate in measured if candidate.parameters and candidate.state is not None]:
        smallest = min(learned, key=lambda one: (one.state or 0, one.kl or 0.0))
        picks["smallest state that learns"] = smallest.kernel
    return picks
