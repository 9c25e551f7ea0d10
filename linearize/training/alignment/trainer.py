"""The optimizer steps of the alignment, and the choice of the trained weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from linearize.core.errors import TrainingError
from linearize.training.alignment.config import BLOCKWISE, AlignConfig
from linearize.training.alignment.measure import blockwise_loss, measure
from linearize.training.alignment.objective import Objective, Share, size_of
from linearize.training.alignment.pair import Block
from linearize.training.stage_one.observer import warm_cosine
from linearize.training.stage_one.processes import autocast
from linearize.training.stage_one.run import Interrupts, Trainer


def trained_parameters(student: nn.Module, blocks: list[Block], train: str) -> dict[str, nn.Parameter]:
    """Return the trained weights by name: kernels always, others according to the option `train`."""
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
    """A loss or gradient is NaN or infinite; the message says which and where."""


class AlignTrainer(Trainer):
    """Trains one phase.

    Attributes:
        objective: the error that is minimised.
        parameters: the trained weights, by name.
        factor: factor of all rates; halved when the held-out loss rises.
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
        # Weights in half precision would lose small updates, so updates are added up in fp32 copies.
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
            Diverged: if a loss or gradient is not finite; then no weight has changed.
        """
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = self.factor * rate * warm_cosine(step - 1, self.steps, self.config.warmup)
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None
        mine = [
            {name: value.to(self.device, non_blocking=True) for name, value in next(batches).items()}
            for _ in range(self.config.gradient_accumulation)
        ]
        sizes = [size_of(batch) for batch in mine]
        tokens, rows = self.reduce(torch.tensor(sizes, dtype=torch.float64, device=self.device).sum(dim=0)).tolist()
        terms: dict[str, float] = {}
        loss = 0.0
        for batch, size in zip(mine, sizes, strict=True):
            part, part_loss = self._backward(batch, size.of(tokens, rows))
            loss += part_loss
            for name, value in part.items():
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
                errors = self.objective.blockwise(batch, share, train=True)
                return errors, sum(errors.values()) / max(len(errors), 1)
            terms = self.objective.end_to_end(batch, share)
            loss = self.objective.total(terms)
        loss.backward()
        return {name: float(value.detach()) for name, value in terms.items()}, float(loss.detach())

    def evaluate(self, held_out: list[dict[str, Tensor]]) -> float:
        """Return the phase's loss on held-out batches."""
        with autocast(self.accelerator, self.config.precision):
            if self.phase == BLOCKWISE:
                errors = blockwise_loss(self.objective, held_out)
                return sum(errors.values()) / max(len(errors), 1)
            return measure(self.objective, held_out).loss

    def _reduce(self, terms: dict[str, float], loss: float) -> tuple[dict[str, float], float]:
        """Add up gradients and terms over the processes: together they are one step."""
        if self.accelerator.num_processes == 1:
            return terms, loss
        self.reduce_gradients(self.parameters.values())
        names = sorted(terms)
        summed = self.reduce(torch.tensor([loss, *(terms[n] for n in names)], dtype=torch.float64, device=self.device))
        first, *rest = summed.tolist()
        return dict(zip(names, rest, strict=True)), first

    def _check(self, terms: Mapping[str, float], loss: float, step: int) -> None:
        for name, value in terms.items():
            if not math.isfinite(value):
                raise Diverged(f"the error of {name} became {value} at step {step}")
        if not math.isfinite(loss):
            raise Diverged(f"the loss became {loss} at step {step}")

    def trained(self) -> dict[str, Tensor]:
        """Return the trained weights; of weights in half precision the fp32 copies."""
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


def diverged(phase: str, what: str) -> TrainingError:
    """Build the error of a run that diverged repeatedly."""
    return TrainingError(
        f"alignment ({phase}): {what}, also at a halved rate; the model keeps its best state before that: "
        "lower the rates, train less (train=kernels), or check the data for broken inputs"
    )
