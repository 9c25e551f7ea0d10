"""One layer's loss and gradient, taken as soon as the layer has run: nothing of it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linearize.attention.layer import LinearAttention
from linearize.distillation.blocks import cross_entropy_
from linearize.distillation.config import DistillConfig
from linearize.distillation.features import LayerFeatures
from linearize.distillation.losses import output_loss
from linearize.distillation.targets import Targets
from linearize.errors import ConfigError
from linearize.registry import SCALES, StageOne
from linearize.teacher.observe import has_rows, softmax_output


@dataclass
class LayerLoss:
    """Computes the loss of one layer and gathers it over batches.

    Attributes:
        name: the host module.
        layer: the converted layer.
        weights: weight of the cross-entropy on weights.
        output: weight of the squared error of the outputs.
        penalty: weight of the negative mass; None for positive maps.
        total: sum of the loss since the last `reset`.
        count: valid queries times heads in it.
        host: the layer of the frozen model that shows q, k and v; None: the converted layer itself.
    """

    name: str
    layer: LinearAttention
    weights: float
    output: float
    penalty: float | None
    total: float = 0.0
    count: float = 0.0
    host: LinearAttention | None = None

    @property
    def training(self) -> StageOne:
        """How the layer's kernel is trained unless asked otherwise."""
        return self.layer.mixer.info.training(self.layer.mixer.config)

    def reset(self) -> None:
        """Start a new sum."""
        self.total = self.count = 0.0

    @property
    def mean(self) -> float:
        """The loss per valid query and head."""
        return self.total / self.count if self.count else float("nan")

    def add(self, targets: Targets, v: Tensor, *, train: bool, sample: Tensor | None) -> None:
        """Add a batch; with `train` also its gradient (of the sum) to the kernel's parameters."""
        with torch.autocast(device_type=v.device.type, enabled=False):
            if self.weights:
                self.total += self.weights * float(self._weights(targets, train, sample))
            if self.output:
                self.total += self.output * float(self._output(targets, v, train, sample))
        shown = targets if sample is None else targets.sampled(sample)
        self.count += shown.size()

    def _weights(self, targets: Targets, train: bool, sample: Tensor | None) -> Tensor:
        """Return the cross-entropy of the weights; nothing but the features is ever held for all tokens."""
        features = LayerFeatures(self.layer, targets, sample)
        with torch.no_grad():
            queries, keys = features.whole()
            shown = targets if sample is None else targets.sampled(sample)
            mixer: Any = self.layer.mixer
            window = mixer.form(targets.scaling)
            loss = cross_entropy_(queries, keys, shown, self.penalty, window, gradient=train)
        if train:
            features.backward(self.weights, queries, keys)
        return loss

    def _output(self, targets: Targets, v: Tensor, train: bool, sample: Tensor | None) -> Tensor:
        """Return the squared error of the outputs."""
        q, k, _, _, mask, _ = targets
        with torch.set_grad_enabled(train):
            out = self.layer(q, k, v, mask, targets.scaling)
            target = softmax_output(self.layer, q.float(), k.float(), v.float(), mask, targets.scaling)
            if sample is not None:
                out, target, targets = out[:, :, sample], target[:, :, sample], targets.sampled(sample)
            loss = output_loss(out, target, targets)
            if train and loss.requires_grad:
                (self.output * loss).backward()
        return loss.detach()


def layer_loss(name: str, layer: LinearAttention, config: DistillConfig) -> LayerLoss:
    """Choose a layer's loss by what its kernel supports.

    Raises:
        ConfigError: if the loss that was asked for does not fit the kernel.
    """
    info, own = layer.mixer.info, layer.mixer.info.training(layer.mixer.config)
    walkable = info.normalized and has_rows(layer) and (layer.mixer.positive or layer.hybrid.window is None)
    kind = config.loss
    if kind == "auto":
        # Without scales a kernel beside a window cannot have softmax's size: its outputs are what it can match.
        unscaled = layer.hybrid.window is not None and layer.hybrid.scale == SCALES[0]
        kind = own.loss if walkable and not unscaled else "output"
    if kind in ("weights", "both") and not walkable:
        raise ConfigError(
            f"stage one: kernel {info.name!r} has no normalised weights to compare with softmax's; use --loss output"
        )
    penalty = None
    if not layer.mixer.positive:
        penalty = own.negative_penalty if config.negative_penalty is None else config.negative_penalty
    output = {"weights": 0.0, "output": 1.0, "both": config.output_weight}[kind]
    return LayerLoss(name, layer, float(kind in ("weights", "both")), output, penalty)
