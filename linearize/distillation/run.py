"""A training run as stage one and the alignment have it: parts that are trained one after the other.

Each part ends with the weights that were best on held-out data. A run writes its states on disk, whole or not at all,
and goes on from them to the bit; an interrupt keeps what was learned.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from accelerate import Accelerator
from torch import Tensor, nn

from linearize.checkpoint.fingerprint import check_same
from linearize.distillation.interrupts import Interrupts
from linearize.distillation.state import RunState, StateFolder
from linearize.errors import TrainingError


class Batches(Protocol):
    """What a run needs of a data source; `linearize.data.Source` is one."""

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        """Return batches without end, from batch number `start` on."""

    def holdout_batches(self) -> list[dict[str, Tensor]]:
        """Return the batches that are never trained on."""


class Trainer(Protocol):
    """What trains one part."""

    interrupts: Interrupts

    def evaluate(self, held_out: list[dict[str, Tensor]]) -> float:
        """Return the loss on held-out batches."""

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of what is trained, by name."""

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Put copies back."""

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state, by name."""

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Read what `optimizer_tensors` gave."""


class RunConfig(Protocol):
    """The options that a run reads itself; frozen dataclasses have them."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def folder(self) -> str | None:
        """Where states are kept."""

    @property
    def keep(self) -> int:
        """How many of them."""

    @property
    def resume(self) -> bool:
        """Whether to go on from the newest one."""

    @property
    def save_every(self) -> int | None:
        """Steps between them."""

    @property
    def gradient_accumulation(self) -> int:
        """Batches of a step."""


class Report:
    """What is reported after every step; frozen dataclasses."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    step: int
    steps: int
    losses: dict[str, float]
    held_out: float | None
    learning_rate: float
    seconds: float

    @property
    def left(self) -> float:
        """Seconds left, if it goes on as it did."""
        return self.seconds / self.step * (self.steps - self.step)


@dataclass
class Progress:
    """Where a part stands.

    Attributes:
        step: steps done in it.
        best_step: of these, the one with the best held-out loss.
        best_loss: that loss.
        rises: evaluations in a row that were not better.
        stopped: why the part ended.
    """

    step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    rises: int = 0
    stopped: str = ""

    def better(self, found: float) -> bool:
        """Take an evaluation in, and tell whether it is the best so far."""
        if found < self.best_loss:
            self.best_loss, self.best_step, self.rises = found, self.step, 0
            return True
        self.rises += 1
        return False


TrainerT = TypeVar("TrainerT", bound=Trainer)
ProgressT = TypeVar("ProgressT", bound=Progress)
ReportT = TypeVar("ReportT", bound=Report)
ConfigT = TypeVar("ConfigT", bound=RunConfig)


@dataclass
class Part(Generic[TrainerT, ProgressT]):
    """One part of a run.

    Attributes:
        number: which, from 0.
        before: steps of the parts before it.
        steps: its own.
        trainer: what trains it.
        progress: where it stands.
        best: the best weights so far.
    """

    number: int
    before: int
    steps: int
    trainer: TrainerT
    progress: ProgressT
    best: dict[str, Tensor]


class Run(ABC, Generic[TrainerT, ProgressT, ReportT, ConfigT]):
    """A run; what a step is, and what stands in a state, its children say.

    Attributes:
        history: one report per step.
        states: where states are kept, or None.
        identity: what has to be the same when the run is resumed; empty where the data cannot say what it is and no
            states are asked for.
        state: the last state of a finished run, or None.
    """

    part_name: ClassVar[str]
    """What a state's record calls the number of the part."""
    weights_name: ClassVar[str]
    """What a state calls the weights as they are."""
    report: type[ReportT]
    """Class of the reports."""
    progress: type[ProgressT]
    """Class of the progress."""

    def __init__(
        self, data: Batches, config: ConfigT, on_step: Callable[[ReportT], None] | None, accelerator: Accelerator
    ) -> None:
        self.data, self.config, self.on_step, self.accelerator = data, config, on_step, accelerator
        self.history: list[ReportT] = []
        self.states = None if config.folder is None else StateFolder(config.folder, config.keep)
        self.identity: dict[str, object] = {}
        self.state: RunState | None = None
        self.start, self.earlier = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        """Since the start, earlier parts of a resumed run included."""
        return self.earlier + time.perf_counter() - self.start

    @property
    def identifiable(self) -> bool:
        """Whether a state can say what it is of."""
        return self.states is not None or hasattr(self.data, "digest")

    def options(self) -> dict[str, object]:
        """Return the options that have to be the same when a run is resumed."""
        free = {"resume", "folder", "keep", "save_every"}
        named = {name: value for name, value in asdict(self.config).items() if name not in free}
        named |= {f"data {name}": value for name, value in getattr(self.data, "options", {}).items()}
        return named | {"processes": self.accelerator.num_processes}

    @abstractmethod
    def step(
        self, part: Part[TrainerT, ProgressT], batches: Iterator[dict[str, Tensor]], held_out: list[dict[str, Tensor]]
    ) -> None:
        """Do one step with all that belongs to it: `part` moves on, and `on_step` is called."""

    @abstractmethod
    def weights(self, part: Part[TrainerT, ProgressT]) -> dict[str, Tensor]:
        """Return the weights that a state holds, as they are now."""

    @abstractmethod
    def last_state(self, part: Part[TrainerT, ProgressT]) -> RunState | None:
        """Return the state of the finished run; None where `part` is not its last."""

    def load(self, weights: Mapping[str, Tensor]) -> RunState | None:
        """Read the newest state, if there is one to go on from, and put its weights into the model.

        Raises:
            ConfigError: if the run is not resumed and there are states, or it was started otherwise.
        """
        if self.states is None:
            return None
        if not self.config.resume:
            if self.accelerator.is_main_process:
                self.states.check_free(overwrite=False)
            return None
        saved = self.states.load()
        if saved is None:
            return None
        check_same(saved.record.get("fingerprint") or {}, self.identity)
        self.history = [self.report(**report) for report in saved.record["history"]]
        self.earlier = self.history[-1].seconds if self.history else 0.0
        for name, tensor in weights.items():
            tensor.data.copy_(saved.tensors[f"{self.weights_name}/{name}"])
        return saved

    def begin(
        self, number: int, before: int, steps: int, trainer: TrainerT, held_out: list[dict[str, Tensor]]
    ) -> Part[TrainerT, ProgressT]:
        """Begin a part anew."""
        progress = self.progress(best_loss=trainer.evaluate(held_out))
        return Part(number, before, steps, trainer, progress, trainer.snapshot())

    def go_on(
        self, number: int, before: int, steps: int, trainer: TrainerT, saved: RunState
    ) -> Part[TrainerT, ProgressT]:
        """Go on with a part in the middle of it."""
        # States of older versions count looks.
        record = {"rises" if key == "looks" else key: value for key, value in saved.record["progress"].items()}
        tensors = saved.tensors
        # The state of a finished run may have no copies: its weights are the best.
        copies = {name: f"best/{name}" for name in trainer.snapshot()}
        best = {
            name: tensors[copy if copy in tensors else f"{self.weights_name}/{name}"] for name, copy in copies.items()
        }
        prefix = "optimizer/"
        trainer.load_optimizer_tensors({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        return Part(number, before, steps, trainer, self.progress(**record), best)

    def train(self, part: Part[TrainerT, ProgressT], held_out: list[dict[str, Tensor]]) -> ProgressT:
        """Train a part to its end; the model then has its best weights."""
        config, progress, trainer = self.config, part.progress, part.trainer
        batches = self.data.train_batches(
            (part.before + progress.step) * config.gradient_accumulation,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        with trainer.interrupts:
            while progress.step < part.steps and not progress.stopped:
                try:
                    self.step(part, batches, held_out)
                    if config.save_every and progress.step % config.save_every == 0:
                        self._save(part)
                except TrainingError:
                    trainer.restore(part.best)
                    raise
                except KeyboardInterrupt:
                    # What was learned is kept, unless the step is half done.
                    if (part.number or progress.step) and not trainer.interrupts.held:
                        self._save(part)
                    raise
        trainer.restore(part.best)
        progress.stopped = progress.stopped or "steps"
        if self.identity:
            self.state = self.last_state(part)
        return progress

    def finish_step(self, report: ReportT, trainer: TrainerT) -> None:
        """End a step: write its report down, and hand it on."""
        self.history.append(report)
        trainer.interrupts.release()
        if self.on_step is not None:
            self.on_step(report)

    def _save(self, part: Part[TrainerT, ProgressT]) -> None:
        if self.states is not None and self.accelerator.is_main_process:
            state = self.state_of(part)
            self.states.save(state.step, state)

    def state_of(self, part: Part[TrainerT, ProgressT]) -> RunState:
        """Return everything that a run needs to go on in the middle of a part."""
        tensors = {f"{self.weights_name}/{name}": tensor for name, tensor in self.weights(part).items()}
        tensors |= {f"best/{name}": tensor for name, tensor in part.best.items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in part.trainer.optimizer_tensors().items()}
        return RunState(self.record(part), tensors)

    def record(self, part: Part[TrainerT, ProgressT]) -> dict[str, object]:
        """Return the plain data of a state."""
        return {
            "step": part.before + part.progress.step,
            self.part_name: part.number,
            "progress": asdict(part.progress),
            "history": [asdict(report) for report in self.history],
            "fingerprint": self.identity,
        }


@contextlib.contextmanager
def frozen(*models: nn.Module) -> Iterator[None]:
    """Freeze models while the block runs, and put modes and gradients' flags back afterwards."""
    flags = {p: p.requires_grad for model in models for p in model.parameters()}
    modes = {m: m.training for model in models for m in model.modules()}
    try:
        for model in models:
            model.eval().requires_grad_(False)
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
            parameter.grad = None
        for module, mode in modes.items():
            module.training = mode
