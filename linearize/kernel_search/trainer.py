"""All candidates of all layers, trained in one pass of the frozen model per batch; and their errors, measured likewise.

Candidates go in turn inside a layer: loss and gradient of each are taken on the spot, and nothing of a layer is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import observed
from linearize.attention.layer import LinearAttention
from linearize.distillation.config import DistillConfig
from linearize.distillation.observer import KernelTrainer, LayerLoss, layer_loss
from linearize.distillation.processes import autocast
from linearize.errors import TrainingError
from linearize.teacher.observe import run_body, softmax_output

Key = tuple[int, str]
"""Number of a layer and label of a candidate."""


class Bench:
    """Every candidate of every layer as a module of its own, beside the host that shows it q, k and v.

    Attributes:
        hosts: the converted layers of the frozen model, by number.
        modules: the candidates.
    """

    def __init__(self, hosts: Mapping[int, LinearAttention], modules: Mapping[Key, LinearAttention]) -> None:
        self.hosts, self.modules = hosts, modules
        self.number_of = {id(host): number for number, host in hosts.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of all candidates, themselves, by name."""
        return {
            f"{_name(key)}.{name}": tensor
            for key, module in self.modules.items()
            for name, tensor in module.state_dict(keep_vars=True).items()
        }


def _name(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


class SearchTrainer(KernelTrainer):
    """Trains some of the candidates together. One that leaves the numbers is dropped, the others go on.

    Attributes:
        dropped: the candidates that did.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bench: Bench,
        keys: Iterable[Key],
        config: DistillConfig,
        accelerator: Accelerator,
    ) -> None:
        losses: list[LayerLoss] = []
        self.key_of: dict[int, Key] = {}
        self.bench, self.dropped = bench, set[Key]()
        for key in keys:
            module = bench.modules[key]
            if not any(True for _ in module.parameters()):
                continue
            loss = layer_loss(_name(key), module.train().requires_grad_(True), config)
            loss.host = bench.hosts[key[0]]
            self.key_of[id(loss)] = key
            losses.append(loss)
        super().__init__(model, losses, config, accelerator)

    def _optimizer(self) -> tuple[torch.optim.AdamW, list[tuple[float, float]]]:
        """See `KernelTrainer`; there may be nothing to learn."""
        return super()._optimizer() if self.layers else (torch.optim.AdamW([{"params": []}]), [(0.0, 0.0)])

    def finish_gradient(self, loss: LayerLoss, step: int) -> None:
        """See `KernelTrainer`; a candidate that has left the numbers gets no gradient any more."""
        try:
            super().finish_gradient(loss, step)
        except TrainingError:
            self.drop(loss)

    def drop(self, loss: LayerLoss) -> None:
        """Go on without a candidate."""
        for losses in self.by_host.values():
            losses[:] = [one for one in losses if one is not loss]
        for parameter in loss.layer.parameters():
            parameter.grad = None
        self.layers = [one for one in self.layers if one is not loss]
        self.dropped.add(self.key_of[id(loss)])

    def evaluate(self, held_out: Iterable[Mapping[str, Tensor]], step: int = 0) -> float:
        """Return nothing to stop by: candidates are compared with each other at the end of a rung, by `errors`."""
        return 0.0


@torch.no_grad()
def errors(
    model: PreTrainedModel,
    bench: Bench,
    keys: Iterable[Key],
    held_out: Iterable[Mapping[str, Tensor]],
    *,
    accelerator: Accelerator,
    precision: str = "no",
) -> dict[Key, float]:
    """Measure how far candidates' outputs are from softmax's: the norm of the difference over softmax's own.

    Args:
        model: the frozen model.
        bench: the candidates.
        keys: those to measure.
        held_out: batches.
        accelerator: says the device.
        precision: of the frozen model.

    Returns:
        The errors, infinite or NaN where an output is. All processes measure all of the data, and find the same.
    """
    wanted: dict[int, list[Key]] = {}
    for key in keys:
        wanted.setdefault(key[0], []).append(key)
    error = {key: torch.zeros((), dtype=torch.float64) for found in wanted.values() for key in found}
    power = {number: torch.zeros((), dtype=torch.float64) for number in wanted}

    def observe(
        layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        number = bench.number_of[id(layer)]
        with torch.autocast(device_type=q.device.type, enabled=False):
            target = softmax_output(layer, q.float(), k.float(), v.float(), mask, scaling)
            padding = None if mask is None else ~mask[:, None, :, None].bool()
            power[number] += _square_sum(target, padding)
            for key in wanted.get(number, []):
                out = bench.modules[key](q, k, v, mask, scaling).float()
                error[key] += _square_sum(out - target, padding)
        # The host's own way would make a T x T mask of a causal one with padding.
        return target.to(v.dtype) if layer.shape.causal else None

    modules = [bench.modules[key] for key in error]
    training = [module.training for module in modules]
    device = accelerator.device
    for module in modules:
        module.eval()
    try:
        for batch in held_out:
            moved = {name: value.to(device) for name, value in batch.items()}
            with observed(model, observe), autocast(accelerator, precision):
                run_body(model, moved)
    finally:
        for module, mode in zip(modules, training, strict=True):
            module.train(mode)
    return {key: float((value / power[key[0]].clamp(min=1e-30)).sqrt()) for key, value in error.items()}


def _square_sum(values: Tensor, padding: Tensor | None) -> Tensor:
    """Sum squares outside the padding: filled, not multiplied, so that whatever stands there does not come through."""
    squares = values.square() if padding is None else values.square().masked_fill(padding, 0.0)
    return squares.sum().double().cpu()


__all__ = ["Bench", "Key", "SearchTrainer", "errors"]
