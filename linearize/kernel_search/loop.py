"""The search from model and data to plan: halving, the whole model, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import PreTrainedModel

from linearize.checkpoint.fingerprint import fingerprint
from linearize.distillation.loop import make_accelerator
from linearize.distillation.run import Batches, Part, Progress, Run
from linearize.distillation.state import RunState
from linearize.errors import ConfigError, TrainingError
from linearize.events import Callback, Noted, Started, ignore
from linearize.kernel_search.candidates import lay_out, number_of
from linearize.kernel_search.config import SearchConfig
from linearize.kernel_search.prepare import (
    CARRIER,
    Given,
    Prepared,
    check_processes,
    held_out_of,
    open_frozen,
    prepare,
)
from linearize.kernel_search.result import (
    SearchResult,
    SearchStep,
    layer_choices,
    mark_efficient,
    named_choices,
    point,
    reasons,
    short,
)
from linearize.kernel_search.swaps import Chooser, Chosen
from linearize.kernel_search.table import Table, rung_steps
from linearize.kernel_search.trainer import Key, SearchTrainer, errors
from linearize.kernel_search.whole import Choice, WholeError, WholeModel
from linearize.modeling.model import is_linearized
from linearize.modeling.plan import SOFTMAX, Plan
from linearize.surgery.plan import plan as make_plan
from linearize.surgery.timm import is_timm, wrap

TRAINING = 0.8
"""Share of a limited time that the rungs may take; the rest is for the whole model."""


class SearchInterruptedError(KeyboardInterrupt):
    """A Ctrl-C in the middle of a search that has a plan already.

    Attributes:
        plan: the best plan so far.
        why: why each layer has its kernel.
    """

    def __init__(self, plan: Plan, why: dict[int, str]) -> None:
        super().__init__()
        self.plan, self.why = plan, why


def search(
    model: PreTrainedModel,
    data: Batches,
    config: SearchConfig | None = None,
    *,
    plan: Plan | None = None,
    max_length: int | None = None,
    on_step: Callable[[SearchStep], None] | None = None,
    on_event: Callback = ignore,
    accelerator: Accelerator | None = None,
) -> SearchResult:
    """Choose the kernel of every layer of a model under a budget.

    Args:
        model: a softmax model, as `linearize.convert` takes it; it stays as it was (but is moved to the accelerator's
            device). `linearize.apply(model, result.plan)` carries the plan out, `result.load_kernels(model)` then
            gives its kernels what the search has taught them, and `linearize.distill` goes on.
        data: where batches come from, e.g. `linearize.data.load_source(...)`.
        config: options.
        plan: whose converted layers are searched; None: all that can be converted.
        max_length: longest input that the result shall take, for kernels that depend on it.
        on_step: called after every step (progress bars, logs).
        on_event: called with `linearize.events.Started` before other things that take long, and with a `Noted` after
            every rung.
        accelerator: an Accelerate object; one is made where None.

    Returns:
        The plan, why, and error against cost of all that was tried.

    Raises:
        UnsupportedModelError: if no attention of the model can be converted.
        ConfigError: if a candidate cannot serve the model, no plan meets the budget, or an option does not fit the run
            to be resumed.
        KeyboardInterrupt: `SearchInterruptedError` with the best plan so far, where there is one.

    Example:
        >>> result = linearize.search(model, data, SearchConfig(budget="cost=0.25", length=4096))
        >>> model = linearize.apply(model, result.plan)
    """
    config = config or SearchConfig()
    if is_timm(model):
        model = wrap(model)
    if is_linearized(model):
        raise ConfigError(f"search: got a converted model ({type(model).__name__}), expected its softmax original")
    if not hasattr(data, "train_batches"):
        raise ConfigError(
            f"search: got data of type {type(data).__name__}, expected something with train_batches and "
            "holdout_batches; linearize.data.load_source makes it of any data set"
        )
    base = plan or make_plan(model, CARRIER, seed=config.seed)
    # Before anything slow: candidates that do not fit are refused here.
    lay_out(model, base, config.candidates, softmax=config.softmax_layers > 0, max_length=max_length)
    accelerator = accelerator or make_accelerator(model)
    check_processes(accelerator)
    return _Search(model, data, config, Given(base, max_length, on_event), on_step, accelerator).run()


class _Search(Run[SearchTrainer, Progress, SearchStep, SearchConfig]):
    """One search: rungs of halving one after the other, then the choice."""

    part_name, weights_name, report, progress = "rung", "kernel", SearchStep, Progress
    prepared: Prepared
    table: Table
    whole: WholeModel
    limit: float

    def __init__(
        self,
        model: PreTrainedModel,
        data: Batches,
        config: SearchConfig,
        given: Given,
        on_step: Callable[[SearchStep], None] | None,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(data, config, on_step, accelerator)
        self.original, self.given, self.on_event = model, given, given.on_event
        self.part: Part[SearchTrainer, Progress] | None = None
        self.chooser: Chooser | None = None
        self.best = ""

    def run(self) -> SearchResult:
        """Search; the best plan so far goes along with a Ctrl-C."""
        held_out = held_out_of(self.data)
        with open_frozen(self.original, self.given.base, self.accelerator) as self.frozen:
            if self.identifiable:
                self.identity = fingerprint(model=self.original, data=self.data, options=self.options())
            saved = self.states.load() if self.states is not None and self.config.resume else None
            record = None if saved is None else saved.record
            found = prepare(self.frozen, self.original, self.given, self.config, held_out, self.accelerator, record)
            self.prepared, self.table, self.whole, self.limit = found, found.table, found.whole, found.limit
            try:
                return self._search()
            except KeyboardInterrupt as interrupt:
                so_far = self._so_far()
                if so_far is None:
                    raise
                raise SearchInterruptedError(*so_far) from interrupt

    def _search(self) -> SearchResult:
        saved = self.load(self.prepared.bench.weights())
        first = 0
        if saved is not None:
            first = saved.record["rung"]
            self.table.load(saved.record["table"])
            self.best = saved.record["best"]
            self.whole.known = {tuple(x): WholeError(**error) for x, error in saved.record["known"]}
        rungs = self.table.rounds()
        for number in range(first, rungs):
            self._rung(number, saved)
            saved = None
        assert self.part is not None
        if not self.table.measured:
            self._record_errors(list(self.prepared.bench.modules), 0)
        try:
            return self._result(self._choose())
        except KeyboardInterrupt:
            self._save(self.part)
            raise

    def _rung(self, number: int, saved: RunState | None) -> None:
        """Train what is left, measure it, and keep the better half of each layer."""
        steps = rung_steps(self.config.steps, self.table.rounds())
        keys = [(n, label) for n, row in self.table.rows.items() for label, entry in row.items() if entry.left]
        options = self.config.learning(max(1, steps[number]), number)
        trainer = SearchTrainer(self.frozen, self.prepared.bench, keys, options, self.accelerator)
        before = sum(steps[:number])
        if saved is None:
            part = self.begin(number, before, steps[number] if trainer.layers else 0, trainer, [])
        else:
            part = self.go_on(number, before, steps[number] if trainer.layers else 0, trainer, saved)
            for loss in [x for x in trainer.layers if list(trainer.key_of[id(x)]) in saved.record["dropped"]]:
                trainer.drop(loss)
        self.part = part
        self.train(part, [])
        for key in trainer.dropped:
            self.table.rows[key[0]][key[1]].diverged = True
        for key in keys:
            self.prepared.bench.modules[key].eval().requires_grad_(False)
        self._record_errors(keys, before + part.progress.step)
        if number + 1 < len(steps):
            self.table.halve(self._fair(), number + 1)
        self.chooser = Chooser(self.table, self.whole, self.limit, self.config.softmax_layers)
        choice = self.chooser.additive()
        self.best = "" if choice is None else short(choice)
        left = f"{self.table.left} candidates of {len(self.table.rows)} layers left"
        self.on_event(Noted(f"Search, rung {number + 1} of {len(steps)}: {left}; best so far: {self.best or 'none'}"))

    def _fair(self) -> float:
        """Return what a linear layer may take if all of them take the same share of softmax's time."""
        kept = min(self.config.softmax_layers, len(self.table.rows) - 1) / len(self.table.rows)
        return (self.limit - kept) / (1 - kept)

    def _record_errors(self, keys: list[Key], steps: int) -> None:
        self.on_event(Started("measuring the candidates on held-out data"))
        held_out = self.whole.held_out
        options: dict[str, Any] = {"accelerator": self.accelerator, "precision": self.config.precision}
        for (number, label), error in errors(self.frozen, self.prepared.bench, keys, held_out, **options).items():
            entry = self.table.rows[number][label]
            entry.error, entry.steps = error, steps
            entry.diverged = entry.diverged or error != error or error == float("inf")

    def step(
        self,
        part: Part[SearchTrainer, Progress],
        batches: Iterator[dict[str, Tensor]],
        held_out: list[dict[str, Tensor]],
    ) -> None:
        """See `Run`."""
        trainer, progress, step = part.trainer, part.progress, part.progress.step + 1
        rate = trainer.step(batches, step)
        progress.step = step
        late = self._late(TRAINING * (part.number + 1) / self.table.rounds())
        if step == part.steps or late:
            part.best = trainer.snapshot()
            progress.stopped = "time" if late else ""
        losses = [loss.mean for loss in trainer.layers]
        report = SearchStep(
            part.before + step,
            self.config.steps,
            part.number + 1,
            self.table.rounds(),
            self.table.left - len(trainer.dropped),
            sum(losses) / max(1, len(losses)),
            self.best,
            rate,
            self.seconds,
        )
        self.finish_step(report, trainer)

    def _late(self, share: float = 1.0) -> bool:
        """Tell whether a share of the search's limited time is over: as the main process says."""
        if self.config.time is None:
            return False
        late = [self.seconds >= share * self.config.time]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(late)
        return late[0]

    def _choose(self) -> Chosen:
        """Let the whole model decide.

        Raises:
            TrainingError: if too many candidates have left the numbers for a plan to meet the budget.
        """
        chooser = self.chooser = Chooser(self.table, self.whole, self.limit, self.config.softmax_layers)
        if chooser.additive() is None:
            raise TrainingError(
                "search: too many candidates left the numbers (NaN or infinite) for a plan that meets the budget; "
                "check the data for broken inputs, or name other candidates (--candidates)"
            )
        self.on_event(Started("trying plans on the whole model"))
        chosen = chooser.run(
            self.config.swaps,
            lambda count: self.on_event(Started(f"trying plans on the whole model, {count} tried")),
            self._late,
        )
        return chosen

    def _result(self, chosen: Chosen) -> SearchResult:
        """Say what was found, with the points of other plans beside it."""
        chooser, found, part = self.chooser, self.prepared, self.part
        assert chooser is not None and part is not None and chosen.error is not None
        why = reasons(chosen, self.table)
        sweep = [] if self._late() else chooser.sweep()
        named = named_choices(chosen.choice, self.table, sweep)
        self.on_event(Started(f"trying {len(named)} plans for the table"))
        measured = zip(named.items(), self.whole.errors(list(named)), strict=True)
        points = [point(name, choice, error, self.table, found.costs) for (choice, name), error in measured]
        if self.identity:
            self.state = self.last_state(part)
        self._save(part)
        figure = "last hidden state"
        if chosen.error.logits is not None:
            figure = "logits, share of variance" if self.whole.numbers else "logits, nats"
        return SearchResult(
            plan=found.layout.plan(chosen.choice, why),
            layers=layer_choices(chosen.choice, found.layout, self.table, why),
            points=mark_efficient(points),
            figure=figure,
            length=self.config.length,
            limit=self.limit,
            budget=self.config.budget,
            reference=found.layout.reference,
            steps=part.before + part.progress.step,
            tried=chosen.tried,
            noisy=any(cost.noisy for own in found.costs.values() for cost in own.values()),
            seconds=self.seconds,
            kernels=self._kernels(chosen.choice),
            history=self.history,
            ranks=found.ranks,
            state=self.state,
        )

    def _kernels(self, choice: Choice) -> dict[str, dict[str, Tensor]]:
        """Return copies of the parameters and buffers of a choice's kernels, by module."""
        found = {}
        for layer, label in zip(self.prepared.layout.layers, choice, strict=True):
            if label != SOFTMAX:
                state = self.prepared.bench.modules[number_of(layer), label].state_dict()
                found[layer.module] = {name: tensor.detach().clone() for name, tensor in state.items()}
        return found

    def _so_far(self) -> tuple[Plan, dict[int, str]] | None:
        """Return the best plan so far with its reasons, or None where no candidate was measured yet."""
        if self.chooser is None or not self.table.measured:
            return None
        best = self.chooser.best
        if best is None:
            choice = self.chooser.additive()
            if choice is None:
                return None
            best = Chosen(choice)
        why = reasons(best, self.table)
        return self.prepared.layout.plan(best.choice, why), why

    def options(self) -> dict[str, object]:
        """See `Run`."""
        free = {"memory", "remeasure"}
        found = {name: value for name, value in super().options().items() if name not in free}
        return found | {"data": getattr(self.data, "description", None), "max_length": self.given.max_length}

    def begin(
        self, number: int, before: int, steps: int, trainer: SearchTrainer, held_out: list[dict[str, Tensor]]
    ) -> Part[SearchTrainer, Progress]:
        """See `Run`: candidates are measured at the end of a rung only."""
        return Part(number, before, steps, trainer, Progress(), trainer.snapshot())

    def weights(self, part: Part[SearchTrainer, Progress]) -> dict[str, Tensor]:
        """See `Run`: all candidates, those that learn no more among them."""
        return {name: tensor.detach() for name, tensor in self.prepared.bench.weights().items()}

    def record(self, part: Part[SearchTrainer, Progress]) -> dict[str, object]:
        """See `Run`."""
        return super().record(part) | {
            "table": self.table.to_dict(),
            "costs": {str(n): {x: vars(cost) for x, cost in own.items()} for n, own in self.prepared.costs.items()},
            "best": self.best,
            "dropped": [list(key) for key in sorted(part.trainer.dropped)],
            "known": [[list(choice), vars(error)] for choice, error in self.whole.known.items()],
        }

    def last_state(self, part: Part[SearchTrainer, Progress]) -> RunState | None:
        """See `Run`."""
        return self.state_of(part) if part.number + 1 == self.table.rounds() else None


__all__ = ["SearchConfig", "SearchInterruptedError", "SearchResult", "search"]
