"""Stage one: teach the kernels of a converted model to imitate its frozen softmax attention.

Only the kernels are trained. Each layer's loss needs only that layer's q, k and v under the frozen model, so its
gradient is taken inside the frozen forward pass, as soon as the layer has run. Sums and counts are divided once per
step, so the loss is a mean over all valid queries of the global batch, whatever its split over batches or processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.distillation.config import DistillConfig
from linearize.distillation.layer_loss import LayerLoss, layer_loss
from linearize.distillation.losses import Targets
from linearize.errors import ConfigError, TrainingError
from linearize.fidelity.measure import Fidelity, measure
from linearize.fidelity.observe import observed, run_body
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
        seconds: since the start.
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
        best_step: the step whose parameters were kept.
        held_out: its mean held-out loss.
        stopped: why it ended ("steps", "early stopping", "nothing to learn").
        before: fidelity before, on the held-out batches.
        after: fidelity after.
        history: one record per step.
        seconds: duration of the training itself.
    """

    steps: int
    best_step: int
    held_out: float | None
    stopped: str
    before: Fidelity
    after: Fidelity
    history: list[StepReport] = field(default_factory=list)
    seconds: float = 0.0


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
        accelerator: an Accelerate object; made from `config.precision` where None.

    Returns:
        What was done, with fidelity before and after on held-out batches.

    Raises:
        ConfigError: if the model is not converted or an option does not fit a kernel.
        TrainingError: if a loss becomes NaN or infinite; names layer and step. The model then holds the best
            parameters that were seen before.
    """
    config = config or DistillConfig()
    if not is_linearized(model):
        raise ConfigError(f"got {type(model).__name__}, expected a converted model; call linearize.convert first")
    return _Run(model, data, config, on_step, accelerator or _accelerator(model)).run()


def _accelerator(model: PreTrainedModel) -> Accelerator:
    # Accelerate's state is one per process: the first one made decides, and a later one must not contradict it.
    if AcceleratorState._shared_state:
        return Accelerator()
    return Accelerator(cpu=next(model.parameters()).device.type == "cpu")


class _Run:
    """One run of stage one."""

    def __init__(
        self,
        model: PreTrainedModel,
        data: Batches,
        config: DistillConfig,
        on_step: Callable[[StepReport], None] | None,
        accelerator: Accelerator,
    ) -> None:
        self.model, self.data, self.config = model, data, config
        self.on_step, self.accelerator = on_step, accelerator
        self.device = accelerator.device
        self.losses = {
            id(layer): layer_loss(name, layer, config)
            for name, layer in linear_attentions(model).items()
            if layer.mixer.info.learnable
        }
        self.training = False
        self.sampler = torch.Generator().manual_seed(config.seed)

    def run(self) -> DistillResult:
        """Measure, train, measure again."""
        self.model.to(self.device)
        held_out = self.data.holdout_batches()
        before = measure(self.model, held_out)
        if not self.losses or self.config.steps == 0:
            stopped = "steps" if self.losses else "nothing to learn"
            return DistillResult(0, 0, None, stopped, before, before)
        flags = {p: p.requires_grad for p in self.model.parameters()}
        modes = {m: m.training for m in self.model.modules()}
        try:
            self._freeze()
            result = self._train(held_out, before)
        finally:
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)
                parameter.grad = None
            for module, mode in modes.items():
                module.training = mode
        result.after = measure(self.model, held_out)
        return result

    def _freeze(self) -> None:
        self.model.eval().requires_grad_(False)
        for loss in self.losses.values():
            loss.layer.train().requires_grad_(True)

    def _train(self, held_out: list[dict[str, Tensor]], before: Fidelity) -> DistillResult:
        config = self.config
        optimizer, schedule = self._optimizer()
        batches = self.data.train_batches(0, self.accelerator.process_index, self.accelerator.num_processes)
        best_loss, best_step, best = self._look(held_out, 0), 0, self._snapshot()
        history: list[StepReport] = []
        stopped, start, looks = "steps", time.perf_counter(), 0
        step = 0
        for step in range(1, config.steps + 1):
            rate = optimizer.param_groups[0]["lr"]
            try:
                losses = self._step(batches, optimizer, step)
                schedule.step()
                look = step % config.eval_every == 0 or step == config.steps
                found = self._look(held_out, step) if look else None
            except TrainingError:
                self._restore(best)
                raise
            report = StepReport(step, config.steps, losses, found, rate, time.perf_counter() - start)
            history.append(report)
            if self.on_step is not None:
                self.on_step(report)
            if found is None:
                continue
            looks += 1
            if found < best_loss:
                best_loss, best_step, best, looks = found, step, self._snapshot(), 0
            elif config.patience and looks >= config.patience:
                stopped = "early stopping"
                break
        self._restore(best)
        seconds = time.perf_counter() - start
        return DistillResult(step, best_step, best_loss, stopped, before, before, history, seconds)

    def _optimizer(self) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
        """One parameter group per layer, each with its kernel's own defaults."""
        config = self.config
        groups, shapes = [], []
        for loss in self.losses.values():
            own = loss.layer.mixer.info.stage_one
            rate = own.learning_rate if config.learning_rate is None else config.learning_rate
            decay = own.weight_decay if config.weight_decay is None else config.weight_decay
            groups.append({"params": list(loss.layer.parameters()), "lr": rate, "weight_decay": decay})
            warmup = own.warmup if config.warmup is None else config.warmup
            shapes.append(_warm_cosine(config.steps, warmup))
        optimizer = torch.optim.AdamW(groups)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, shapes)

    def _step(
        self, batches: Iterator[dict[str, Tensor]], optimizer: torch.optim.Optimizer, step: int
    ) -> dict[str, float]:
        optimizer.zero_grad(set_to_none=True)
        for loss in self.losses.values():
            loss.reset()
        for _ in range(self.config.gradient_accumulation):
            self._pass(next(batches), train=True)
        self._reduce()
        for loss in self.losses.values():
            self._check(loss, step)
            parameters = [p for p in loss.layer.parameters() if p.grad is not None]
            for parameter in parameters:
                parameter.grad.div_(loss.count)  # type: ignore[union-attr]
            norm = nn.utils.clip_grad_norm_(parameters, loss.layer.mixer.info.stage_one.max_grad_norm)
            if not math.isfinite(float(norm)):
                raise self._diverged(loss, step, f"the gradient became {float(norm)}")
        optimizer.step()
        return {loss.name: loss.mean for loss in self.losses.values()}

    def _pass(self, batch: Mapping[str, Tensor], *, train: bool) -> None:
        """Run the frozen model once; losses (and gradients) are taken on the way."""
        self.training = train
        moved = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
        with torch.no_grad(), observed(self.model, self._observe), self._autocast():
            run_body(self.model, moved)

    def _autocast(self) -> Any:
        """The precision of the frozen model: as asked, or as the user's `accelerate config` says."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.precision)
        return self.accelerator.autocast() if dtype is None else torch.autocast(self.device.type, dtype)

    def _observe(
        self, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        loss = self.losses.get(id(layer))
        if loss is not None:
            sample = self._sample(q.shape[2]).to(q.device) if self._sampling(q) else None
            targets = Targets(q.detach(), k.detach(), scaling, layer.shape.causal, mask)
            loss.add(targets, v.detach(), train=self.training, sample=sample)
        return layer(q, k, v, mask, scaling) if self.config.feed == "student" else None

    def _sampling(self, q: Tensor) -> bool:
        return self.training and self.config.query_sample is not None and self.config.query_sample < q.shape[2]

    def _sample(self, tokens: int) -> Tensor:
        assert self.config.query_sample is not None
        return torch.randperm(tokens, generator=self.sampler)[: self.config.query_sample].sort().values

    def _reduce(self) -> None:
        """Add up gradients, sums and counts over the processes: together they are one batch."""
        if self.accelerator.num_processes == 1:
            return
        sums = torch.tensor([[x.total, x.count] for x in self.losses.values()], device=self.device, dtype=torch.float64)
        sums = self.accelerator.reduce(sums, "sum")
        for loss, (total, count) in zip(self.losses.values(), sums.tolist(), strict=True):
            loss.total, loss.count = total, count
            for parameter in loss.layer.parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.accelerator.reduce(gradient, "sum")

    @torch.no_grad()
    def _look(self, held_out: Iterable[Mapping[str, Tensor]], step: int) -> float:
        """Return the mean held-out loss over layers."""
        for loss in self.losses.values():
            loss.reset()
            loss.layer.eval()
        for batch in held_out:
            self._pass(batch, train=False)
        for loss in self.losses.values():
            loss.layer.train()
            self._check(loss, step)
        return sum(loss.mean for loss in self.losses.values()) / len(self.losses)

    def _check(self, loss: LayerLoss, step: int) -> None:
        if not math.isfinite(loss.total):
            raise self._diverged(loss, step, f"the loss became {loss.total}")

    @staticmethod
    def _diverged(loss: LayerLoss, step: int, what: str) -> TrainingError:
        return TrainingError(
            f"stage one: {what} in layer {loss.name} at step {step}; the model keeps its best state before that: "
            "lower the learning rate (--learning-rate), or check the data for broken inputs"
        )

    def _snapshot(self) -> list[Tensor]:
        return [t.detach().clone() for t in self._tensors()]

    def _restore(self, snapshot: list[Tensor]) -> None:
        with torch.no_grad():
            for tensor, kept in zip(self._tensors(), snapshot, strict=True):
                tensor.copy_(kept)

    def _tensors(self) -> list[Tensor]:
        return [t for x in self.losses.values() for t in x.layer.state_dict(keep_vars=True).values()]


def _warm_cosine(steps: int, warmup: float) -> Callable[[int], float]:
    """Rise linearly for `warmup` of the steps, then fall as a cosine to zero."""
    rise = max(1, round(steps * warmup))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))

    return factor


__all__ = ["Batches", "DistillConfig", "DistillResult", "StepReport", "distill"]
