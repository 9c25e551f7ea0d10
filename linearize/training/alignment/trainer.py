"""transformers' Trainer for a phase of the alignment: the gradient of a step, its loss in fp16, and the rates."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback

from linearize.training.alignment.config import BLOCKWISE, WEIGHTS, AlignConfig
from linearize.training.alignment.objective import Objective, measure, shares, summed
from linearize.training.processes import autocast
from linearize.training.run import PartTrainer
from linearize.training.sharding import whole


def is_kernel(name: str) -> bool:
    """Tell whether a parameter belongs to a kernel."""
    return ".linear_attention." in f".{name}"


LOSS = "loss"
"""The name of the loss among a step's terms."""
FIRST_SCALE = 2.0**16
"""Factor of the loss at the first step in fp16, in which small gradients would be 0; divided by the loss's weights."""


class Diverged(Exception):
    """A loss or gradient is NaN or infinite; the message says which and where."""


class AlignTrainer(transformers.Trainer, PartTrainer):
    """transformers' Trainer for one phase.

    The gradient of a block is computed inside the teacher's pass, so models are not wrapped (DDP): gradients are added
    up over the processes after the step's last batch, or by FSDP.

    Attributes:
        objective: the error that is minimised.
        parameters: the trained weights, by name.
        factor: factor of all rates; halved when the held-out loss rises.
        passes: the precision of the passes.
        scaler: scales the loss in fp16, and leaves out steps whose gradient is infinite.
        terms: the terms of the step, and the loss last.
    """

    objective: Objective
    optimizer: Any
    batches: Iterator[dict[str, Tensor]]

    def __init__(
        self,
        objective: Objective,
        parameters: dict[str, nn.Parameter],
        accelerator: Accelerator,
        phase: str,
        steps: int,
        passes: str = "no",
    ) -> None:
        self.objective, self.parameters, self.config = objective, parameters, objective.config
        self.phase, self.steps, self.factor, self.passes = phase, steps, 1.0, passes
        self.given, self.batches = accelerator, iter(())
        self.terms: dict[str, float] = {}
        self.sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
        with torch.random.fork_rng(devices=()):
            transformers.Trainer.__init__(self, objective.student, training_arguments(self.config, accelerator))
        self.remove_callback(PrinterCallback)
        kernels = [p for name, p in parameters.items() if is_kernel(name)]
        rest = [p for name, p in parameters.items() if not is_kernel(name)]
        rates = [(kernels, self.config.kernel_learning_rate), (rest, self.config.learning_rate)]
        groups = [{"params": members, "peak": rate, "warmup": self.config.warmup} for members, rate in rates if members]
        PartTrainer.__init__(self, accelerator, groups, weight_decay=self.config.weight_decay)
        in_fp16 = passes == "fp16" and bool(parameters)
        self.smallest_scale = 1 / max(1.0, *(getattr(self.config, name) for name in WEIGHTS)) if in_fp16 else 1.0
        first = FIRST_SCALE * self.smallest_scale
        self.scaler = torch.amp.GradScaler(accelerator.device.type, first, enabled=in_fp16)
        if in_fp16:
            # accelerate looks for a package on the disk at every step, so other precisions do without it.
            self.optimizer = AcceleratedOptimizer(self.optimizer, device_placement=False, scaler=self.scaler)

    def create_accelerator_and_postprocess(self) -> None:
        """Use the accelerator that the alignment began with."""
        self.accelerator, self.gather_function = self.given, self.given.gather_for_metrics
        self.is_deepspeed_enabled, self.is_fsdp_enabled = False, self.sharded

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: it was moved before its teacher was made."""

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: object) -> Any:
        """Return the model, which is not wrapped, and the batches."""
        self.create_scheduler(max_steps)
        return self.model, train_dataloader

    def get_train_dataloader(self) -> Any:
        """Return this process's endless batches."""
        return self.batches

    def floating_point_ops(self, inputs: object) -> int:
        """Return 0: the number is not used, and counting takes a good part of a small step."""
        return 0

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Return the batches of a step, each with its share of the tokens and rows of all processes."""
        given = [next(epoch_iterator) for _ in range(num_batches)]
        batches = send_to_device(given, self.accelerator.device, non_blocking=True)
        self.terms = {}
        return list(zip(batches, shares(batches, self.reduce_numbers), strict=True)), None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: object = None) -> Tensor:
        """Compute the gradient of a batch for its share of the step, and add up the terms."""
        batch, share = inputs
        # FSDP takes the mean of the processes' gradients.
        scale: float = self.accelerator.num_processes if self.sharded else 1
        if self.scaler.is_enabled():
            scale *= float(self.scaler.scale(torch.ones((), device=self.accelerator.device)))
        share = (scale * share[0], scale * share[1])
        found: dict[str, Any]
        with autocast(self.accelerator, self.passes):
            if self.phase == BLOCKWISE:
                found = dict(self.objective.blockwise(batch, share, train=True))
                found[LOSS] = sum(found.values()) / max(len(found), 1)
            else:
                found = self.objective.end_to_end(batch, share)
                found[LOSS] = self.objective.total(found)
        if self.phase != BLOCKWISE:
            found[LOSS].backward()
        for name, value in found.items():
            number = float(value.detach() if torch.is_tensor(value) else value)
            self.terms[name] = self.terms.get(name, 0.0) + number / scale
        return torch.zeros((), device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> float:
        """Add up the terms and the gradient over the processes, clip it, and return its norm before.

        Raises:
            Diverged: if a term or the gradient is not finite; then no weight has changed.
        """
        if self.accelerator.num_processes > 1:
            if not self.sharded:
                self.reduce_gradients(self.parameters.values())
            self.terms = dict(zip(self.terms, self.reduce_numbers(list(self.terms.values())), strict=True))
        for name, value in self.terms.items():
            if not math.isfinite(value):
                raise Diverged(f"the {'loss' if name == LOSS else f'error of {name}'} became {value}")
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer.optimizer)
        norm = float(whole(nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)))
        # In fp16 the scaler leaves this step out, and halves its factor.
        if not math.isfinite(norm) and self.scaler.get_scale() <= self.smallest_scale:
            self.scaler.update()
            raise Diverged(f"the gradient became {norm}")
        return norm

    def held_out_loss(self, held_out: list[dict[str, Tensor]]) -> float:
        """Return the phase's loss on held-out batches."""
        with autocast(self.accelerator, self.passes):
            if self.phase == BLOCKWISE:
                errors = summed(partial(self.objective.blockwise, train=False), held_out)
                return sum(errors.values()) / max(len(errors), 1)
            return measure(self.objective, held_out).loss

    def trained(self) -> dict[str, Tensor]:
        return dict(self.parameters)

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        super().restore(snapshot)
        for module in self.objective.student.modules():
            if isinstance(module, FSDPModule):
                # Or its next pass would take the weights that it gathered before.
                module.reshard()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's moments and the scaler's factor by name."""
        if not self.scaler.is_enabled():
            return super().optimizer_tensors()
        state = self.scaler.state_dict()
        return super().optimizer_tensors() | {"scaler": torch.tensor([state["scale"], state["_growth_tracker"]])}

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_optimizer_tensors(tensors)
        if "scaler" in tensors:
            scale, steps = tensors["scaler"].tolist()
            self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": scale, "_growth_tracker": int(steps)})


def training_arguments(config: AlignConfig, accelerator: Accelerator) -> TrainingArguments:
    """Return the options in transformers' form; the run itself measures, saves and reports."""
    return TrainingArguments(
        # It exists, and nothing is written to it.
        output_dir=os.curdir,
        max_steps=1,
        gradient_accumulation_steps=config.gradient_accumulation,
        max_grad_norm=config.max_grad_norm,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=accelerator.device.type == "cpu",
        accelerator_config={"use_configured_state": True},
    )
