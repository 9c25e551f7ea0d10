"""Align a whole converted model with its original: first every block under the teacher's inputs, then end to end.

Stage one matches attention weights only: it sees neither how a layer's errors affect later layers nor the corrections
that the layer's own weights allow. The alignment trains the student to reproduce the teacher's hidden states, pooled
output and logits, on unlabelled data. The student never ends up worse than it began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.attention.parts import HEADS, NEAR, ROUTED, SCALED, check_parts
from linearize.checkpoint.fingerprint import weights_digest
from linearize.checkpoint.loading import move
from linearize.core.errors import ConfigError, TrainingError
from linearize.training.adapters import LoraConfig, add_lora, merge_lora
from linearize.training.alignment.config import BLOCKWISE, AlignConfig
from linearize.training.alignment.objective import Closeness, Objective, Share, measure, summed
from linearize.training.alignment.pair import find_blocks, make_teacher
from linearize.training.precision import HALF
from linearize.training.processes import autocast
from linearize.training.run import Batches, Report, Run, Trainer, check_inputs, fade_beyond, frozen
from linearize.training.sharding import make_accelerator
from linearize.training.states import RunState


def trained_parameters(student: nn.Module, blocks: Mapping[str, str], train: str) -> dict[str, nn.Parameter]:
    """Return the trained weights by name: kernels always, others according to the option `train`."""
    modules: dict[str, Iterable[str]] = {"attention": blocks.values(), "blocks": blocks}
    within = tuple(f"{name}." for name in modules.get(train, ()))
    return {
        name: parameter
        for name, parameter in student.named_parameters()
        if is_kernel(name) or name.startswith(within) or (train == "lora" and "lora_" in name)
    }


def is_kernel(name: str) -> bool:
    """Tell whether a parameter belongs to a kernel."""
    return ".linear_attention." in f".{name}"


SCALES = tuple(2.0**power for power in (16, 12, 8, 4, 0))
LOSS = "loss"
"""The name of the loss among a step's terms."""


class Diverged(Exception):
    """A loss or gradient is NaN or infinite; the message says which and where."""


class AlignTrainer(Trainer):
    """Trains one phase.

    Attributes:
        objective: the error that is minimised.
        parameters: the trained weights, by name.
        factor: factor of all rates; halved when the held-out loss rises.
        scales: factors of the loss, tried in order until the gradient is finite; in fp16 its small values would be 0.
    """

    def __init__(
        self,
        objective: Objective,
        parameters: dict[str, nn.Parameter],
        accelerator: Accelerator,
        phase: str,
        steps: int,
    ) -> None:
        self.objective, self.parameters, self.config = objective, parameters, objective.config
        self.phase, self.steps, self.factor = phase, steps, 1.0
        in_fp16 = "fp16" in (self.config.precision, accelerator.mixed_precision)
        in_fp16 = in_fp16 or any(parameter.dtype == torch.float16 for parameter in parameters.values())
        self.scales = SCALES if in_fp16 else SCALES[-1:]
        # Weights in half precision would lose small updates, so updates are added up in fp32 copies.
        self.masters = {
            name: nn.Parameter(p.detach().float()) if p.dtype in HALF else p for name, p in self.parameters.items()
        }
        kernels = [p for name, p in self.masters.items() if is_kernel(name)]
        rest = [p for name, p in self.masters.items() if not is_kernel(name)]
        rates = [(kernels, self.config.kernel_learning_rate), (rest, self.config.learning_rate)]
        groups = [{"params": members, "peak": rate, "warmup": self.config.warmup} for members, rate in rates if members]
        super().__init__(accelerator, groups, weight_decay=self.config.weight_decay)

    def step(self, batches: Iterator[dict[str, Tensor]], step: int) -> tuple[dict[str, float], float, float]:
        """Do optimizer step number `step` (from 1).

        Returns:
            The terms, the loss, and the rate of the first group.

        Raises:
            Diverged: if a loss or gradient is not finite; then no weight has changed.
        """
        self.set_rates(step, self.steps, self.factor)
        given = [next(batches) for _ in range(self.config.gradient_accumulation)]
        micro_batches = send_to_device(given, self.accelerator.device, non_blocking=True)
        for scale in self.scales:
            terms, norm = self._gradient(micro_batches, step, scale)
            if math.isfinite(norm):
                break
        else:
            raise Diverged(f"the gradient became {norm} at step {step}")
        self.interrupts.hold()
        self.optimizer.step()
        self._write_back()
        return terms, terms.pop(LOSS), float(self.optimizer.param_groups[0]["lr"])

    def _gradient(self, batches: list[dict[str, Tensor]], step: int, scale: float) -> tuple[dict[str, float], float]:
        """Compute the gradient of a step, of the loss times `scale`, undo that factor, and clip the gradient.

        Returns:
            The step's terms, and the norm of the gradient before it was clipped.

        Raises:
            Diverged: if a term is not finite.
        """
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None
        terms: dict[str, float] = summed(partial(self._backward, scale), batches, self.reduce_numbers)
        if self.accelerator.num_processes > 1:
            # The processes compute one step together.
            self.reduce_gradients(self.parameters.values())
            terms = dict(zip(terms, self.reduce_numbers(list(terms.values())), strict=True))
        for name, value in terms.items():
            if not math.isfinite(value):
                raise Diverged(f"the {'loss' if name == LOSS else f'error of {name}'} became {value} at step {step}")
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
            if scale != 1 and master.grad is not None:
                master.grad.div_(scale)
        return terms, float(nn.utils.clip_grad_norm_(self.masters.values(), self.config.max_grad_norm))

    def _backward(self, scale: float, batch: Mapping[str, Tensor], share: Share) -> dict[str, float]:
        """Compute the gradient of a batch, times `scale`; return its terms, and `LOSS` last."""
        share = (scale * share[0], scale * share[1])
        with autocast(self.accelerator, self.config.precision):
            if self.phase == BLOCKWISE:
                errors = self.objective.blockwise(batch, share, train=True)
                terms = {**errors, LOSS: sum(errors.values()) / max(len(errors), 1)}
                return {name: value / scale for name, value in terms.items()}
            found = self.objective.end_to_end(batch, share)
            loss = self.objective.total(found)
        loss.backward()
        return {name: float(value.detach()) / scale for name, value in [*found.items(), (LOSS, loss)]}

    def evaluate(self, held_out: list[dict[str, Tensor]]) -> float:
        """Return the phase's loss on held-out batches."""
        with autocast(self.accelerator, self.config.precision):
            if self.phase == BLOCKWISE:
                errors = summed(partial(self.objective.blockwise, train=False), held_out)
                return sum(errors.values()) / max(len(errors), 1)
            return measure(self.objective, held_out).loss

    def trained(self) -> dict[str, Tensor]:
        """Return the trained weights; for those in half precision, their fp32 copies."""
        return dict(self.masters)

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        super().restore(snapshot)
        self._write_back()

    @torch.no_grad()
    def _write_back(self) -> None:
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)


@dataclass(frozen=True)
class AlignStep(Report):
    """The report of a step: `losses` are the terms by block; end to end also "output", "pooled" and "logits/...".

    Attributes:
        phase: "blockwise" or "end to end".
        loss: the loss that is minimised.
        stage: "alignment".
    """

    phase: str
    loss: float
    stage: ClassVar[str] = "alignment"


@dataclass
class AlignResult:
    """The result of the alignment.

    Attributes:
        steps: optimizer steps done.
        best_step: the step whose weights were kept; 0 for the initial weights.
        stopped: why it ended ("steps", "early stopping").
        before: closeness of student and teacher before the alignment, on the held-out batches.
        after: the same after the alignment.
        history: one record per step.
        seconds: duration of the training itself.
        state: state from which a resumed run returns this result at once; None if nothing was trained, or if the data
            cannot be identified (it has no `digest`) and the run keeps no states.
    """

    steps: int
    best_step: int
    stopped: str
    before: Closeness
    after: Closeness
    history: list[AlignStep] = field(default_factory=list)
    seconds: float = 0.0
    state: RunState | None = None


def align(
    student: PreTrainedModel,
    data: Batches,
    config: AlignConfig | None = None,
    *,
    teacher: PreTrainedModel | None = None,
    on_step: Callable[[AlignStep], None] | None = None,
    accelerator: Accelerator | None = None,
) -> AlignResult:
    """Bring a converted model close to its original, in place.

    Args:
        student: a converted model.
        data: the source of batches, e.g. `linearize.data.load_source(...)`; labels are not used.
        config: options.
        teacher: the original; it is copied and not changed. None for the student's own weights under softmax, which
            are the original's unless the student was aligned or tuned before.
        on_step: called after every step (progress bars, logs).
        accelerator: an Accelerate object; None makes one.

    Returns:
        The result, with the closeness of student and teacher before and after, on held-out batches.

    Raises:
        ConfigError: if the student is not converted, the teacher does not fit it, or an option does not fit.
        DataError: if there are no held-out batches.
        TrainingError: if the run diverges repeatedly; the student then keeps its best earlier weights.
    """
    config = config or AlignConfig()
    check_inputs("alignment", student, data)
    for layer in linear_attentions(student).values():
        check_parts(layer.hybrid, NEAR | ROUTED | SCALED | HEADS, "alignment")
    accelerator = accelerator or make_accelerator(student)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ConfigError(
            "alignment: got FSDP, expected one process or plain data parallelism (DDP); skip the alignment "
            "(--align-steps 0), or launch without FSDP"
        )
    move(student, accelerator.device)
    trained = trained_parameters(student, find_blocks(student), config.train)
    same = [name for name, _ in student.named_parameters() if name not in trained]
    teacher = make_teacher(student, teacher, shared=config.train == "kernels", frozen=same)
    return _Run(data, config, on_step, accelerator).run(student, teacher)


class _Run(Run):
    """One alignment: its phases one after the other.

    Attributes:
        kept: the step whose weights the phases before this one kept.
    """

    part_name, weights_name, report = "phase", "trained", AlignStep
    config: AlignConfig
    trainer: AlignTrainer
    objective: Objective
    kept = 0

    def run(self, student: PreTrainedModel, teacher: PreTrainedModel) -> AlignResult:
        """Measure, train, measure again."""
        config = self.config
        self.objective = Objective(student, teacher, config)
        self.identify(student)
        fade_beyond(student, self.data)
        held_out = send_to_device(self.data.holdout_batches(), self.accelerator.device)
        with frozen(student):
            self.objective.measure_scales(held_out)
            before = measure(self.objective, held_out)
            if not config.phases():
                return AlignResult(0, 0, "steps", before, before)
            if config.train == "lora":
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(config.seed)
                    add_lora(student, LoraConfig(r=config.lora_rank, alpha=2.0 * config.lora_rank))
                student.requires_grad_(False)
            try:
                parameters = trained_parameters(student, self.objective.blocks, config.train)
                for parameter in parameters.values():
                    parameter.requires_grad_(True)
                first = {name: parameter.detach().clone() for name, parameter in parameters.items()}
                saved = self.load(parameters)
                done = 0
                for number, (phase, steps) in enumerate(config.phases()):
                    if saved is None or number >= self.part_of(saved):
                        trainer = AlignTrainer(self.objective, parameters, self.accelerator, phase, steps)
                        start = math.inf if saved is not None else trainer.evaluate(held_out)
                        self.begin(number, done, steps, trainer, saved, start)
                        if saved is not None:
                            # A state has the fp32 copies of weights in half precision.
                            trainer.restore({name: saved.tensors[f"{self.weights_name}/{name}"] for name in parameters})
                            trainer.factor = 0.5**self.progress.halved
                            self.kept = int(saved.record.get("kept", done))
                        saved = None
                        self.train(held_out)
                        if self.progress.best_step:
                            self.kept = done + self.progress.best_step
                    done += steps
                seconds, best_step = self.seconds, self.kept
                after = measure(self.objective, held_out)
                if not after.loss < before.loss:
                    trainer.restore(first)
                    best_step, after = 0, before
            finally:
                if config.train == "lora":
                    merge_lora(student)
        stopped = self.progress.stopped
        return AlignResult(len(self.history), best_step, stopped, before, after, self.history, seconds, self.state)

    def step(self, batches: Iterator[dict[str, Tensor]], held_out: list[dict[str, Tensor]]) -> None:
        config, trainer, progress, step = self.config, self.trainer, self.progress, self.progress.step + 1
        evaluates = step % config.eval_every == 0 or step == self.steps
        try:
            terms, loss, rate = trainer.step(batches, step)
            held_out_loss = trainer.evaluate(held_out) if evaluates else None
            if held_out_loss is not None and not math.isfinite(held_out_loss):
                raise Diverged(f"the held-out loss became {held_out_loss} at step {step}")
        except Diverged as reason:
            trainer.restore(self.best_weights)
            if progress.halved >= config.patience:
                raise TrainingError(
                    f"alignment ({trainer.phase}): {reason}, even at a halved rate; the model keeps its best "
                    "earlier state: lower the rates, train less (train=kernels), or check the data for broken inputs"
                ) from None
            self._slow_down()
            progress.step = step
            trainer.interrupts.release()
            return
        progress.step = step
        if held_out_loss is not None and progress.better(held_out_loss):
            self.best_weights = trainer.snapshot()
        elif held_out_loss is not None and progress.rises >= 2:
            # After two losses that are worse than the best one, return to it at half the rate.
            if progress.halved >= config.patience:
                progress.stopped = "early stopping"
            else:
                trainer.restore(self.best_weights)
                self._slow_down()
        done = self.before + step
        self.finish_step(AlignStep(done, config.steps, terms, held_out_loss, rate, self.seconds, trainer.phase, loss))

    def _slow_down(self) -> None:
        progress, trainer = self.progress, self.trainer
        progress.halved, progress.rises = progress.halved + 1, 0
        trainer.factor = 0.5**progress.halved
        # The old moments would drive the weights in the same direction again.
        trainer.optimizer.state.clear()

    def options(self) -> dict[str, object]:
        return super().options() | {"teacher weights": weights_digest(self.objective.teacher, kernel=False)}

    def record(self) -> dict[str, object]:
        return super().record() | {"kept": self.kept}

    def last_state(self) -> RunState | None:
        if self.number < len(self.config.phases()) - 1:
            return None
        # Only the weights, which are the best ones by now.
        return RunState(self.record(), {f"trained/{name}": tensor for name, tensor in self.weights().items()})
