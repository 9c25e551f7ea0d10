"""The working part of the alignment: which weights are trained, and one optimizer step after another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from linearize.alignment.config import BLOCKWISE, AlignConfig
from linearize.alignment.measure import blockwise_loss, measure
from linearize.alignment.objective import Objective, Share, size_of
from linearize.alignment.pair import Block
from linearize.distillation.observer import warm_cosine
from linearize.distillation.processes import autocast
from linearize.distillation.run import Interrupts
from linearize.errors import TrainingError


def trained_parameters(student: nn.Module, blocks: list[Block], train: str) -> dict[str, nn.Parameter]:
    """Return the weights that are trained, by name: kernels always, the rest as the option `train` says."""
    within = {
        "kernels": (),
        "lora": (),
        "attention": tuple(f"{block.attention}." for block in blocks),
        "blocks": tuple(f"{block.name}." for block in blocks),
    }[train]
    return {
        name: parameter
        for name, parameter in student.named_parameters()
        if is_kernel(name) or name.startswith(within) or (train == "lora" and "lora_" in name)
    }


def is_kernel(name: str) -> bool:
    """Tell whether a parameter belongs to a kernel."""
    return ".linear_attention." in f".{name}"


FULL = (torch.float32, torch.float64)


class Diverged(Exception):
    """A loss or gradient left the numbers; says which and where."""


class AlignTrainer:
    """Trains one phase.

    Attributes:
        objective: what is minimised.
        parameters: what is trained, by name.
        factor: by which all rates are multiplied; halved when the held-out loss rises.
    """

    def __init__(
        self,
        objective: Objective,
        parameters: Mapping[str, nn.Parameter],
        config: AlignConfig,
        accelerator: Accelerator,
        phase: str,
        steps: int,
    ) -> None:
        self.objective, self.parameters, self.config = objective, dict(parameters), config
        self.accelerator, self.phase, self.steps = accelerator, phase, steps
        self.device = accelerator.device
        self.factor = 1.0
        self.interrupts = Interrupts()
        # Weights in half precision would lose small updates: those are added up in fp32 copies.
        self.masters = {
            name: p if p.dtype in FULL else nn.Parameter(p.detach().float()) for name, p in self.parameters.items()
        }
        kernels = [p for name, p in self.masters.items() if is_kernel(name)]
        rest = [p for name, p in self.masters.items() if not is_kernel(name)]
        groups = [(kernels, config.kernel_learning_rate), (rest, config.learning_rate)]
        self.rates = [rate for members, rate in groups if members]
        self.optimizer = torch.optim.AdamW(
            [{"params": members, "lr": rate} for members, rate in groups if members],
            weight_decay=config.weight_decay,
        )

    def step(self, batches: Iterator[dict[str, Tensor]], step: int) -> tuple[dict[str, float], float, float]:
        """Do optimizer step number `step` (from 1).

        Returns:
            The terms, the loss, and the rate of the first group.

        Raises:
            Diverged: if a loss or gradient is not finite; no weight was changed then.
        """
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = self.factor * rate * warm_cosine(step - 1, self.steps, self.config.warmup)
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None
        mine = [self.moved(next(batches)) for _ in range(self.config.gradient_accumulation)]
        sizes = torch.tensor([size_of(batch) for batch in mine], dtype=torch.float64, device=self.device)
        tokens, rows = self._sum(sizes.sum(dim=0)).tolist()
        terms: dict[str, float] = {}
        loss = 0.0
        for batch, (its_tokens, its_rows) in zip(mine, sizes.tolist(), strict=True):
            found, its_loss = self._backward(batch, Share(its_tokens / max(tokens, 1), its_rows / rows))
            loss += its_loss
            for name, value in found.items():
                terms[name] = terms.get(name, 0.0) + value
        terms, loss = self._reduce(terms, loss)
        self._check(terms, loss, step)
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        norm = nn.utils.clip_grad_norm_(self.masters.values(), self.config.max_grad_norm)
        if not math.isfinite(float(norm)):
            raise Diverged(f"the gradient became {float(norm)} at step {step}")
        self.interrupts.hold()
        self.optimizer.step()
        self._write_back()
        return terms, loss, float(self.optimizer.param_groups[0]["lr"])

    def _backward(self, batch: Mapping[str, Tensor], share: Share) -> tuple[dict[str, float], float]:
        with autocast(self.accelerator, self.config.precision):
            if self.phase == BLOCKWISE:
                found = self.objective.blockwise(batch, share, train=True)
                return found, sum(found.values()) / max(len(found), 1)
            terms = self.objective.end_to_end(batch, share)
            loss = self.objective.total(terms)
        loss.backward()
        return {name: float(value.detach()) for name, value in terms.items()}, float(loss.detach())

    def evaluate(self, held_out: list[dict[str, Tensor]]) -> float:
        """Return the phase's loss on held-out batches."""
        with autocast(self.accelerator, self.config.precision):
            if self.phase == BLOCKWISE:
                found = blockwise_loss(self.objective, held_out)
                return sum(found.values()) / max(len(found), 1)
            return measure(self.objective, held_out).loss

    def moved(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch on the models' device."""
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def _sum(self, values: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return values
        summed: Tensor = self.accelerator.reduce(values, "sum")
        return summed

    def _reduce(self, terms: dict[str, float], loss: float) -> tuple[dict[str, float], float]:
        """Add up gradients and terms over the processes: together they are one step."""
        if self.accelerator.num_processes == 1:
            return terms, loss
        for parameter in self.parameters.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self._sum(gradient)
        names = sorted(terms)
        summed = self._sum(torch.tensor([loss, *(terms[n] for n in names)], dtype=torch.float64, device=self.device))
        first, *rest = summed.tolist()
        return dict(zip(names, rest, strict=True)), first

    def _check(self, terms: Mapping[str, float], loss: float, step: int) -> None:
        for name, value in terms.items():
            if not math.isfinite(value):
                raise Diverged(f"the error of {name} became {value} at step {step}")
        if not math.isfinite(loss):
            raise Diverged(f"the loss became {loss} at step {step}")

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of the trained weights, of those in half precision the fp32 ones."""
        return {name: master.detach().clone() for name, master in self.masters.items()}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Put copies back."""
        for name, master in self.masters.items():
            master.copy_(snapshot[name])
        self._write_back()

    @torch.no_grad()
    def _write_back(self) -> None:
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's moments as named tensors."""
        state = self.optimizer.state_dict()["state"]
        return {f"{index}.{key}": value for index, values in state.items() for key, value in values.items()}

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Read what `optimizer_tensors` gave."""
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})


def diverged(phase: str, what: str) -> TrainingError:
    """Build the error of a run that left the numbers again and again."""
    return TrainingError(
        f"alignment ({phase}): {what}, also at a halved rate; the model keeps its best state before that: "
        "lower the rates, train less (train=kernels), or check the data for broken inputs"
    )
