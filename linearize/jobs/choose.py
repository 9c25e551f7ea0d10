"""Which kernels suit a model: what its attentions are, what each kernel takes there, and what was measured of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from linearize.attention.factory import build_mixer, count_parameters, state_bytes
from linearize.attention.shape import HeadShape
from linearize.bench.measured import CAUSAL, FORWARD, default_quality, speed_of
from linearize.errors import ConfigError
from linearize.jobs.command import line
from linearize.jobs.config import ConvertJob
from linearize.modeling.plan import LayerPlan
from linearize.registry import KernelInfo, kernel_infos

SHORT = 512
"""Tokens up to which linear attention gains little; see docs/benchmarks/speed.md."""
LONG = 4096
"""Tokens that are proposed to a model which takes few."""


@dataclass(frozen=True)
class Candidate:
    """A kernel in a model, with its default arguments.

    Attributes:
        kernel: its name.
        why_not: why it cannot stand there; empty where it can.
        features: per head, of the largest head; None for kernels without features.
        parameters: that it adds to the model.
        state: bytes of the sums over tokens, all layers, per sequence: what decoding keeps; None without features.
        kl: nats per query from softmax, where measured.
        experiment: the key of that measurement.
        times: how many times faster than SDPA, where measured.
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
        attentions: how many can become linear.
        causal: whether a token sees only those before it.
        head_dims: sizes of the heads.
        longest: tokens that it takes; None if not limited or not known.
        candidates: all kernels, those that fit first, by what was measured.
        picks: kernels by what they are best at: "closest", "fastest", "smallest state that learns".
        notes: what else matters.
        command: the conversion that is proposed.
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

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


def advise(name: str) -> Advice:
    """Advise on the kernel for a model.

    Args:
        name: Hub name or folder of a model, converted or not.

    Raises:
        LinearizeError: if it cannot be loaded, or has no attention that could become linear.
    """
    layers, longest, converted = _attentions(name)
    shapes = [layer.shape for layer in layers]
    found = [_candidate(info, shapes, longest) for info in kernel_infos() if info.preset is None]
    # What was measured comes first, the closest in front; experiments in order, as they do not compare.
    found.sort(key=lambda one: (one.why_not != "", one.experiment or "z", one.kl or 0.0, one.kernel))
    fits = [one for one in found if not one.why_not]
    picks = _picks(fits)
    kernel = picks.get("closest", fits[0].kernel if fits else "hedgehog")
    given: dict[str, object] = {"model": name, "kernel": kernel}
    short = longest is not None and longest <= SHORT
    if short:
        given["max_length"] = LONG
    return Advice(
        name,
        len(layers),
        any(shape.causal for shape in shapes),
        tuple(sorted({shape.head_dim for shape in shapes})),
        longest,
        tuple(found),
        picks,
        tuple(_notes(shapes, longest, converted)),
        line("convert", ConvertJob, given),
    )


def _attentions(name: str) -> tuple[list[LayerPlan], int | None, bool]:
    """Return the attentions that can become linear, the longest input, and whether they are linear already."""
    from linearize.checkpoint.inspect import inspect_checkpoint
    from linearize.loading import load_model, model_type
    from linearize.surgery.plan import plan
    from linearize.surgery.positions import current_length

    if model_type(name) == "linearize":
        info = inspect_checkpoint(name)
        assert info.plan is not None
        return [one for one in info.plan.layers if one.index is not None], info.max_length, True
    loaded = load_model(name)
    layers = [one for one in plan(loaded.model, "elu").layers if one.index is not None]
    return layers, current_length(loaded.model) if loaded.modality == "text" else None, False


def _candidate(info: KernelInfo, shapes: list[HeadShape], longest: int | None) -> Candidate:
    arguments: dict[str, object] = {"max_positions": longest or LONG} if info.maximum_positions else {}
    config, why_not = info.config(**arguments), ""
    for shape in dict.fromkeys(shapes):
        try:
            build_mixer(info.name, arguments, shape)
        except ConfigError as error:
            why_not = why_not or str(error)
    size = info.feature_dim
    quality = default_quality(info.name)
    speed = speed_of(info.name, CAUSAL if any(shape.causal for shape in shapes) else FORWARD)
    return Candidate(
        info.name,
        why_not,
        None if size is None else max(size(config, shape.head_dim) for shape in shapes),
        sum(count_parameters(info.name, arguments, shape) for shape in shapes),
        state_bytes(info, config, shapes),
        None if quality is None else quality.kl,
        None if quality is None else quality.experiment.key,
        None if speed is None else speed.times,
        info.choose,
    )


def _picks(fits: list[Candidate]) -> dict[str, str]:
    """Return the best by each figure, of those that were measured to come close."""
    measured = [one for one in fits if one.kl is not None]
    if not measured:
        return {}
    first = [one for one in measured if one.experiment == measured[0].experiment]
    found = {"closest": min(first, key=lambda one: one.kl or 0.0).kernel}
    timed = [one for one in first if one.times is not None]
    if timed:
        found["fastest"] = max(timed, key=lambda one: one.times or 0.0).kernel
    learned = [one for one in measured if one.parameters and one.state is not None]
    if learned:
        found["smallest state that learns"] = min(learned, key=lambda one: (one.state or 0, one.kl or 0.0)).kernel
    return found


def _notes(shapes: list[HeadShape], longest: int | None, converted: bool) -> list[str]:
    found = []
    if converted:
        found.append("It is converted already; another kernel starts from the original.")
    if longest is not None and longest <= SHORT:
        found.append(
            f"It takes {longest} tokens, and so short inputs gain little: convert it with --max-length {LONG} or more."
        )
    if any(shape.causal for shape in shapes):
        found.append("It is causal: decoding keeps the state below in place of a cache that grows.")
    if max(shape.head_dim for shape in shapes) <= 32:
        found.append(
            "Its heads are small, and so are the maps: more features (hedgehog, features=128; flexformer_n, "
            "frequencies=64) come closer, above all where texts are compared token by token."
        )
    return found
