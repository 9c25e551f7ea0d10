"""Stage one: teach the kernels of a converted model to imitate its frozen softmax attention.

Only the kernels are trained. Each layer's loss needs only that layer's q, k and v under the frozen model, so its
gradient is taken inside the frozen forward pass, as soon as the layer has run, and nothing of it is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.checkpoint.fingerprint import check_same, fingerprint
from linearize.distillation.config import DistillConfig
from linearize.distillation.layer_loss import LayerLoss, layer_loss
from linearize.distillation.processes import several
from linearize.distillation.shard import frozen_model
from linearize.distillation.state import RunState, StateFolder
from linearize.distillation.trainer import KernelTrainer
from linearize.errors import ConfigError, TrainingError
from linearize.fidelity.measure import Fidelity, measure_layers
from linearize.modeling.model import is_linearized


class Batches(Protocol):
    """What stage one needs of a data source; `linearize.data.Source` is one."""

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        """Return batches without end, from batch number `start` on."""

    def holdout_batches(self) -> list[dict[str, Tensor]]:
        """Return the batches that are never trained on."""


@dataclass(frozen=True)
class StepReport:
    """Told to the caller after every step.

    Attributes:
        step: steps done.
        steps: steps planned.
        losses: mean loss per layer, by host module.
        held_out: mean held-out loss over layers, at the steps that look at it.
        learning_rate: of the first layer.
        seconds: since the start, earlier parts of a resumed run included.
    """

    step: int
    steps: int
    losses: dict[str, float]
    held_out: float | None
    learning_rate: float
    seconds: float

    @property
    def loss(self) -> float:
        """Mean over the layers."""
        return sum(self.losses.values()) / max(1, len(self.losses))


@dataclass
class DistillResult:
    """What stage one did.

    Attributes:
        steps: optimizer steps done.
        best_step: the step whose parameters were kept (of the last group of layers).
        held_out: its mean held-out loss.
        stopped: why it ended ("steps", "early stopping", "nothing to learn").
        before: fidelity before, on the held-out batches.
        after: fidelity after.
        history: one record per step.
        seconds: duration of the training itself.
        state: what a run that is resumed needs to give this result at once; None where nothing was trained, or where
            the data cannot say what it is (it has no `digest`) and no states were asked for.
    """

    steps: int
    best_step: int
    held_out: float | None
    stopped: str
    before: Fidelity
    after: Fidelity
    history: list[StepReport] = field(default_factory=list)
    seconds: float = 0.0
    state: RunState | None = None


def distill(
    model: PreTrainedModel,
    data: Batches,
    config: DistillConfig | None = None,
    *,
    on_step: Callable[[StepReport], None] | None = None,
    accelerator: Accelerator | None = None,
) -> DistillResult:
    """Train the kernels of a converted model, in place.

    Args:
        model: a converted model.
        data: where batches come from, e.g. `linearize.data.load_source(...)`.
        config: options.
        on_step: called after every step (progress bars, logs).
        accelerator: an Accelerate object; one is made where None.

    Returns:
        What was done, with fidelity before and after on held-out batches.

    Raises:
        ConfigError: if the model is not converted, the data gives no batches, or an option does not fit a kernel or
            the run to be resumed.
        TrainingError: if a loss becomes NaN or infinite; names layer and step. The model then holds the best
            parameters that were seen before.
    """
    config = config or DistillConfig()
    if not is_linearized(model):
        raise ConfigError(f"got {type(model).__name__}, expected a converted model; call linearize.convert first")
    if not hasattr(data, "train_batches"):
        raise ConfigError(
            f"stage one: got data of type {type(data).__name__}, expected something with train_batches and "
            "holdout_batches; linearize.data.load_source makes it of any data set"
        )
    return _Run(model, data, config, on_step, accelerator or make_accelerator(model)).run()


def make_accelerator(model: PreTrainedModel) -> Accelerator:
    """Make an Accelerate object for a model's device."""
    # Accelerate's state is one per process: the first one made decides, and a later one must not contradict it.
    # Where several processes were started, accelerate's own configuration says which devices they have.
    if AcceleratorState._shared_state or several():
        return Accelerator()
    return Accelerator(cpu=next(model.parameters()).device.type == "cpu")


@dataclass
class _Progress:
    """Where a group of layers stands."""

    step: int = 0
    best_step: int = 0
    best_loss: float = 0.0
    looks: int = 0
    stopped: str = ""


class _Run:
    """One run of stage one: groups of layers one after the other (one group, unless asked otherwise)."""

    def __init__(
        self,
        model: PreTrainedModel,
        data: Batches,
        config: DistillConfig,
        on_step: Callable[[StepReport], None] | None,
        accelerator: Accelerator,
    ) -> None:
        self.model, self.data, self.config = model, data, config
        self.frozen = model
        self.on_step, self.accelerator = on_step, accelerator
        layers = linear_attentions(model)
        learn = [layer_loss(name, layer, config) for name, layer in layers.items() if layer.mixer.info.learnable]
        size = config.layers_at_a_time or max(1, len(learn))
        self.groups = [learn[i : i + size] for i in range(0, len(learn), size)]
        self.history: list[StepReport] = []
        self.states = None if config.folder is None else StateFolder(config.folder, config.keep)
        self.started: dict[str, Any] | None = None
        self.state: RunState | None = None
        self.start, self.earlier = time.perf_counter(), 0.0

    def run(self) -> DistillResult:
        """Measure, train, measure again."""
        home = next(self.model.parameters()).device
        if self.states is not None or hasattr(self.data, "digest"):
            self.started = fingerprint(model=self.model, data=self.data, options=self._options())
        self.frozen = frozen_model(self.model, self.accelerator)
        held_out = self.data.holdout_batches()
        before = measure_layers(self.frozen, held_out)
        if not self.groups or self.config.steps == 0:
            return DistillResult(0, 0, None, "steps" if self.groups else "nothing to learn", before, before)
        flags = {p: p.requires_grad for p in self.model.parameters()}
        modes = {m: m.training for m in self.model.modules()}
        try:
            for side in {self.model, self.frozen}:
                side.eval().requires_grad_(False)
            place = self._train(held_out)
        finally:
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)
                parameter.grad = None
            for module, mode in modes.items():
                module.training = mode
        after = measure_layers(self.frozen, held_out)
        if self.frozen is not self.model:
            # A spread-out run is over: the kernels go back to the rest of the model that was given.
            self.model.to(home)  # type: ignore[arg-type]
        seconds = self.earlier + time.perf_counter() - self.start
        loss = place.best_loss
        return DistillResult(
            len(self.history), place.best_step, loss, place.stopped, before, after, self.history, seconds, self.state
        )

    def _train(self, held_out: list[dict[str, Tensor]]) -> _Progress:
        if self.states is not None and not self.config.resume and self.accelerator.is_main_process:
            self.states.check_free(overwrite=False)
        saved = self.states.load() if self.states is not None and self.config.resume else None
        first, place = 0, _Progress()
        if saved is not None and self.started is not None:
            check_same(saved.record.get("fingerprint") or {}, self.started)
            first = saved.record["group"]
            self._put_back(saved)
        for number, layers in enumerate(self.groups):
            if number < first:
                continue
            for loss in layers:
                loss.layer.train().requires_grad_(True)
            trainer = KernelTrainer(self.frozen, layers, self.config, self.accelerator)
            place = self._group(number, trainer, held_out, saved)
            saved = None
            for loss in layers:
                loss.layer.eval().requires_grad_(False)
        return place

    def _group(
        self, number: int, trainer: KernelTrainer, held_out: list[dict[str, Tensor]], saved: RunState | None
    ) -> _Progress:
        """Train one group from its start, or from a saved state in the middle of it."""
        config = self.config
        if saved is None:
            place, best = _Progress(best_loss=trainer.look(held_out, 0)), trainer.snapshot()
        else:
            place = _Progress(**saved.record["progress"])
            best = {name: saved.tensors[f"best/{name}"] for name in trainer.kernels()}
            prefix = "optimizer/"
            moments = {k.removeprefix(prefix): v for k, v in saved.tensors.items() if k.startswith(prefix)}
            trainer.load_optimizer_tensors(moments)
        done = number * config.steps + place.step
        batches = self.data.train_batches(
            done * config.gradient_accumulation, self.accelerator.process_index, self.accelerator.num_processes
        )
        with trainer.interrupts:
            while place.step < config.steps and not place.stopped:
                try:
                    self._step(number, place, trainer, batches, held_out, best)
                    if config.save_every and place.step % config.save_every == 0:
                        self._save(number, place, trainer, best)
                except TrainingError:
                    trainer.restore(best)
                    raise
                except KeyboardInterrupt:
                    # What was learned is kept, unless the step is half done.
                    if (number or place.step) and not trainer.interrupts.held:
                        self._save(number, place, trainer, best)
                    raise
        trainer.restore(best)
        place.stopped = place.stopped or "steps"
        if number == len(self.groups) - 1 and self.started is not None:
            self.state = self._state(number, place, trainer, best)
        return place

    def _step(
        self,
        number: int,
        place: _Progress,
        trainer: KernelTrainer,
        batches: Iterator[dict[str, Tensor]],
        held_out: list[dict[str, Tensor]],
        best: dict[str, Tensor],
    ) -> None:
        """Do one step with all that belongs to it; `place` and `best` are moved on in place."""
        config, step = self.config, place.step + 1
        rate = trainer.step(batches, step)
        losses = {loss.name: loss.mean for loss in trainer.layers}
        look = step % config.eval_every == 0 or step == config.steps
        found = trainer.look(held_out, step) if look else None
        if found is not None and found < place.best_loss:
            place.best_loss, place.best_step, place.looks = found, step, 0
            best |= trainer.snapshot()
        elif found is not None:
            place.looks += 1
            if config.patience and place.looks >= config.patience:
                place.stopped = "early stopping"
        place.step = step
        report = self._report(number, step, losses, found, rate)
        trainer.interrupts.release()
        if self.on_step is not None:
            self.on_step(report)

    def _report(
        self, group: int, step: int, losses: dict[str, float], held_out: float | None, rate: float
    ) -> StepReport:
        steps = self.config.steps
        seconds = self.earlier + time.perf_counter() - self.start
        report = StepReport(group * steps + step, len(self.groups) * steps, losses, held_out, rate, seconds)
        self.history.append(report)
        return report

    def _options(self) -> dict[str, Any]:
        """The options that have to be the same when a run is resumed."""
        free = {"resume", "folder", "keep", "save_every"}
        named = {name: value for name, value in asdict(self.config).items() if name not in free}
        data = {f"data {name}": value for name, value in getattr(self.data, "options", {}).items()}
        data["data"] = getattr(self.data, "description", None)
        return named | {"processes": self.accelerator.num_processes, **data}

    def _save(self, group: int, place: _Progress, trainer: KernelTrainer, best: dict[str, Tensor]) -> None:
        if self.states is not None and self.accelerator.is_main_process:
            state = self._state(group, place, trainer, best)
            self.states.save(state.step, state)

    def _state(self, group: int, place: _Progress, trainer: KernelTrainer, best: dict[str, Tensor]) -> RunState:
        tensors = {f"kernel/{name}": t.detach() for name, t in self._all_kernels().items()}
        tensors |= {f"best/{name}": t for name, t in best.items()}
        tensors |= {f"optimizer/{name}": t for name, t in trainer.optimizer_tensors().items()}
        record = {
            "step": group * self.config.steps + place.step,
            "group": group,
            "progress": asdict(place),
            "history": [asdict(report) for report in self.history],
            "fingerprint": self.started,
        }
        return RunState(record, tensors)

    def _put_back(self, saved: RunState) -> None:
        self.history = [StepReport(**report) for report in saved.record["history"]]
        self.earlier = self.history[-1].seconds if self.history else 0.0
        for name, tensor in self._all_kernels().items():
            tensor.data.copy_(saved.tensors[f"kernel/{name}"])

    def _all_kernels(self) -> dict[str, Tensor]:
        layers: list[LayerLoss] = [loss for group in self.groups for loss in group]
        return {
            f"{loss.name}.{name}": tensor
            for loss in layers
            for name, tensor in loss.layer.state_dict(keep_vars=True).items()
        }


__all__ = ["Batches", "DistillConfig", "DistillResult", "StepReport", "distill"]
