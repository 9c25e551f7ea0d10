"""Align a whole converted model with its original: first every block under the teacher's inputs, then end to end.

Stage one matches attention weights only: it sees neither the effect of a layer's errors on later layers nor the repairs
that the layer's own weights allow. The alignment trains the student to reproduce the teacher's hidden states, pooled
output and logits, on unlabelled data. It never ends worse than it began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import PreTrainedModel

from linearize.checkpoint.fingerprint import fingerprint, weights_digest
from linearize.checkpoint.loading import move
from linearize.core.errors import ConfigError
from linearize.training.adapters import LoraConfig, add_lora, merge_lora
from linearize.training.alignment.config import BLOCKWISE, END_TO_END, AlignConfig
from linearize.training.alignment.measure import Closeness, measure
from linearize.training.alignment.objective import Objective
from linearize.training.alignment.pair import Pair, make_pair
from linearize.training.alignment.trainer import AlignTrainer, Diverged, diverged, trained_parameters
from linearize.training.stage_one.loop import make_accelerator
from linearize.training.stage_one.run import Batches, Part, Progress, Report, Run, check_inputs, frozen
from linearize.training.stage_one.state import RunState


@dataclass(frozen=True)
class AlignStep(Report):
    """The report of a step.

    Attributes:
        step: steps done, over both phases.
        steps: steps planned.
        phase: "blockwise" or "end to end".
        losses: the terms: by block; end to end also "output", "pooled" and "logits/...".
        loss: the loss that is minimised.
        held_out: the same on held-out data, at the steps that evaluate it.
        learning_rate: of the kernels.
        seconds: since the start, including those before a resumed run was interrupted.
        stage: "alignment".
    """

    step: int
    steps: int
    phase: str
    losses: dict[str, float]
    loss: float
    held_out: float | None
    learning_rate: float
    seconds: float
    stage: ClassVar[str] = "alignment"


@dataclass
class AlignResult:
    """The result of the alignment.

    Attributes:
        steps: optimizer steps done.
        best_step: the step whose weights were kept; 0 for the first weights.
        stopped: why it ended ("steps", "early stopping").
        before: student against teacher before, on the held-out batches.
        after: the same after.
        history: one record per step.
        seconds: duration of the training itself.
        state: a resumed run returns this result at once from it; None if nothing was trained, or if the data cannot be
            identified (it has no `digest`) and the run keeps no states.
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
        teacher: the original; it is copied and not changed. None: the student's own weights under softmax, which are
            the original's unless the student was aligned or tuned before.
        on_step: called after every step (progress bars, logs).
        accelerator: an Accelerate object; None makes one.

    Returns:
        The result, with student against teacher before and after on held-out batches.

    Raises:
        ConfigError: if the student is not converted, the teacher does not fit it, or an option does not fit.
        DataError: if there are no held-out batches.
        TrainingError: if the run diverges repeatedly; the student then holds its best weights from before.
    """
    config = config or AlignConfig()
    check_inputs("alignment", student, data)
    accelerator = accelerator or make_accelerator(student)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ConfigError(
            "alignment: got FSDP, expected one process or plain data parallelism (DDP); skip the alignment "
            "(--align-steps 0), or launch without FSDP"
        )
    move(student, accelerator.device)
    pair = make_pair(student, teacher, shared=config.train == "kernels")
    return _Run(pair, data, config, on_step, accelerator).run()


@dataclass
class _Progress(Progress):
    """Where a phase stands.

    Attributes:
        halved: how often the rate was halved.
        factor: factor of the rate.
    """

    halved: int = 0
    factor: float = 1.0


class _Run(Run[AlignTrainer, _Progress, AlignStep, AlignConfig]):
    """One alignment: its phases one after the other."""

    part_name, weights_name, report, progress = "phase", "trained", AlignStep, _Progress

    def __init__(
        self,
        pair: Pair,
        data: Batches,
        config: AlignConfig,
        on_step: Callable[[AlignStep], None] | None,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(data, config, on_step, accelerator)
        self.pair = pair
        self.objective = Objective(pair, config)
        if self.identifiable:
            self.identity = fingerprint(model=pair.student, data=data, options=self.options())

    def run(self) -> AlignResult:
        """Measure, train, measure again."""
        held_out = [
            {name: value.to(self.accelerator.device) for name, value in batch.items()}
            for batch in self.data.holdout_batches()
        ]
        with frozen(self.pair.student):
            self.objective.measure_scales(held_out)
            before = measure(self.objective, held_out)
            if not self.config.phases():
                return AlignResult(0, 0, "steps", before, before)
            best_step, stopped, after = self._train(held_out, before)
        return AlignResult(len(self.history), best_step, stopped, before, after, self.history, self.seconds, self.state)

    def _train(self, held_out: list[dict[str, Tensor]], before: Closeness) -> tuple[int, str, Closeness]:
        """Run the phases; return the step that was kept, why the last phase ended, and the final figures."""
        student, config = self.pair.student, self.config
        if config.train == "lora":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                add_lora(student, LoraConfig(r=config.lora_rank, alpha=2.0 * config.lora_rank))
            student.requires_grad_(False)
        try:
            parameters = trained_parameters(student, self.pair.blocks, config.train)
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            first = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            saved = self.load(parameters)
            done, progress = 0, _Progress()
            for number, (phase, steps) in enumerate(config.phases()):
                if saved is None or number >= saved.record["phase"]:
                    trainer = AlignTrainer(self.objective, parameters, config, self.accelerator, phase, steps)
                    if saved is None:
                        part = self.begin(number, done, steps, trainer, held_out)
                    else:
                        part = self.go_on(number, done, steps, trainer, saved)
                    saved = None
                    progress = self.train(part, held_out)
                done += steps
            after = measure(self.objective, held_out)
            if not after.loss < before.loss:
                trainer.restore(first)
                return 0, progress.stopped, before
            return done - steps + progress.best_step, progress.stopped, after
        finally:
            if config.train == "lora":
                merge_lora(student)

    def go_on(
        self, number: int, before: int, steps: int, trainer: AlignTrainer, saved: RunState
    ) -> Part[AlignTrainer, _Progress]:
        """Resume a phase from a state, which has the fp32 copies of weights in half precision."""
        part = super().go_on(number, before, steps, trainer, saved)
        trainer.restore({name: saved.tensors[f"{self.weights_name}/{name}"] for name in trainer.parameters})
        trainer.factor = part.progress.factor
        return part

    def step(
        self,
        part: Part[AlignTrainer, _Progress],
        batches: Iterator[dict[str, Tensor]],
        held_out: list[dict[str, Tensor]],
    ) -> None:
        config, trainer, progress, step = self.config, part.trainer, part.progress, part.progress.step + 1
        evaluates = step % config.eval_every == 0 or step == part.steps
        try:
            terms, loss, rate = trainer.step(batches, step)
            held_out_loss = trainer.evaluate(held_out) if evaluates else None
            if held_out_loss is not None and not math.isfinite(held_out_loss):
                raise Diverged(f"the held-out loss became {held_out_loss} at step {step}")
        except Diverged as reason:
            trainer.restore(part.best)
            if progress.halved >= config.patience:
                raise diverged(trainer.phase, str(reason)) from None
            self._slow_down(part)
            progress.step = step
            trainer.interrupts.release()
            return
        progress.step = step
        if held_out_loss is not None:
            self._judge(part, held_out_loss)
        done = part.before + step
        report = AlignStep(done, config.steps, trainer.phase, terms, loss, held_out_loss, rate, self.seconds)
        self.finish_step(report, trainer)

    def _judge(self, part: Part[AlignTrainer, _Progress], loss: float) -> None:
        """Compare a held-out loss with the best one; after two worse ones, return to it at half the rate."""
        progress = part.progress
        if progress.better(loss):
            part.best = part.trainer.snapshot()
        elif progress.rises >= 2:
            if progress.halved >= self.config.patience:
                progress.stopped = "early stopping"
                return
            part.trainer.restore(part.best)
            self._slow_down(part)

    @staticmethod
    def _slow_down(part: Part[AlignTrainer, _Progress]) -> None:
        progress, trainer = part.progress, part.trainer
        progress.halved, progress.rises = progress.halved + 1, 0
        progress.factor = trainer.factor = trainer.factor / 2
        # The old moments would lead the weights the same way again.
        trainer.optimizer.state.clear()

    def options(self) -> dict[str, object]:
        return super().options() | {"teacher weights": weights_digest(self.pair.teacher, kernel=False)}

    def weights(self, part: Part[AlignTrainer, _Progress]) -> dict[str, Tensor]:
        return part.trainer.snapshot()

    def last_state(self, part: Part[AlignTrainer, _Progress]) -> RunState | None:
        if part.number < len(self.config.phases()) - 1:
            return None
        # The weights alone: they are the best ones.
        return RunState(self.record(part), {f"trained/{name}": tensor for name, tensor in self.weights(part).items()})


__all__ = ["BLOCKWISE", "END_TO_END", "AlignConfig", "AlignResult", "AlignStep", "align"]
