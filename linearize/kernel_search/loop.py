"""The search, from model and data to plan: all candidates in one frozen pass, then a choice on the whole model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields

from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor
from transformers import PreTrainedModel

from linearize.checkpoint.loading import move
from linearize.conversion.plan import apply
from linearize.conversion.plan import plan as make_plan
from linearize.conversion.timm import is_timm, wrap
from linearize.core.errors import ConfigError, TrainingError
from linearize.core.events import Callback, Started, ignore
from linearize.core.signatures import known_names
from linearize.kernel_search.candidates import Candidates, Key, Layout, lay_out
from linearize.kernel_search.config import SearchConfig
from linearize.kernel_search.costs import Cost, Costs, costs_of_layers
from linearize.kernel_search.result import SearchResult, SearchStep, layer_choices, make_points, named_choices
from linearize.kernel_search.table import Table
from linearize.kernel_search.whole import WholeError, WholeModel
from linearize.modeling.model import is_linearized
from linearize.modeling.plan import SOFTMAX, Plan
from linearize.training.run import Batches, Progress, Run, check_batches, frozen
from linearize.training.sharding import make_accelerator
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.observer import KernelTrainer, LayerLoss, layer_loss
from linearize.training.stage_one.start import start_scales
from linearize.training.states import RunState

CARRIER = "elu"
"""Placeholder kernel of the frozen model, which never runs: it has no parameters and fits every attention layer."""
NO_FSDP = (
    "search: got FSDP, expected one process or plain data parallelism (DDP); launch without FSDP, or search first "
    "on one device (linearize search MODEL --plan-out FILE.yaml) and convert with --plan FILE.yaml"
)


@known_names(SearchConfig)
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
        model: a softmax model, as for `linearize.convert`; it is moved to the accelerator's device and otherwise
            unchanged. `linearize.apply(model, result.plan)` carries the plan out, `result.load_kernels(model)` then
            loads the kernels trained in the search, and `linearize.distill` continues from there.
        data: source of batches, e.g. `linearize.data.load_source(...)`.
        config: options.
        plan: a plan whose converted layers are searched; None: all layers that can be converted.
        max_length: longest input of the result, for kernels that depend on it.
        on_step: called after every step (progress bars, logs).
        on_event: called with `Started` before other slow work.
        accelerator: an Accelerate object; one is created if None.

    Returns:
        The plan with its reasons, and error against cost of all plans that were tried.

    Raises:
        UnsupportedModelError: if no attention of the model can be converted.
        ConfigError: if a candidate does not fit the model, no plan meets the budget, or an option differs from that of
            the run to be resumed.

    Example:
        >>> result = linearize.search(model, data, SearchConfig(budget="cost=0.25", length=4096))
        >>> model = linearize.apply(model, result.plan)
    """
    config = config or SearchConfig()
    if is_timm(model):
        model = wrap(model)
    if is_linearized(model):
        raise ConfigError(f"search: got a converted model ({type(model).__name__}), expected its softmax original")
    check_batches("search", data)
    base = plan or make_plan(model, CARRIER, seed=config.seed)
    layout = lay_out(model, base, config.candidates, softmax=config.softmax_layers, max_length=max_length)
    accelerator = accelerator or make_accelerator(model)
    if accelerator.distributed_type == DistributedType.FSDP:
        # All candidates and whole plans are tried on a model that every process has.
        raise ConfigError(NO_FSDP)
    held_out = data.holdout_batches()
    if not held_out:
        raise ConfigError("search: got no held-out batch to compare candidates on; set some rows aside (--holdout)")
    move(model, accelerator.device)
    carrier = carrier_of(model, base)
    with frozen(carrier):
        return _Search(data, config, on_step, accelerator).run(model, carrier, layout, held_out, max_length, on_event)


def carrier_of(model: PreTrainedModel, base: Plan) -> PreTrainedModel:
    """Return a model that shares the tensors of `model`, and whose layers converted in `base` expose q, k and v."""
    shared: dict[int, object] = {id(x): x for x in [*model.parameters(), *model.buffers()]}
    plain = base.with_layers(layer.bare(CARRIER) for layer in base.converted)
    return apply(copy.deepcopy(model, shared), plain)


class _Search(Run):
    """One search: all candidates are trained and measured, then the choice."""

    part_name, weights_name, report = "part", "kernel", SearchStep
    config: SearchConfig
    trainer: SearchTrainer
    progress: Progress
    costs: Costs
    table: Table
    whole: WholeModel

    def run(
        self,
        model: PreTrainedModel,
        carrier: PreTrainedModel,
        layout: Layout,
        held_out: list[dict[str, Tensor]],
        max_length: int | None,
        on_event: Callback,
    ) -> SearchResult:
        """Search."""
        self.carrier, self.layout, self.max_length, self.on_event = carrier, layout, max_length, on_event
        self.candidates = Candidates(layout, carrier, self.accelerator.device)
        self.identify(model)
        saved = self.load(self.candidates.weights())
        if saved is not None:
            # A resumed search keeps its costs. States of earlier versions also have the peak memory.
            names = [field.name for field in fields(Cost)]
            self.costs = {
                int(number): {label: Cost(*(cost[name] for name in names)) for label, cost in row.items()}
                for number, row in saved.record["costs"].items()
            }
        else:
            # The main process measures, and the others receive its figures.
            device, dtype = self.accelerator.device, next(self.carrier.parameters()).dtype
            costs: Costs = {}
            if self.accelerator.is_main_process:
                costs = costs_of_layers(self.layout, self.config.length, str(device), dtype, self.on_event)
            self.costs = broadcast_object_list([costs])[0]
        self.table = Table.of(self.layout, self.costs, self.config)
        self.whole = WholeModel(self.carrier, self.candidates, held_out, self.accelerator, self.config.precision)
        if saved is not None:
            assert self.states is not None
            with self.states.reading():
                self.whole.known = {tuple(x): WholeError(**error) for x, error in saved.record["known"]}
        self._learn(saved)
        try:
            return self._conclude()
        except KeyboardInterrupt:
            self.save()
            raise

    def _learn(self, saved: RunState | None) -> None:
        """Train all candidates, and measure their errors."""
        keys = [(n, label) for n, row in self.table.rows.items() for label in row]
        trainer = SearchTrainer(self.carrier, self.candidates, keys, self.config.learning(), self.accelerator)
        if saved is None:
            start_scales(trainer, self.train_batches(), self.whole.held_out)
        self.begin(0, 0, self.config.steps if trainer.layers else 0, trainer, saved)
        if saved is not None:
            for loss in [x for x in trainer.layers if list(trainer.key_of[x]) in saved.record["dropped"]]:
                trainer.drop(loss)
        self.train([])
        for n, label in trainer.dropped:
            self.table.rows[n][label].diverged = True
        self.on_event(Started("measuring the candidates on held-out data"))
        for (n, label), error in self.whole.errors_of(keys).items():
            self.candidates.modules[n, label].requires_grad_(False)
            entry = self.table.rows[n][label]
            entry.error, entry.diverged = error, entry.diverged or not math.isfinite(error)

    def step(self, batches: Iterator[dict[str, Tensor]], held_out: list[dict[str, Tensor]]) -> None:
        """Train the candidates for one step."""
        trainer, progress, step = self.trainer, self.progress, self.progress.step + 1
        rate = trainer.step(batches, step)
        progress.step = step
        if step == self.steps:
            self.best_weights = trainer.snapshot()
        losses = [loss.mean for loss in trainer.layers]
        report = SearchStep(
            step,
            self.config.steps,
            rate,
            self.seconds,
            candidates=len(self.candidates.modules) - len(trainer.dropped),
            loss=sum(losses) / max(1, len(losses)),
        )
        self.finish_step(report)

    def _conclude(self) -> SearchResult:
        """Choose the plan with the smallest error of the whole model, measure others for the table, save a last state.

        Raises:
            TrainingError: if so many candidates diverged that no plan meets the budget.
        """
        best = self.table.best()
        if best is None:
            raise TrainingError(
                "search: too many candidates diverged (NaN or infinite) for a plan that meets the budget; "
                "check the data for broken inputs, or name other candidates (--candidates)"
            )
        self.on_event(Started("trying plans on the whole model"))
        closest = tuple(map(self.table.best_of, self.table.rows))
        choice = self.whole.decide(self.table, closest, best)
        names = named_choices(choice, self.table)
        self.on_event(Started(f"trying {len(names)} plans for the table"))
        self.whole.errors(list(names))
        if self.identity:
            self.state = self.last_state()
        self.save()
        layers = layer_choices(choice, self.layout, self.table)
        modules = self.candidates.modules
        return SearchResult(
            plan=self.layout.plan(choice, {layer.layer: layer.why for layer in layers}),
            layers=layers,
            points=tuple(make_points(self.whole.known, names, self.table, self.costs)),
            figure=self.whole.figure,
            length=self.config.length,
            limit=self.table.limit,
            budget=self.config.budget,
            reference=self.layout.reference,
            steps=self.progress.step,
            tried=len(self.whole.known),
            noisy=any(cost.noisy for row in self.costs.values() for cost in row.values()),
            seconds=self.seconds,
            kernels={x.module: modules[x.layer, x.label].state_dict() for x in layers if x.label != SOFTMAX},
            history=self.history,
            state=self.state,
        )

    def options(self) -> dict[str, object]:
        """Return the options that must be unchanged when a run is resumed."""
        named = {"data": getattr(self.data, "description", None), "max_length": self.max_length}
        # Earlier versions trained in rounds and dropped candidates after each; their states cannot be resumed.
        return super().options() | named | {"rounds": 1}

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of all candidates, including those that are not trained."""
        return self.candidates.weights()

    def record(self) -> dict[str, object]:
        """Return the state as plain data."""
        return super().record() | {
            "costs": {str(n): {x: vars(cost) for x, cost in row.items()} for n, row in self.costs.items()},
            "dropped": [list(key) for key in sorted(self.trainer.dropped)],
            "known": [[list(choice), vars(error)] for choice, error in self.whole.known.items()],
        }


class SearchTrainer(KernelTrainer):
    """Trains some of the candidates together, in one pass of the frozen model per batch.

    Inside a layer they take turns: loss and gradient of each are computed at once, so no activations are kept. If one
    diverges, it is dropped and the others continue.

    Attributes:
        dropped: the candidates that diverged.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        candidates: Candidates,
        keys: Iterable[Key],
        config: DistillConfig,
        accelerator: Accelerator,
    ) -> None:
        self.key_of: dict[LayerLoss, Key] = {}
        self.dropped: set[Key] = set()
        for number, label in keys:
            module = candidates.modules[number, label]
            if module.mixer.learnable:
                loss = layer_loss(f"{number}/{label}", module.train().requires_grad_(True), config)
                loss.host = candidates.hosts[number]
                self.key_of[loss] = number, label
        super().__init__(model, list(self.key_of), config, accelerator)

    def finish_gradient(self, loss: LayerLoss, step: int) -> None:
        """Turn a candidate's gradient into that of the mean loss, and clip it; drop a candidate that diverged."""
        try:
            super().finish_gradient(loss, step)
        except TrainingError:
            self.drop(loss)

    def drop(self, loss: LayerLoss) -> None:
        """Remove a candidate from the training."""
        self.by_host[id(loss.host)].remove(loss)
        for parameter in loss.layer.parameters():
            parameter.grad = None
        self.layers = [other for other in self.layers if other is not loss]
        self.dropped.add(self.key_of[loss])


__all__ = ["SearchConfig", "SearchResult", "search"]
