"""Train all candidates of all layers in one pass of the frozen model per batch.

Inside a layer the candidates take turns: loss and gradient of each are computed at once, so no activations are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.core.errors import TrainingError
from linearize.kernel_search.candidates import Layout
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.observer import KernelTrainer, LayerLoss, layer_loss

Key = tuple[int, str]
"""Number of a layer and label of a candidate."""


class Candidates:
    """Every candidate of every layer as a module, with the layer of the frozen model that provides its q, k and v.

    Attributes:
        hosts: the searched layers of the frozen model, by number.
        modules: the candidates, by layer number and label.
    """

    def __init__(self, layout: Layout, model: PreTrainedModel, device: torch.device) -> None:
        attentions = linear_attentions(model.base_model)
        self.hosts = {number: attentions[layer.module] for number, layer in layout.layers.items()}
        self.number_of = {id(host): number for number, host in self.hosts.items()}
        self.modules: dict[Key, LinearAttention] = {}
        for label, plans in layout.plans.items():
            for number, layer in plans.items():
                module = LinearAttention(*layer.mixer)
                module.reset_parameters(layout.base.seed + number)
                self.modules[number, label] = module.to(device).eval().requires_grad_(False)

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of all candidates by name, without copying."""
        return {
            f"{_name(key)}.{name}": tensor
            for key, module in self.modules.items()
            for name, tensor in module.state_dict(keep_vars=True).items()
        }


def _name(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


class SearchTrainer(KernelTrainer):
    """Trains some of the candidates together. If one diverges, it is dropped and the others continue.

    Attributes:
        dropped: the candidates that diverged.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        candidates: Candidates,
        keys: Iterable[Key],
        config: DistillConfig,
        accelerator: Accelerator,
    ) -> None:
        losses: list[LayerLoss] = []
        self.key_of: dict[int, Key] = {}
        self.dropped: set[Key] = set()
        for key in keys:
            module = candidates.modules[key]
            if any(True for _ in module.parameters()):
                loss = layer_loss(_name(key), module.train().requires_grad_(True), config)
                loss.host = candidates.hosts[key[0]]
                self.key_of[id(loss)] = key
                losses.append(loss)
        super().__init__(model, losses, config, accelerator)

    def _groups(self) -> list[dict[str, object]]:
        """Return one parameter group per candidate; an empty one in rungs that have nothing left to train."""
        return super()._groups() or [{"params": [], "peak": 0.0, "warmup": 0.0}]

    def finish_gradient(self, loss: LayerLoss, step: int) -> None:
        """Turn a candidate's gradient into that of the mean loss, and clip it; drop a candidate that diverged."""
        try:
            super().finish_gradient(loss, step)
        except TrainingError:
            self.drop(loss)

    def drop(self, loss: LayerLoss) -> None:
        """Remove a candidate from the training."""
        for losses in self.by_host.values():
            losses[:] = [other for other in losses if other is not loss]
        for parameter in loss.layer.parameters():
            parameter.grad = None
        self.layers = [other for other in self.layers if other is not loss]
        self.dropped.add(self.key_of[id(loss)])
