"""Align a whole converted model with its original: first every block under the teacher's inputs, then end to end.

Stage one matches attention weights only. What a layer's errors do to the layers behind it, and what the layer's own
weights could mend, it does not see. The alignment trains the student so that its hidden states, pooled output and
logits are the teacher's, on unlabelled data. It never ends worse than it began.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import PreTrainedModel

from linearize.adapters import LoraConfig, add_lora, merge_lora
from linearize.alignment.config import BLOCKWISE, END_TO_END, AlignConfig
from linearize.alignment.measure import Closeness, measure
from linearize.alignment.objective import Objective
from linearize.alignment.pair import Pair, make_pair
from linearize.alignment.trainer import AlignTrainer, Diverged, diverged, trained_parameters
from linearize.checkpoint.fingerprint import check_same, fingerprint, weights_digest
from linearize.distillation.loop import Batches, make_accelerator
from linearize.distillation.state import RunState, StateFolder
from linearize.errors import ConfigError
from linearize.modeling.model import is_linearized


@dataclass(frozen=True)
class AlignStep:
    """Reported to the caller after every step.

    Attributes:
        step: steps done, over both phases.
        steps: steps planned.
        phase: "blockwise" or "end to end".
        losses: the terms: by block; end to end also "output", "pooled" and "logits/...".
        loss: what is minimised.
        held_out: the same on held-out data, at the steps that evaluate it.
        learning_rate: of the kernels.
        seconds: since the start, earlier parts of a resumed run included.
    """

    step: int
    steps: int
    phase: str
    losses: dict[str, float]
    loss: float
    held_out: float | None
    learning_rate: float
    seconds: float


@dataclass
class AlignResult:
    """What the alignment did.

    Attributes:
        steps: optimizer steps done.
        best_step: the step whose weights were kept; 0: those it began with.
        stopped: why it ended ("steps", "early stopping").
        before: student against teacher before, on the held-out batches.
        after: the same after.
        history: one record per step.
        seconds: duration of the training itself.
        state: what a run that is resumed needs to give this result at once; None where nothing was trained, or where
            the data cannot say what it is (it has no `digest`) and no states were asked for.
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
        data: where batches come from, e.g. `linearize.data.load_source(...)`; labels are not used.
        config: options.
        teacher: the original; it is copied and left as it was. None: the student's own weights under softmax, which are
            the original's as long as the student was neither aligned nor tuned.
        on_step: called after every step (progress bars, logs).
        accelerator: an Accelerate object; one is made where None.

    Returns:
        What was done, with student against teacher before and after on held-out batches.

    Raises:
        ConfigError: if the student is not converted, the teacher does not fit it, or an option does not fit.
        DataError: if there is nothing held out.
        TrainingError: if the numbers are left again and again; the student then holds its best weights before that.
    """
    config = config or AlignConfig()
    if not is_linearized(student):
        raise ConfigError(f"got {type(student).__name__}, expected a converted model; call linearize.convert first")
    if not hasattr(data, "train_batches"):
        raise ConfigError(
            f"alignment: got data of type {type(data).__name__}, expected something with train_batches and "
            "holdout_batches; linearize.data.load_source makes it of any data set"
        )
    accelerator = accelerator or make_accelerator(student)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ConfigError(
            "alignment: got FSDP, expected one process or plain data parallelism (DDP); skip the alignment "
            "(--align-steps 0), or launch without FSDP"
        )
    student.to(accelerator.device)  # type: ignore[arg-type]
    pair = make_pair(student, teacher, shared=config.train == "kernels")
    return _Run(pair, data, config, on_step, accelerator).run()


@dataclass
class _Progress:
    """Where a phase stands.

    Attributes:
        step: steps done in it.
        best_step: of these, the one with the best held-out loss.
        best_loss: that loss.
        rises: evaluations in a row that were worse than the best.
        halved: how often the rate was halved.
        factor: of the rate.
        stopped: why the phase ended.
    """

    step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    rises: int = 0
    halved: int = 0
    factor: float = 1.0
    stopped: str = ""


class _Run:
    """One alignment: its phases one after the other."""

    def __init__(
        self,
        pair: Pair,
        data: Batches,
        config: AlignConfig,
        on_step: Callable[[AlignStep], None] | None,
        accelerator: Accelerator,
    ) -> None:
        self.pair, self.data, self.config = pair, data, config
        self.on_step, self.accelerator = on_step, accelerator
        self.objective = Objective(pair, config)
        self.history: list[AlignStep] = []
        self.states = None if config.folder is None else StateFolder(config.folder, config.keep)
        known = self.states is not None or hasattr(data, "digest")
        self.identity = self._identity() if known else {}
        self.state: RunState | None = None
        self.start, self.earlier = time.perf_counter(), 0.0

    def run(self) -> AlignResult:
        """Measure, train, measure again."""
        student = self.pair.student
        held_out = [
            {name: value.to(self.accelerator.device) for name, value in batch.items()}
            for batch in self.data.holdout_batches()
        ]
        flags = {p: p.requires_grad for p in student.parameters()}
        modes = {m: m.training for m in student.modules()}
        try:
            student.eval().requires_grad_(False)
            self.objective.measure_scales(held_out)
            before = measure(self.objective, held_out)
            if not self.config.phases():
                return AlignResult(0, 0, "steps", before, before)
            best_step, stopped, after = self._train(held_out, before)
        finally:
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)
                parameter.grad = None
            for module, mode in modes.items():
                module.training = mode
        seconds = self.earlier + time.perf_counter() - self.start
        return AlignResult(len(self.history), best_step, stopped, before, after, self.history, seconds, self.state)

    def _train(self, held_out: list[dict[str, Tensor]], before: Closeness) -> tuple[int, str, Closeness]:
        """Run the phases; return the step that was kept, why the last phase ended, and what came of it."""
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
            if self.states is not None and not config.resume and self.accelerator.is_main_process:
                self.states.check_free(overwrite=False)
            saved = self._load(parameters)
            done, progress = 0, _Progress()
            for number, (phase, steps) in enumerate(config.phases()):
                if saved is None or number >= saved.record["phase"]:
                    trainer = AlignTrainer(self.objective, parameters, config, self.accelerator, phase, steps)
                    progress = self._phase(number, done, trainer, held_out, saved)
                    saved = None
                done += steps
            after = measure(self.objective, held_out)
            if not after.loss < before.loss:
                trainer.restore(first)
                return 0, progress.stopped, before
            return done - steps + progress.best_step, progress.stopped, after
        finally:
            if config.train == "lora":
                merge_lora(student)

    def _phase(
        self, number: int, done: int, trainer: AlignTrainer, held_out: list[dict[str, Tensor]], saved: RunState | None
    ) -> _Progress:
        """Train one phase from its start, or from a saved state in the middle of it; it ends with its best weights."""
        config = self.config
        if saved is None:
            progress = _Progress(best_loss=trainer.evaluate(held_out))
            best = trainer.snapshot()
        else:
            progress = _Progress(**saved.record["progress"])
            trainer.restore({name: saved.tensors[f"trained/{name}"] for name in trainer.parameters})
            # The state of a finished run has no copies: what is trained is the best.
            kept = {
                name: saved.tensors.get(f"best/{name}", saved.tensors[f"trained/{name}"]) for name in trainer.parameters
            }
            best = {name: tensor.to(trainer.device) for name, tensor in kept.items()}
            prefix = "optimizer/"
            moments = {k.removeprefix(prefix): v for k, v in saved.tensors.items() if k.startswith(prefix)}
            trainer.load_optimizer_tensors(moments)
            trainer.factor = progress.factor
        batches = self.data.train_batches(
            (done + progress.step) * config.gradient_accumulation,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        with trainer.interrupts:
            while progress.step < trainer.steps and not progress.stopped:
                try:
                    best = self._step(done, progress, trainer, batches, held_out, best)
                    if config.save_every and progress.step % config.save_every == 0:
                        self._save(number, done, progress, trainer, best)
                except KeyboardInterrupt:
                    # What was learned is kept, unless the step is half done.
                    if (number or progress.step) and not trainer.interrupts.held:
                        self._save(number, done, progress, trainer, best)
                    raise
        trainer.restore(best)
        progress.stopped = progress.stopped or "steps"
        if number == len(config.phases()) - 1 and self.identity:
            trained = {f"trained/{name}": tensor for name, tensor in trainer.snapshot().items()}
            self.state = RunState(self._record(number, done, progress), trained)
        return progress

    def _step(
        self,
        done: int,
        progress: _Progress,
        trainer: AlignTrainer,
        batches: Iterator[dict[str, Tensor]],
        held_out: list[dict[str, Tensor]],
        best: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Do one step with all that belongs to it; `progress` is moved on in place, the best weights are returned."""
        config, step = self.config, progress.step + 1
        evaluates = step % config.eval_every == 0 or step == trainer.steps
        try:
            terms, loss, rate = trainer.step(batches, step)
            found = trainer.evaluate(held_out) if evaluates else None
            if found is not None and not math.isfinite(found):
                raise Diverged(f"the held-out loss became {found} at step {step}")
        except Diverged as reason:
            trainer.restore(best)
            if progress.halved >= config.patience:
                raise diverged(trainer.phase, str(reason)) from None
            self._slow_down(progress, trainer)
            progress.step = step
            trainer.interrupts.release()
            return best
        progress.step = step
        if found is not None:
            best = self._judge(progress, found, trainer, best)
        report = self._report(done + step, trainer.phase, terms, loss, found, rate)
        trainer.interrupts.release()
        if self.on_step is not None:
            self.on_step(report)
        return best

    def _judge(
        self, progress: _Progress, found: float, trainer: AlignTrainer, best: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Hold an evaluation against the best one; two worse ones in a row halve the rate and go back to the best."""
        if found < progress.best_loss:
            progress.best_loss, progress.best_step, progress.rises = found, progress.step, 0
            return trainer.snapshot()
        progress.rises += 1
        if progress.rises >= 2:
            if progress.halved >= self.config.patience:
                progress.stopped = "early stopping"
                return best
            trainer.restore(best)
            self._slow_down(progress, trainer)
        return best

    @staticmethod
    def _slow_down(progress: _Progress, trainer: AlignTrainer) -> None:
        progress.halved, progress.rises = progress.halved + 1, 0
        progress.factor = trainer.factor = trainer.factor / 2
        # Moments that carried the weights away would do so again.
        trainer.optimizer.state.clear()

    def _report(
        self, step: int, phase: str, terms: dict[str, float], loss: float, held_out: float | None, rate: float
    ) -> AlignStep:
        seconds = self.earlier + time.perf_counter() - self.start
        report = AlignStep(step, self.config.steps, phase, terms, loss, held_out, rate, seconds)
        self.history.append(report)
        return report

    def _identity(self) -> dict[str, Any]:
        """What has to be the same when a run is resumed, the models' weights among it."""
        free = {"resume", "folder", "keep", "save_every"}
        named = {name: value for name, value in asdict(self.config).items() if name not in free}
        data = {f"data {name}": value for name, value in getattr(self.data, "options", {}).items()}
        named |= {"processes": self.accelerator.num_processes, **data}
        named["teacher weights"] = weights_digest(self.pair.teacher, kernel=False)
        return fingerprint(model=self.pair.student, data=self.data, options=named)

    def _load(self, parameters: dict[str, Any]) -> RunState | None:
        """Read the newest state, if there is one to go on from, and put its weights into the student."""
        saved = self.states.load() if self.states is not None and self.config.resume else None
        if saved is None:
            return None
        check_same(saved.record.get("fingerprint") or {}, self.identity)
        self.history = [AlignStep(**report) for report in saved.record["history"]]
        self.earlier = self.history[-1].seconds if self.history else 0.0
        for name, parameter in parameters.items():
            parameter.data.copy_(saved.tensors[f"trained/{name}"])
        return saved

    def _save(
        self, number: int, done: int, progress: _Progress, trainer: AlignTrainer, best: dict[str, Tensor]
    ) -> None:
        if self.states is None or not self.accelerator.is_main_process:
            return
        tensors = {f"trained/{name}": tensor for name, tensor in trainer.snapshot().items()}
        tensors |= {f"best/{name}": tensor for name, tensor in best.items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in trainer.optimizer_tensors().items()}
        state = RunState(self._record(number, done, progress), tensors)
        self.states.save(state.step, state)

    def _record(self, number: int, done: int, progress: _Progress) -> dict[str, Any]:
        return {
            "step": done + progress.step,
            "phase": number,
            "progress": asdict(progress),
            "history": [asdict(report) for report in self.history],
            "fingerprint": self.identity,
        }


__all__ = ["BLOCKWISE", "END_TO_END", "AlignConfig", "AlignResult", "AlignStep", "align"]
