"""Train all candidates of all layers in one pass of the frozen model per batch, and measure their errors likewise.

Inside a layer the candidates take turns: loss and gradient of each are computed at once, so no activations are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import linear_attentions, observed
from linearize.attention.layer import LinearAttention
from linearize.core.errors import TrainingError
from linearize.fidelity.teacher import run_body, softmax_output
from linearize.kernel_search.candidates import Layout
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.observer import KernelTrainer, LayerLoss, layer_loss
from linearize.training.stage_one.processes import autocast

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


@torch.no_grad()
def errors(
    model: PreTrainedModel,
    candidates: Candidates,
    keys: Iterable[Key],
    held_out: Iterable[Mapping[str, Tensor]],
    *,
    accelerator: Accelerator,
    precision: str = "no",
) -> dict[Key, float]:
    """Return the errors of candidates' outputs: the norm of the difference from softmax's, over the norm of softmax's.

    Args:
        model: the frozen model.
        candidates: the candidates.
        keys: the candidates to measure, which are left in evaluation mode.
        held_out: held-out batches.
        accelerator: determines the device.
        precision: precision of the frozen model.

    Returns:
        The errors, infinite or NaN if an output is. All processes measure all of the data, so their errors are equal.
    """
    of_layer: dict[int, list[Key]] = {}
    for key in keys:
        candidates.modules[key].eval()
        of_layer.setdefault(key[0], []).append(key)
    error = {key: torch.zeros((), dtype=torch.float64) for row in of_layer.values() for key in row}
    power = {number: torch.zeros((), dtype=torch.float64) for number in of_layer}

    def observe(
        layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        number = candidates.number_of[id(layer)]
        with torch.autocast(device_type=q.device.type, enabled=False):
            target = softmax_output(layer, q.float(), k.float(), v.float(), mask, scaling)
            padding = None if mask is None else ~mask[:, None, :, None].bool()
            power[number] += _square_sum(target, padding)
            for key in of_layer[number]:
                out = candidates.modules[key](q, k, v, mask, scaling).float()
                error[key] += _square_sum(out - target, padding)
        # The host itself would build a T x T mask from the causal mask and the padding.
        return target.to(v.dtype) if layer.shape.causal else None

    for batch in held_out:
        moved = {name: value.to(accelerator.device) for name, value in batch.items()}
        with observed(model, observe), autocast(accelerator, precision):
            run_body(model, moved)
    return {key: float((value / power[key[0]].clamp(min=1e-30)).sqrt()) for key, value in error.items()}


def _square_sum(values: Tensor, padding: Tensor | None) -> Tensor:
    """Sum the squares outside the padding, which is filled, not multiplied, with 0, as it may hold NaN."""
    squares = values.square() if padding is None else values.square().masked_fill(padding, 0.0)
    return squares.sum().double().cpu()
