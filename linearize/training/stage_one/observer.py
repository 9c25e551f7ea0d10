"""The step of stage one: a pass of the frozen model in which every kernel gets its loss and gradient.

The layers of the frozen model pass their q, k and v to the trainer while they run. Each layer's gradient is computed
immediately, from those tensors alone; nothing is kept for later layers, and only feature maps have an autograd graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.attention.interface import observed
from linearize.attention.layer import LinearAttention
from linearize.attention.parts import HEADS, NEAR, ROUTED, SCALED, check_parts
from linearize.core.errors import ConfigError, TrainingError
from linearize.core.registry import SCALES, StageOne
from linearize.fidelity.teacher import frozen_output, has_rows, run_body, softmax_output
from linearize.kernels.base import Inputs
from linearize.training.processes import autocast
from linearize.training.run import PartTrainer
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.loss import Targets, cross_entropy, output_loss

OWN = ("learning_rate", "weight_decay", "warmup", "negative_penalty")
"""Options whose default is the kernel's own."""


@dataclass(eq=False)
class LayerLoss:
    """Computes the loss of one layer and sums it up over batches.

    Attributes:
        name: name of the host module.
        layer: the converted layer.
        training: learning rate and others: the options given, else the kernel's own.
        weights: whether the cross-entropy of the attention weights counts.
        output: weight of the squared error of the outputs.
        penalty: weight of the negative mass; None for positive maps.
        total: sum of the loss since the last `reset`.
        count: number of valid queries times heads in that sum.
        host: the layer of the frozen model that provides q, k and v; None for the converted layer itself.
    """

    name: str
    layer: LinearAttention
    training: StageOne
    weights: bool
    output: float
    penalty: float | None
    total: float = 0.0
    count: float = 0.0
    host: LinearAttention | None = None

    def reset(self) -> None:
        """Start a new sum."""
        self.total = self.count = 0.0

    @property
    def mean(self) -> float:
        """The loss per valid query and head."""
        return self.total / self.count if self.count else float("nan")

    def add(self, targets: Targets, v: Tensor, *, train: bool, sample: Tensor | None) -> None:
        """Add a batch's loss; with `train`, also add the gradient of the sum to the kernel's parameters.

        Heads that keep softmax do not count.

        Args:
            targets: the frozen layer, with the queries of all tokens.
            v: its values [B, K, T, V].
            train: whether to compute the gradient.
            sample: tokens [R] whose queries count; None for all.
        """
        chosen = targets.counting(self.layer.mixer.heads).sampled(sample)
        with torch.autocast(device_type=v.device.type, enabled=False):
            if self.weights:
                self.total += float(self._weights(targets, chosen, train))
            if self.output:
                q, k, v, mask, scaling = targets.q, targets.k, v.float(), targets.key_padding_mask, targets.scaling
                with torch.set_grad_enabled(train):
                    # Values in fp32 give an output in fp32: half precision would round small errors away.
                    out = self.layer(q, k, v, mask, scaling)
                    target = softmax_output(self.layer, q.float(), k.float(), v, mask, scaling)
                    loss = output_loss(out, target, chosen)
                    if train and loss.requires_grad:
                        (self.output * loss).backward()
                self.total += self.output * float(loss.detach())
        self.count += chosen.size()

    def _weights(self, targets: Targets, chosen: Targets, train: bool) -> Tensor:
        """Return the cross-entropy of the chosen queries' weights; only features exist for all tokens at once."""
        mixer = self.layer.map_mixer
        with torch.set_grad_enabled(train):
            queries, keys = mixer.mapped(
                targets.q,
                targets.k,
                scaling=targets.scaling,
                key_padding_mask=targets.key_padding_mask,
                rows=chosen.positions,
            )
        with torch.no_grad():
            window = mixer.form(targets.scaling)
            loss, gradients = cross_entropy(queries, keys, chosen, self.penalty, window, gradient=train)
        pairs = zip((*queries, *keys), gradients, strict=True)
        reached = [(x, gradient) for x, gradient in pairs if x is not None and gradient is not None and x.requires_grad]
        if reached:
            torch.autograd.backward([x for x, _ in reached], [gradient for _, gradient in reached])
        return loss


def layer_loss(name: str, layer: LinearAttention, config: DistillConfig) -> LayerLoss:
    """Choose a layer's loss among those that its kernel supports.

    Raises:
        ConfigError: if the requested loss does not fit the kernel, or stage one does not handle an addition to it.
    """
    check_parts(layer.hybrid, NEAR | ROUTED | SCALED | HEADS, "stage one")
    info = layer.mixer.info
    options = {name: value for name in OWN if (value := getattr(config, name)) is not None}
    training = replace(info.training(layer.mixer.config), **options)
    walkable = info.normalized and has_rows(layer) and (layer.mixer.positive or layer.hybrid.window is None)
    kind = config.loss
    if kind == "auto":
        # Without scales, a kernel joined with a window cannot match softmax's magnitude, but its outputs can match.
        unscaled = layer.hybrid.window is not None and layer.hybrid.scale == SCALES[0]
        kind = training.loss if walkable and not unscaled else "output"
    if kind in ("weights", "both") and not walkable:
        raise ConfigError(
            f"stage one: kernel {info.name!r} has no normalised weights to compare with softmax's; use --loss output"
        )
    output = {"weights": 0.0, "output": 1.0, "both": config.output_weight}[kind]
    penalty = None if layer.mixer.positive else training.negative_penalty
    return LayerLoss(name, layer, training, kind in ("weights", "both"), output, penalty)


class KernelTrainer(PartTrainer):
    """Trains the kernels of some layers together; the rest of the model stays frozen.

    Sums and counts are divided once per step, so the loss is a mean over all valid queries of the global batch, however
    it is split over batches or processes.
    """

    def __init__(
        self, model: PreTrainedModel, layers: list[LayerLoss], config: DistillConfig, accelerator: Accelerator
    ) -> None:
        self.model, self.layers, self.config = model, layers, config
        # One group per layer, with its own rates.
        groups = [
            {
                "params": list(loss.layer.parameters()),
                "weight_decay": loss.training.weight_decay,
                "peak": loss.training.learning_rate,
                "warmup": loss.training.warmup,
            }
            for loss in layers
        ]
        super().__init__(accelerator, groups)
        self.by_host: dict[int, list[LayerLoss]] = {}
        for loss in layers:
            self.by_host.setdefault(id(loss.host or loss.layer), []).append(loss)
        self.training = False
        self.sampler = torch.Generator().manual_seed(config.seed)
        self.drawn = self.sampler.get_state()

    def step(self, batches: Iterator[dict[str, Tensor]], step: int) -> float:
        """Do optimizer step number `step` (from 1), and return the first layer's learning rate.

        Raises:
            TrainingError: if a loss or gradient is not finite.
        """
        self.set_rates(step, self.config.steps)
        self.optimizer.zero_grad(set_to_none=True)
        for loss in self.layers:
            loss.reset()
        with self.one_batch() as learned:
            for _ in range(self.config.gradient_accumulation):
                self._pass(next(batches), train=True)
        if self.accelerator.num_processes > 1:
            # The batches of all processes form one batch.
            sums = self.reduce_numbers([[loss.total, loss.count] for loss in self.layers])
            for loss, (total, count) in zip(self.layers, sums, strict=True):
                loss.total, loss.count = total, count
                self.reduce_gradients(loss.layer.parameters())
        for loss in self.layers:
            self.finish_gradient(loss, step)
        self.interrupts.hold()
        self.optimizer.step()
        for module, noted in learned.items():
            module.learn(noted)
        self.drawn = self.sampler.get_state()
        return float(self.optimizer.param_groups[0]["lr"])

    @contextmanager
    def one_batch(self) -> Iterator[dict[Inputs, Tensor]]:
        """Let running statistics learn from all batches of a step as from one; yield their sums, filled in at the end.

        Otherwise each batch would change them for the next, and each process would have its own.
        """
        sums: dict[Inputs, Tensor] = {}
        modules = [module for loss in self.layers for module in loss.layer.modules() if isinstance(module, Inputs)]
        for module in modules:
            module.noted = []
        try:
            yield sums
            for module in modules:
                if module.noted:
                    numbers = self.reduce_numbers(torch.stack(module.noted).sum(dim=0).tolist())
                    sums[module] = torch.tensor(numbers, dtype=torch.float64)
        finally:
            for module in modules:
                module.noted = None

    def finish_gradient(self, loss: LayerLoss, step: int) -> None:
        """Turn a layer's gradient of the sum into that of the mean, and clip it.

        Raises:
            TrainingError: if its loss or gradient is not finite.
        """
        check_finite(loss.total, "loss", loss.name, step)
        parameters = list(loss.layer.parameters())
        for gradient in (p.grad for p in parameters if p.grad is not None):
            # Without any valid query, the gradient is zero.
            gradient.div_(max(loss.count, 1.0))
        norm = nn.utils.clip_grad_norm_(parameters, loss.training.max_grad_norm)
        check_finite(float(norm), "gradient", loss.name, step)

    def evaluate(self, held_out: Iterable[Mapping[str, Tensor]], step: int = 0) -> float:
        """Return the mean held-out loss over the layers.

        Raises:
            TrainingError: if it is not finite.
        """
        self.measure(held_out)
        for loss in self.layers:
            check_finite(loss.total, "loss", loss.name, step)
        return sum(loss.mean for loss in self.layers) / len(self.layers)

    @torch.no_grad()
    def measure(self, held_out: Iterable[Mapping[str, Tensor]]) -> None:
        """Add up every layer's loss over batches, without gradients."""
        for loss in self.layers:
            loss.reset()
            loss.layer.eval()
        for batch in held_out:
            self._pass(batch, train=False)
        for loss in self.layers:
            loss.layer.train()

    def _pass(self, batch: Mapping[str, Tensor], *, train: bool) -> None:
        """Run the frozen model once; `_observe` computes losses and gradients on the way."""
        self.training = train
        self.run_frozen(batch, self._observe)

    def run_frozen(self, batch: Mapping[str, Tensor], observe: Callable[..., Tensor | None]) -> None:
        """Run the frozen model on a batch, and show its layers to an observer."""
        moved = send_to_device(batch, self.accelerator.device, non_blocking=True)
        with torch.no_grad(), observed(self.model, observe), autocast(self.accelerator, self.config.precision):
            run_body(self.model, moved)

    def _observe(
        self, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        losses = self.by_host.get(id(layer))
        if losses:
            targets = Targets(q.detach(), k.detach(), scaling, layer.shape.causal, mask)
            count, tokens, sample = self.config.query_sample, q.shape[2], None
            if self.training and count is not None and count < tokens:
                # The positions of the queries in the loss.
                sample = self.draw(tokens, count).to(q.device)
            for loss in losses:
                loss.add(targets, v.detach(), train=self.training, sample=sample)
        if self.config.feed == "student":
            return layer(q, k, v, mask, scaling)
        return frozen_output(layer, q, k, v, mask, scaling)

    def draw(self, tokens: int, count: int) -> Tensor:
        """Draw `count` of the tokens, ascending."""
        return torch.randperm(tokens, generator=self.sampler)[:count].sort().values

    def trained(self) -> dict[str, Tensor]:
        return kernels_of(self.layers)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's moments and the sampler's random state after the last complete step, by name."""
        return super().optimizer_tensors() | {"sampler": self.drawn}

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.sampler.set_state(tensors["sampler"])
        self.drawn = self.sampler.get_state()
        super().load_optimizer_tensors(tensors)


def kernels_of(layers: Iterable[LayerLoss]) -> dict[str, Tensor]:
    """Return the parameters and buffers of the layers' kernels by name, not copied."""
    return {
        f"{loss.name}.{name}": tensor
        for loss in layers
        for name, tensor in loss.layer.state_dict(keep_vars=True).items()
    }


def check_finite(value: float, what: str, layer: str, step: int) -> None:
    """Check that the loss or the gradient of a layer is finite.

    Raises:
        TrainingError: if it is not.
    """
    if not math.isfinite(value):
        raise TrainingError(
            f"stage one: the {what} became {value} in layer {layer} at step {step}; the model keeps its best earlier "
            "state: lower the learning rate (--learning-rate), or check the data for broken inputs"
        )
