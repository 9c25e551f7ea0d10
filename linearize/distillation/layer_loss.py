"""One layer's loss and gradient, taken as soon as the layer has run: nothing of it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linearize.attention.layer import LinearAttention
from linearize.distillation.config import DistillConfig
from linearize.distillation.losses import Targets, output_loss, weights_loss
from linearize.errors import ConfigError
from linearize.fidelity.observe import has_rows, softmax_output


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
    """

    name: str
    layer: LinearAttention
    weights: float
    output: float
    penalty: float | None
    total: float = 0.0
    count: float = 0.0

    def reset(self) -> None:
        """Start a new sum."""
        self.total = self.count = 0.0

    @property
    def mean(self) -> float:
        """The loss per valid query and head."""
        return self.total / self.count if self.count else float("nan")

    def add(self, targets: Targets, v: Tensor, *, train: bool, sample: Tensor | None) -> None:
        """Add a batch; with `train` also its gradient (of the sum) to the kernel's parameters."""
        with torch.autocast(device_type=v.device.type, enabled=False), torch.set_grad_enabled(train):
            loss = self._loss(targets, v, sample)
        if train and loss.requires_grad:
            loss.backward()
        self.total += float(loss.detach())
        shown = targets if sample is None else _sampled(targets, sample)
        self.count += shown.size()

    def _loss(self, targets: Targets, v: Tensor, sample: Tensor | None) -> Tensor:
        q, k, mask, scaling = targets.q, targets.k, targets.key_padding_mask, targets.scaling
        loss = torch.zeros((), device=q.device)
        if self.weights:
            mixer: Any = self.layer.mixer
            phi_q, phi_k, log_scale = mixer.mapped(q, k, scaling=scaling, key_padding_mask=mask)
            shown = targets
            if sample is not None:
                phi_q, shown = phi_q[:, :, sample], _sampled(targets, sample)
            loss = loss + self.weights * weights_loss(phi_q, phi_k, log_scale, shown, negative_penalty=self.penalty)
        if self.output:
            out = self.layer(q, k, v, mask, scaling)
            target = softmax_output(self.layer, q, k, v, mask, scaling)
            if sample is not None:
                out, target, targets = out[:, :, sample], target[:, :, sample], _sampled(targets, sample)
            loss = loss + self.output * output_loss(out, target, targets)
        return loss


def _sampled(targets: Targets, positions: Tensor) -> Targets:
    return targets._replace(q=targets.q[:, :, positions], positions=positions)


def layer_loss(name: str, layer: LinearAttention, config: DistillConfig) -> LayerLoss:
    """Choose a layer's loss by what its kernel supports.

    Raises:
        ConfigError: if the loss that was asked for does not fit the kernel.
    """
    info = layer.mixer.info
    walkable = info.normalized and has_rows(layer)
    kind = config.loss
    if kind == "auto":
        kind = info.stage_one.loss if walkable else "output"
    if kind in ("weights", "both") and not walkable:
        raise ConfigError(
            f"stage one: kernel {info.name!r} has no normalised weights to compare with softmax's; use --loss output"
        )
    penalty = None
    if not info.positive:
        penalty = info.stage_one.negative_penalty if config.negative_penalty is None else config.negative_penalty
    return LayerLoss(name, layer, float(kind in ("weights", "both")), float(kind in ("output", "both")), penalty)
