"""The training loop of stage one, the alignment and the kernel search: parts that are trained one after the other.

Each part ends with the weights that were best on held-out data. A run writes complete states to disk
(`training.states`) and resumes from them bit for bit; an interrupt keeps what was learned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.checkpoint.fingerprint import BATCHES, check_same, fingerprint
from linearize.checkpoint.provenance import Provenance
from linearize.conversion.plan import fading_layers, set_trained_length
from linearize.core.errors import ConfigError, TrainingError
from linearize.core.registry import Values
from linearize.modeling.model import is_linearized
from linearize.training.config import RunConfig
from linearize.training.processes import Interrupts
from linearize.training.states import RunState, StateFolder, of_size

Number = TypeVar("Number", int, float, list[float], list[int])


class Batches(Protocol):
    """A data source for a run, such as `linearize.data.Source`."""

    def train_batches(self, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[dict[str, Tensor]]:
        """Return endless batches, beginning with number `start`."""

    def holdout_batches(self) -> list[dict[str, Tensor]]:
        """Return the held-out batches."""


class PartTrainer(ABC):
    """Trains one part.

    Attributes:
        accelerator: an Accelerate object.
        optimizer: AdamW of the trained tensors; each of its groups has a `peak` rate and a `warmup` (share of the
            steps).
        interrupts: held from when a step starts to change these tensors until it ends.
        sharded: whether each process has a part of these tensors (FSDP).
    """

    sharded = False

    def __init__(self, accelerator: Accelerator, groups: list[Values], **options: Any) -> None:
        self.accelerator, self.interrupts = accelerator, Interrupts()
        # A search may have nothing to train.
        self.optimizer = torch.optim.AdamW(groups or [{"params": []}], **options)

    @abstractmethod
    def trained(self) -> dict[str, Tensor]:
        """Return the trained tensors by name, not copied."""

    def set_rates(self, step: int, steps: int, factor: float = 1.0) -> None:
        """Set the rates of step number `step` (from 1), times `factor`: a linear rise, then a cosine to zero."""
        for group in self.optimizer.param_groups:
            rise = max(1, round(steps * group["warmup"]))
            if step <= rise:
                share = step / rise
            else:
                share = 0.5 * (1 + math.cos(math.pi * (step - 1 - rise) / max(1, steps - rise)))
            group["lr"] = factor * group["peak"] * share

    def reduce(self, values: Tensor) -> Tensor:
        """Add up values over the processes, which together compute one step."""
        return values if self.accelerator.num_processes == 1 else self.accelerator.reduce(values, "sum")

    def reduce_numbers(self, numbers: list[Number]) -> list[Number]:
        """Add up plain numbers, or lists of them, over the processes."""
        values = torch.tensor(numbers, dtype=torch.float64)
        if self.accelerator.num_processes > 1:
            values = self.reduce(values.to(self.accelerator.device))
        return list(values.tolist())

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up gradients over several processes."""
        for parameter in parameters:
            parameter.grad = self.reduce(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of the trained tensors."""
        return {name: tensor.detach().clone() for name, tensor in self.trained().items()}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Copy a snapshot back into the trained tensors."""
        for name, tensor in self.trained().items():
            tensor.copy_(of_size(snapshot[name], tensor))

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's moments by name."""
        state = self.optimizer.state_dict()["state"]
        return {f"{index}.{key}": value for index, values in state.items() for key, value in values.items()}

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors that `optimizer_tensors` returned; those with other names are ignored."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, dot, key = name.partition(".")
            if dot:
                moment = of_size(tensor, parameters[int(index)]) if tensor.ndim else tensor
                state.setdefault(int(index), {})[key] = moment
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})


def check_inputs(stage: str, model: nn.Module, data: object) -> None:
    """Check the arguments of stage one and the alignment.

    Raises:
        ConfigError: if the model is not converted, or the data gives no batches.
    """
    if not is_linearized(model):
        raise ConfigError(f"got {type(model).__name__}, expected a converted model; call linearize.convert first")
    check_batches(stage, data)


def check_batches(stage: str, data: object) -> None:
    """Check that data gives batches.

    Raises:
        ConfigError: if it does not.
    """
    if not hasattr(data, "train_batches"):
        raise ConfigError(
            f"{stage}: got data of type {type(data).__name__}, expected something with train_batches and "
            "holdout_batches; linearize.data.load_source makes it from any data set"
        )


@dataclass(frozen=True)
class Report:
    """The report of a step.

    Attributes:
        step: steps done, over all parts.
        steps: steps planned.
        losses: the losses by layer, block or term.
        held_out: the held-out loss, at the steps that evaluate it.
        learning_rate: learning rate of the first group of weights.
        seconds: seconds of training, including those before a resumed run was interrupted.
        tokens: tokens read in that time, by all processes and without padding; 0 if the rows are not text.
    """

    step: int
    steps: int
    losses: dict[str, float]
    held_out: float | None
    learning_rate: float
    seconds: float
    tokens: int = field(default=0, kw_only=True)

    @property
    def pace(self) -> float:
        """Seconds per step so far."""
        return self.seconds / self.step

    @property
    def left(self) -> float:
        """Seconds left at that pace."""
        return self.pace * (self.steps - self.step)


def tokens_in(batch: Mapping[str, Tensor]) -> int:
    """Return the tokens of a batch of texts, without padding; 0 for other batches."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None:
        return 0
    return int(mask.count_nonzero()) if mask is not None and mask.shape == ids.shape else ids.numel()


@dataclass
class Progress:
    """Progress of a part.

    Attributes:
        step: steps of the part that are done.
        best_step: the step with the best held-out loss.
        best_loss: the best held-out loss.
        rises: consecutive evaluations without a better loss.
        halved: how often the rate was halved.
        stopped: why the part ended.
    """

    step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    rises: int = 0
    halved: int = 0
    stopped: str = ""

    def better(self, loss: float) -> bool:
        """Record a held-out loss, and tell whether it is the best so far."""
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.rises = loss, self.step, 0
            return True
        self.rises += 1
        return False


class Run(ABC):
    """A run; subclasses define a step and the contents of a state.

    Attributes:
        history: one report per step.
        states: the folder of states, or None.
        identity: fingerprint that must be the same when the run is resumed; empty without states if the data cannot be
            identified.
        state: the last state of a finished run, or None.
        number: number of the part that is being trained, from 0.
        before: steps of the parts before it.
        steps: steps of this part.
        trainer: the trainer of this part.
        progress: the progress of this part.
        best_weights: the best weights of this part so far.
        tokens: tokens read so far.
    """

    part_name: ClassVar[str]
    """Name of the part's number in a state's record."""
    weights_name: ClassVar[str]
    """Name of the current weights in a state."""
    report: type[Report]
    """Class of the reports."""
    trainer: Any = None
    progress: Progress
    best_weights: dict[str, Tensor]

    def __init__(
        self, data: Batches, config: RunConfig, on_step: Callable[[Any], None] | None, accelerator: Accelerator
    ) -> None:
        self.data, self.config, self.on_step, self.accelerator = data, config, on_step, accelerator
        self.history: list[Any] = []
        self.states = None if config.folder is None else StateFolder(config.folder, config.keep)
        self.identity: dict[str, object] = {}
        self.state: RunState | None = None
        self.start, self.earlier, self.tokens = time.perf_counter(), 0.0, 0

    @property
    def seconds(self) -> float:
        """Seconds since the first part began, including those before a resumed run was interrupted."""
        return self.earlier + time.perf_counter() - self.start

    def identify(self, model: nn.Module) -> None:
        """Set `identity`, before the model's first step: states need it, and data with a `digest` allows it."""
        if self.states is not None or hasattr(self.data, "digest"):
            self.identity = fingerprint(model=model, data=self.data, options=self.options())

    def options(self) -> dict[str, object]:
        """Return the options that must be the same when a run is resumed."""
        free = {"resume", "folder", "keep", "save_every"}
        named = {name: value for name, value in asdict(self.config).items() if name not in free}
        named |= {f"data {name}": value for name, value in getattr(self.data, "options", {}).items()}
        return named | {"processes": self.accelerator.num_processes}

    @abstractmethod
    def step(self, batches: Iterator[dict[str, Tensor]], held_out: list[dict[str, Tensor]]) -> None:
        """Do one step or more: train, advance `progress`, and finish each with `finish_step`."""

    def train_batches(self, start: int = 0) -> Iterator[dict[str, Tensor]]:
        """Return this process's endless training batches, beginning with number `start`."""
        return self.data.train_batches(start, self.accelerator.process_index, self.accelerator.num_processes)

    def _count(self, batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        for batch in batches:
            self.tokens += tokens_in(batch) * self.accelerator.num_processes
            yield batch

    def weights(self) -> dict[str, Tensor]:
        """Return the current weights for a state."""
        return self.trainer.snapshot()

    def last_state(self) -> RunState | None:
        """Return the state of the finished run; None unless the part is the last one. Not asked under FSDP."""
        return self.current_state()

    def load(self, weights: Mapping[str, Tensor]) -> RunState | None:
        """Read the newest state of a run to resume, if there is one, and put its weights into the model.

        Raises:
            ConfigError: if there are states but `resume` is false, if the run was started differently, or if only some
                processes find its states.
        """
        if self.states is None:
            return None
        if not self.config.resume:
            if self.accelerator.is_main_process:
                self.states.check_free(overwrite=False)
            return None
        saved = self.states.load()
        if self.accelerator.num_processes > 1:
            found = set(gather_object([0 if saved is None else saved.step]))
            if len(found) > 1:
                steps = " and ".join(map(str, sorted(found)))
                raise ConfigError(
                    f"resume: got states of the steps {steps} in different processes (0: none), expected the same; "
                    f"all machines must share the disk of {str(self.states.folder)!r}, or have copies of its states"
                )
        if saved is None:
            return None
        with self.states.reading():
            check_same(saved.record.get("fingerprint") or {}, self.identity)
            self.history = [self.report(**report) for report in saved.record["history"]]
            if self.history:
                self.earlier, self.tokens = self.history[-1].seconds, self.history[-1].tokens
            # All are checked before the first is changed.
            stored = {name: of_size(saved.tensors[f"{self.weights_name}/{name}"], x) for name, x in weights.items()}
            for name, tensor in weights.items():
                tensor.data.copy_(stored[name])
        return saved

    def part_of(self, saved: RunState) -> int:
        """Return the number of the part in which a state was written."""
        assert self.states is not None
        with self.states.reading():
            return int(saved.record[self.part_name])

    def begin(
        self,
        number: int,
        before: int,
        steps: int,
        trainer: PartTrainer,
        saved: RunState | None,
        start: float = math.inf,
    ) -> None:
        """Begin a part, or resume it from a state.

        Args:
            number: number of the part.
            before: steps of the parts before it.
            steps: steps of the part.
            trainer: the trainer of the part.
            saved: state to resume from; None for a new part.
            start: a new part's held-out loss before its first step.
        """
        if self.trainer is None:
            # What was measured so far says nothing about the time of a step.
            self.start = time.perf_counter()
        self.number, self.before, self.steps, self.trainer = number, before, steps, trainer
        self.best_weights = trainer.snapshot()
        if saved is None:
            self.progress = Progress(best_loss=start)
            return
        assert self.states is not None
        with self.states.reading():
            # States of older versions say "looks" instead of "rises", and have a "factor", which follows from "halved".
            record = {"rises" if key == "looks" else key: value for key, value in saved.record["progress"].items()}
            record.pop("factor", None)
            self.progress = Progress(**record)
            tensors = saved.tensors
            # The state of a finished run may lack these copies, because its current weights are the best.
            copies = {name: f"best/{name}" for name in self.best_weights}
            self.best_weights = {
                name: of_size(
                    tensors[copy if copy in tensors else f"{self.weights_name}/{name}"], self.best_weights[name]
                )
                for name, copy in copies.items()
            }
            start = len("optimizer/")
            trainer.load_optimizer_tensors({k[start:]: v for k, v in tensors.items() if k.startswith("optimizer/")})

    def train(self, held_out: list[dict[str, Tensor]]) -> None:
        """Train the part to its end and restore its best weights."""
        config, progress, trainer = self.config, self.progress, self.trainer
        batches = self._count(self.train_batches((self.before + progress.step) * config.gradient_accumulation))
        with trainer.interrupts:
            try:
                while progress.step < self.steps and not progress.stopped:
                    self.step(batches, held_out)
            except TrainingError:
                trainer.restore(self.best_weights)
                raise
            except KeyboardInterrupt:
                # Keep what was learned, unless the step is half done. To gather shards, all processes would have to
                # agree on the step.
                if (self.number or progress.step) and not trainer.interrupts.held and not trainer.sharded:
                    self.save()
                raise
        trainer.restore(self.best_weights)
        progress.stopped = progress.stopped or "steps"
        # A result that cannot be written is kept by the main process alone, which has only a part of a sharded one.
        if self.identity and not trainer.sharded:
            self.state = self.last_state()

    def save_if_due(self) -> None:
        """Write a state if the options ask for one after this step."""
        if self.config.save_every and self.progress.step % self.config.save_every == 0:
            self.save()

    def finish_step(self, report: Report) -> None:
        """Finish a step: record its report, pass it to `on_step`, and save if that is due."""
        report = dataclasses.replace(report, tokens=self.tokens)
        self.history.append(report)
        self.trainer.interrupts.release()
        if self.on_step is not None:
            self.on_step(report)
        self.save_if_due()

    def save(self) -> None:
        """Write a state, in the main process of a run with states."""
        if self.states is None or not (self.trainer.sharded or self.accelerator.is_main_process):
            return
        state = self.current_state()
        self.states.save(state.step, state)

    def current_state(self) -> RunState:
        """Return everything that a run needs to resume in the middle of a part."""
        tensors = {f"{self.weights_name}/{name}": tensor for name, tensor in self.weights().items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best_weights.items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in self.trainer.optimizer_tensors().items()}
        return RunState(self.record(), tensors)

    def record(self) -> dict[str, object]:
        """Return the plain data of a state."""
        return {
            "step": self.before + self.progress.step,
            self.part_name: self.number,
            "progress": asdict(self.progress),
            "history": [asdict(report) for report in self.history],
            "fingerprint": self.identity,
        }


def longest_row(batches: Iterable[Mapping[str, Tensor]]) -> int | None:
    """Return the tokens of the longest row without padding; None if the batches hold no text."""
    longest = 0
    for batch in batches:
        if "input_ids" not in batch:
            return None
        mask = batch.get("attention_mask")
        longest = max(longest, batch["input_ids"].shape[1] if mask is None else int(mask.sum(dim=1).max()))
    return longest or None


def fade_beyond(model: PreTrainedModel, data: Any) -> None:
    """Let a causal hybrid fade only beyond the longest row of this and all earlier stages, before it reads any row.

    Args:
        model: the model that is about to be trained.
        data: batches, or a task's rows. Of batches without a `row_length`, the held-out ones and the first `BATCHES`
            others count.
    """
    if not is_linearized(model) or not fading_layers(model):
        return
    longest = getattr(data, "row_length", 0)
    if hasattr(data, "holdout_batches"):
        first = [] if longest else itertools.islice(data.train_batches(), BATCHES)
        longest = max(longest, longest_row(itertools.chain(data.holdout_batches(), first)) or 0)
    earlier = Provenance(model.config.linearize.get("provenance")).longest_row_length
    if longest := max(longest, earlier or 0):
        set_trained_length(model, longest)


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Freeze a model temporarily, then restore its modules' modes and `requires_grad` flags."""
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval().requires_grad_(False)
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
            parameter.grad = None
        for module, mode in modes.items():
            module.training = mode
