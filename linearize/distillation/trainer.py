"""The working part of stage one: passes of the frozen model in which kernels get their losses and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.attention.interface import observed
from linearize.attention.layer import LinearAttention
from linearize.distillation.config import DistillConfig
from linearize.distillation.interrupts import Interrupts
from linearize.distillation.layer_loss import LayerLoss
from linearize.distillation.processes import autocast
from linearize.distillation.targets import Targets
from linearize.errors import TrainingError
from linearize.teacher.observe import run_body, softmax_output


class KernelTrainer:
    """Trains the kernels of some layers together; the rest of the model stays frozen.

    Sums and counts are divided once per step, so the loss is a mean over all valid queries of the global batch,
    whatever its split over batches or processes.
    """

    def __init__(
        self, model: PreTrainedModel, layers: list[LayerLoss], config: DistillConfig, accelerator: Accelerator
    ) -> None:
        self.model, self.layers, self.config, self.accelerator = model, layers, config, accelerator
        self.device = accelerator.device
        self.by_host: dict[int, list[LayerLoss]] = {}
        for loss in layers:
            self.by_host.setdefault(id(loss.host or loss.layer), []).append(loss)
        self.training = False
        self.sampler = torch.Generator().manual_seed(config.seed)
        self.drawn = self.sampler.get_state()
        self.interrupts = Interrupts()
        self.optimizer, self.rates = self._optimizer()

    def _optimizer(self) -> tuple[torch.optim.AdamW, list[tuple[float, float]]]:
        """One parameter group per layer, each with its kernel's own defaults; peak rate and warm-up of each."""
        config = self.config
        groups: list[dict[str, object]] = []
        rates: list[tuple[float, float]] = []
        for loss in self.layers:
            own = loss.training
            decay = own.weight_decay if config.weight_decay is None else config.weight_decay
            rate = own.learning_rate if config.learning_rate is None else config.learning_rate
            warmup = own.warmup if config.warmup is None else config.warmup
            groups.append({"params": list(loss.layer.parameters()), "lr": rate, "weight_decay": decay})
            rates.append((rate, warmup))
        return torch.optim.AdamW(groups), rates

    def step(self, batches: Iterator[dict[str, Tensor]], step: int) -> float:
        """Do optimizer step number `step` (from 1), and return the first layer's learning rate.

        Raises:
            TrainingError: if a loss or gradient is not finite.
        """
        for group, (rate, warmup) in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * warm_cosine(step - 1, self.config.steps, warmup)
        self.optimizer.zero_grad(set_to_none=True)
        for loss in self.layers:
            loss.reset()
        for _ in range(self.config.gradient_accumulation):
            self._pass(next(batches), train=True)
        self._reduce()
        for loss in self.layers:
            self.finish_gradient(loss, step)
        self.interrupts.hold()
        self.optimizer.step()
        self.drawn = self.sampler.get_state()
        return float(self.optimizer.param_groups[0]["lr"])

    def finish_gradient(self, loss: LayerLoss, step: int) -> None:
        """Make a layer's gradient that of the mean, and clip it.

        Raises:
            TrainingError: if its loss or gradient is not finite.
        """
        self._check(loss, step)
        parameters = [p for p in loss.layer.parameters() if p.grad is not None]
        for gradient in (p.grad for p in parameters if p.grad is not None):
            gradient.div_(loss.count)
        norm = nn.utils.clip_grad_norm_(parameters, loss.training.max_grad_norm)
        if not math.isfinite(float(norm)):
            raise diverged(loss.name, step, f"the gradient became {float(norm)}")

    @torch.no_grad()
    def evaluate(self, held_out: Iterable[Mapping[str, Tensor]], step: int = 0) -> float:
        """Return the mean held-out loss over the layers.

        Raises:
            TrainingError: if it is not finite.
        """
        for loss in self.layers:
            loss.reset()
            loss.layer.eval()
        for batch in held_out:
            self._pass(batch, train=False)
        for loss in self.layers:
            loss.layer.train()
            self._check(loss, step)
        return sum(loss.mean for loss in self.layers) / len(self.layers)

    def _pass(self, batch: Mapping[str, Tensor], *, train: bool) -> None:
        """Run the frozen model once; losses (and gradients) are taken on the way."""
        self.training = train
        moved = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
        with torch.no_grad(), observed(self.model, self._observe), autocast(self.accelerator, self.config.precision):
            run_body(self.model, moved)

    def _observe(
        self, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        losses = self.by_host.get(id(layer))
        if losses:
            targets, sample = Targets(q.detach(), k.detach(), scaling, layer.shape.causal, mask), self._sample(q)
            for loss in losses:
                loss.add(targets, v.detach(), train=self.training, sample=sample)
        if self.config.feed == "student":
            return layer(q, k, v, mask, scaling)
        # The host's own way would make a T x T mask of a causal one with padding.
        return softmax_output(layer, q, k, v, mask, scaling) if layer.shape.causal else None

    def _sample(self, q: Tensor) -> Tensor | None:
        """Draw the positions of the queries that the loss is taken on; None: all."""
        count, tokens = self.config.query_sample, q.shape[2]
        if not self.training or count is None or count >= tokens:
            return None
        return torch.randperm(tokens, generator=self.sampler)[:count].sort().values.to(q.device)

    def _reduce(self) -> None:
        """Add up gradients, sums and counts over the processes: together they are one batch."""
        if self.accelerator.num_processes == 1:
            return
        sums = torch.tensor([[x.total, x.count] for x in self.layers], device=self.device, dtype=torch.float64)
        sums = self.accelerator.reduce(sums, "sum")
        for loss, (total, count) in zip(self.layers, sums.tolist(), strict=True):
            loss.total, loss.count = total, count
            for parameter in loss.layer.parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.accelerator.reduce(gradient, "sum")

    def _check(self, loss: LayerLoss, step: int) -> None:
        if not math.isfinite(loss.total):
            raise diverged(loss.name, step, f"the loss became {loss.total}")

    def kernels(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the kernels, themselves, by name."""
        return {
            f"{loss.name}.{name}": tensor
            for loss in self.layers
            for name, tensor in loss.layer.state_dict(keep_vars=True).items()
        }

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of `kernels()`."""
        return {name: tensor.detach().clone() for name, tensor in self.kernels().items()}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Put copies back."""
        with torch.no_grad():
            for name, tensor in self.kernels().items():
                tensor.copy_(snapshot[name])

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's moments and the sampler's random state after the last whole step, by name."""
        state = self.optimizer.state_dict()["state"]
        named = {f"{index}.{key}": value for index, values in state.items() for key, value in values.items()}
        return named | {"sampler": self.drawn}

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Read what `optimizer_tensors` gave."""
        self.sampler.set_state(tensors["sampler"])
        self.drawn = self.sampler.get_state()
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, dot, key = name.partition(".")
            if dot:
                state.setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})


def warm_cosine(step: int, steps: int, warmup: float) -> float:
    """Return the rate's factor at `step` (from 0): a linear rise for `warmup` of the steps, then a cosine to zero."""
    rise = max(1, round(steps * warmup))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def diverged(layer: str, step: int, what: str) -> TrainingError:
    """Build the error of a run that left the numbers."""
    return TrainingError(
        f"stage one: {what} in layer {layer} at step {step}; the model keeps its best state before that: "
        "lower the learning rate (--learning-rate), or check the data for broken inputs"
    )
