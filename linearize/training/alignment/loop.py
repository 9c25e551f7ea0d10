"""Align a whole converted model with its original: first every block under the teacher's inputs, then end to end.

Stage one matches attention weights only: it sees neither how a layer's errors affect later layers nor the corrections
that the layer's own weights allow. The alignment trains the student to reproduce the teacher's hidden states, pooled
output and logits, on unlabelled data. The student never ends up worse than it began.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from linearize.attention.interface import linear_attentions
from linearize.attention.parts import HEADS, NEAR, ROUTED, SCALED, check_parts
from linearize.checkpoint.fingerprint import weights_digest
from linearize.checkpoint.loading import move
from linearize.core.errors import ConfigError, TrainingError
from linearize.core.signatures import known_names
from linearize.training.adapters import LoraConfig, add_lora, merge_lora
from linearize.training.alignment.config import AlignConfig
from linearize.training.alignment.objective import Closeness, Objective, measure
from linearize.training.alignment.pair import find_blocks, make_teacher
from linearize.training.alignment.trainer import LOSS, AlignTrainer, Diverged, is_kernel
from linearize.training.precision import HALF, in_fp32, passes_of, unchanged
from linearize.training.processes import autocast, check_fsdp
from linearize.training.run import Batches, Report, Run, check_inputs, fade_beyond, frozen
from linearize.training.sharding import Shards, check_settings, check_tied, frozen_copy, make_accelerator, start_fsdp
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
        state: state from which a resumed run returns this result at once; None if nothing was trained, under FSDP, or
            if the data cannot be identified (it has no `digest`) and the run keeps no states.
    """

    steps: int
    best_step: int
    stopped: str
    before: Closeness
    after: Closeness
    history: list[AlignStep] = field(default_factory=list)
    seconds: float = 0.0
    state: RunState | None = None


@known_names(AlignConfig)
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
        ConfigError: if the student is not converted, the teacher does not fit it, nothing would be trained, or an
            option does not fit.
        DataError: if there are no held-out batches.
        TrainingError: if the run diverges repeatedly; the student then keeps its best earlier weights.
    """
    config = config or AlignConfig()
    check_inputs("alignment", student, data)
    for layer in linear_attentions(student).values():
        check_parts(layer.hybrid, NEAR | ROUTED | SCALED | HEADS, "alignment")
    accelerator = accelerator or make_accelerator(student)
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded:
        check_fsdp("alignment", accelerator.state.fsdp_plugin.fsdp_version)
        check_settings("alignment", config.precision)
        check_tied(student)
        start_fsdp(accelerator, {type(student.get_submodule(name)).__name__ for name in find_blocks(student)})
    else:
        move(student, accelerator.device)
    trained = trained_parameters(student, find_blocks(student), config.train)
    if not trained and config.train != "lora" and config.phases():
        raise ConfigError(
            f"alignment: got train={config.train}, but these kernels have nothing to learn; train blocks, attention or "
            "lora, or leave the alignment out (0 steps)"
        )
    same = [name for name, _ in student.named_parameters() if name not in trained and not sharded]
    # Under FSDP the student itself is not trained, but a copy.
    teacher = make_teacher(student, teacher, shared=sharded or config.train == "kernels", frozen=same)
    return _Run(data, config, on_step, accelerator).run(student, teacher)


class _Run(Run, TrainerCallback):
    """One alignment: its phases one after the other.

    Attributes:
        shards: under FSDP, what is trained in place of the student.
        kept: the step whose weights the phases before this one kept.
        rate: the rate of the first group at the last step.
    """

    part_name, weights_name, report = "phase", "trained", AlignStep
    config: AlignConfig
    trainer: AlignTrainer
    teacher: PreTrainedModel
    held_out: list[dict[str, Tensor]]
    shards: Shards | None = None
    kept, rate = 0, 0.0

    def run(self, student: PreTrainedModel, teacher: PreTrainedModel) -> AlignResult:
        """Measure, train, measure again."""
        config, self.teacher = self.config, teacher
        self.sharded = self.accelerator.distributed_type == DistributedType.FSDP
        self.identify(student)
        fade_beyond(student, self.data)
        held_out = self.held_out = send_to_device(self.data.holdout_batches(), self.accelerator.device)
        with frozen(student), unchanged(student):
            shown = self.placed(student)
            objective = Objective(shown, shown if teacher is student else self.placed(teacher), config)
            objective.measure_scales(held_out)
            before = measure(objective, held_out)
            if not config.phases():
                return AlignResult(0, 0, "steps", before, before)
            if config.train == "lora":
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(config.seed)
                    add_lora(student, LoraConfig(r=config.lora_rank, alpha=2.0 * config.lora_rank))
                student.requires_grad_(False)
            try:
                trained = trained_parameters(student, objective.blocks, config.train)
                for parameter in trained.values():
                    parameter.requires_grad_(True)
                # Under FSDP the student stays as it is until the end.
                first = {} if self.sharded else {name: x.detach().clone() for name, x in trained.items()}
                with self.held(student, objective) as passes:
                    self.train_phases(objective, passes)
                seconds, best_step = self.seconds, self.kept
                after = measure(objective, held_out)
                if not after.loss < before.loss:
                    for name, weight in first.items():
                        trained[name].data.copy_(weight)
                    best_step, after = 0, before
                elif self.shards is not None:
                    self.shards.gather_into(student)
            finally:
                if config.train == "lora":
                    merge_lora(student)
        stopped = self.progress.stopped
        return AlignResult(len(self.history), best_step, stopped, before, after, self.history, seconds, self.state)

    def placed(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model that is run without a gradient: under FSDP a sharded copy."""
        return frozen_copy(model, self.accelerator) if self.sharded else model

    @contextlib.contextmanager
    def held(self, student: PreTrainedModel, objective: Objective) -> Iterator[str]:
        """Hold what is trained in fp32, and round it at the end; under FSDP in copies, which the objective gets.

        Yields:
            The precision of the passes.
        """
        passes, accelerator = self.config.precision, self.accelerator
        if passes == "no":
            asked = accelerator.mixed_precision
            passes = asked if asked in HALF.values() else passes_of(student)
        if self.sharded:
            self.shards = Shards(student, accelerator, in_fp32=passes == "no")
            objective.student = self.shards.model
            yield passes
            objective.student = frozen_copy(student, accelerator, trained=self.shards.model)
            return
        # Without autocast a teacher that shares weights must have the same dtype.
        with in_fp32(*({student, objective.teacher} if passes == "no" else {student}), whole=passes == "no"):
            yield passes

    def train_phases(self, objective: Objective, passes: str) -> None:
        """Train the phases that are left."""
        config, done = self.config, 0
        parameters = trained_parameters(objective.student, objective.blocks, config.train)
        saved = self.load(parameters)
        if isinstance(objective.student, FSDPModule):
            # Its first pass must be one of the whole model.
            with torch.no_grad(), autocast(self.accelerator, passes):
                objective.learn(self.held_out[0])
        for number, (phase, steps) in enumerate(config.phases()):
            if saved is None or number >= self.part_of(saved):
                trainer = AlignTrainer(objective, parameters, self.accelerator, phase, steps, passes)
                trainer.add_callback(self)
                start = math.inf if saved is not None else trainer.held_out_loss(self.held_out)
                self.begin(number, done, steps, trainer, saved, start)
                if saved is not None:
                    trainer.factor = 0.5**self.progress.halved
                    self.kept = int(saved.record.get("kept", done))
                saved = None
                self.train(self.held_out)
                if self.progress.best_step:
                    self.kept = done + self.progress.best_step
            done += steps

    def step(self, batches: Iterator[dict[str, Tensor]], held_out: list[dict[str, Tensor]]) -> None:
        """Do all steps that are left, or those up to one that diverges, which is left out."""
        progress, trainer = self.progress, self.trainer
        trainer.batches, trainer.args.max_steps = batches, self.steps - progress.step
        try:
            trainer.train()
        except Diverged as reason:
            trainer.restore(self.best_weights)
            progress.step += 1
            if progress.halved >= self.config.patience:
                raise TrainingError(
                    f"alignment ({trainer.phase}): {reason} at step {progress.step}, even at a halved rate; the "
                    "model keeps its best earlier state: lower the rates, train less (train=kernels), or check the "
                    "data for broken inputs"
                ) from None
            self._slow_down()
            trainer.interrupts.release()
            self.save_if_due()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Set the rates."""
        self.trainer.set_rates(self.progress.step + 1, self.steps, self.trainer.factor)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Delay Ctrl-C from here to the end of the step."""
        self.rate = float(self.trainer.optimizer.param_groups[0]["lr"])
        self.trainer.interrupts.hold()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Measure, keep the best weights, or return to them; report the step, and save."""
        config, trainer, progress, step = self.config, self.trainer, self.progress, self.progress.step + 1
        evaluates = step % config.eval_every == 0 or step == self.steps
        held_out_loss = trainer.held_out_loss(self.held_out) if evaluates else None
        if held_out_loss is not None and not math.isfinite(held_out_loss):
            raise Diverged(f"the held-out loss became {held_out_loss}")
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
        done, terms = self.before + step, dict(trainer.terms)
        loss = terms.pop(LOSS)
        report = AlignStep(done, config.steps, terms, held_out_loss, self.rate, self.seconds, trainer.phase, loss)
        self.finish_step(report)
        control.should_training_stop |= bool(progress.stopped)

    def _slow_down(self) -> None:
        progress, trainer = self.progress, self.trainer
        progress.halved, progress.rises = progress.halved + 1, 0
        trainer.factor = 0.5**progress.halved
        # The old moments would drive the weights in the same direction again.
        trainer.optimizer.state.clear()

    def options(self) -> dict[str, object]:
        return super().options() | {"teacher weights": weights_digest(self.teacher, kernel=False)}

    def record(self) -> dict[str, object]:
        return super().record() | {"kept": self.kept}

    def last_state(self) -> RunState | None:
        if self.number < len(self.config.phases()) - 1:
            return None
        # Only the weights, which are the best ones by now.
        return RunState(self.record(), {f"trained/{name}": tensor for name, tensor in self.weights().items()})
