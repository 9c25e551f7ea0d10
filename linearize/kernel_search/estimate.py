"""What a search would do and take, from a few of its own steps: nothing is chosen."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from transformers import PreTrainedModel

from linearize.distillation.loop import make_accelerator
from linearize.distillation.run import Batches
from linearize.events import Callback, ignore
from linearize.kernel_search.config import SearchConfig
from linearize.kernel_search.prepare import Given, Prepared, check_processes, held_out_of, open_frozen, prepare
from linearize.kernel_search.swaps import SWEEP, trials_of
from linearize.kernel_search.table import rung_steps, rungs_of, survivors
from linearize.kernel_search.trainer import Key, SearchTrainer, errors
from linearize.modeling.plan import Plan
from linearize.surgery.timm import is_timm, wrap

LEARNING_PLANS = 2
"""Plans that the choice begins with: the best by plain and by weighed errors of layers."""


@dataclass(frozen=True)
class Round:
    """One round of halving.

    Attributes:
        steps: its optimizer steps.
        candidates: how many learn in each layer, about: which ones a budget can pay is known later.
    """

    steps: int
    candidates: int


@dataclass(frozen=True)
class SearchEstimate:
    """What a search would do and take.

    Attributes:
        layers: how many are searched.
        shares: what each candidate costs, as a share of softmax's time: means over the layers, by label.
        length: tokens at which that was measured.
        limit: of a plan's cost, as a share of softmax's time.
        softmax: layers that may stay softmax.
        rounds: of halving.
        plans: how many plans are tried on the whole model, at most.
        parameter_bytes: of all candidates.
        seconds_per_step: of a step of the first round, in which all candidates learn.
        timed: steps that were timed.
        seconds: of the whole search.
        reference: the plan with the reference in every layer.
    """

    layers: int
    shares: Mapping[str, float]
    length: int
    limit: float
    softmax: int
    rounds: tuple[Round, ...]
    plans: int
    parameter_bytes: int
    seconds_per_step: float
    timed: int
    seconds: float
    reference: Plan

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        rounds = [asdict(one) for one in self.rounds]
        own = {name: value for name, value in vars(self).items() if name not in ("rounds", "reference", "shares")}
        return {**own, "rounds": rounds, "shares": dict(self.shares), "reference": self.reference.to_dict()}

    def lines(self) -> list[str]:
        """Return what would be searched, for people."""
        rounds = ", then ".join(f"{one.steps:,} steps of {one.candidates}" for one in self.rounds)
        kept = f" and {self.softmax} of them may stay softmax" if self.softmax else ""
        shares = ", ".join(f"{label} {share:.3g}" for label, share in self.shares.items())
        return [
            f"Search: {len(self.shares)} candidates in {self.layers} layers; {rounds} candidates a layer; up to "
            f"{self.plans} plans on the whole model",
            f"Share of softmax's time at {self.length:,} tokens: {shares}; the plan may take {self.limit:.3g}{kept}",
        ]


def estimate(
    model: PreTrainedModel,
    data: Batches,
    config: SearchConfig,
    base: Plan,
    *,
    max_length: int | None = None,
    timed: int = 3,
    on_event: Callback = ignore,
) -> SearchEstimate:
    """Measure the candidates' costs, do a few steps with all of them, and say what the search would take.

    Args:
        model: the softmax model; it stays as it was.
        data: where batches come from.
        config: options of the search.
        base: the plan whose converted layers are searched.
        max_length: longest input that the result shall take.
        timed: how many steps to do; the first one warms up.
        on_event: called with what begins.

    Raises:
        ConfigError: what the search would raise before its first step.
    """
    model = wrap(model) if is_timm(model) else model
    accelerator = make_accelerator(model)
    check_processes(accelerator)
    held_out = held_out_of(data)
    with open_frozen(model, base, accelerator) as frozen:
        clock = _Clock()
        found = prepare(frozen, model, Given(base, max_length, on_event), config, held_out, accelerator, None)
        preparation = clock.lap()
        labels, numbers = list(found.layout.plans), found.layout.numbers
        keys: list[Key] = [(number, label) for number in numbers for label in labels]
        step = _time_steps(SearchTrainer(frozen, found.bench, keys, config.learning(timed), accelerator), data)
        bare = _time_steps(SearchTrainer(frozen, found.bench, [], config.learning(timed), accelerator), data)
        clock.lap()
        errors(frozen, found.bench, keys, held_out, accelerator=accelerator, precision=config.precision)
        measuring = clock.lap()
        everywhere = [(label,) * len(numbers) for label in labels[:2]]
        found.whole.errors(everywhere)
        # The original runs beside them.
        plan_pass = clock.lap() / (1 + len(everywhere))
    rounds, plans = rounds_of(found.layout.labels, labels, config.steps), plans_of(found, config)
    training = sum(
        one.steps * (bare + max(0.0, step - bare) * one.candidates / len(labels))
        + measuring * one.candidates / len(labels)
        for one in rounds
    )
    if config.time is not None:
        training = min(training, config.time)
    return SearchEstimate(
        layers=len(numbers),
        shares=_shares(found),
        length=config.length,
        limit=found.limit,
        softmax=config.softmax_layers,
        rounds=rounds,
        plans=plans,
        parameter_bytes=sum(x.nbytes for x in found.bench.weights().values()),
        seconds_per_step=step,
        timed=timed,
        seconds=preparation + training + plans * plan_pass,
        reference=found.layout.plan((found.layout.reference,) * len(numbers)),
    )


def _time_steps(trainer: SearchTrainer, data: Batches) -> float:
    """Return the mean seconds of a step, without the first one, which warms up."""
    batches, times, clock = data.train_batches(), [], _Clock()
    for number in range(1, trainer.config.steps + 1):
        trainer.step(batches, number)
        trainer.interrupts.release()
        times.append(clock.lap())
    return sum(times[1:]) / len(times[1:]) if len(times) > 1 else times[0]


class _Clock:
    """Time between calls."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last call."""
        before, self.last = self.last, time.perf_counter()
        return self.last - before


def rounds_of(allowed: Sequence[str], labels: Sequence[str], steps: int) -> tuple[Round, ...]:
    """Return the rounds of halving.

    Args:
        allowed: candidates that may be chosen.
        labels: all that learn: the reference may only be compared with.
        steps: of all rounds.
    """
    counts = rung_steps(steps, rungs_of(len(allowed)))
    # Behind the first round the reference stays, whatever its rank.
    left = [min(len(labels), survivors(len(allowed), n) + 1) if n else len(labels) for n in range(len(counts))]
    return tuple(Round(count, learning) for count, learning in zip(counts, left, strict=True))


def plans_of(found: Prepared, config: SearchConfig) -> int:
    """Return how many plans are tried at most: to weigh layers, by swaps, and for the table of points."""
    layers, labels = len(found.layout.numbers), len(found.layout.candidates)
    table = SWEEP + labels + 1
    return layers + LEARNING_PLANS + trials_of(config.swaps, layers) + table


def _shares(found: Prepared) -> dict[str, float]:
    costs = list(found.costs.values())
    return {x: sum(own[x].share for own in costs) / len(costs) for x in found.layout.labels}
