"""What is refused before a tuning, and what is switched in a model during it: trained parts, dropout, checkpointing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from linearize.attention.interface import linear_attentions
from linearize.core.errors import ConfigError
from linearize.training.adapters import adapter_files, add_lora, merge_lora
from linearize.training.stage_one.processes import under_fsdp
from linearize.training.stage_two.config import TuneConfig
from linearize.training.stage_two.prepared import TaskData

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARE = re.compile(r"(.+_)?dropout(_p|_prob)?")
"""Attributes that attention modules pass to a function, as they have no dropout layer. Dropping whole layers
(`layerdrop`, `drop_path`) is something else."""
LOW_RANK = "lora_"
"""Dropout of low-rank updates has a separate option."""


def check_adapter(config: TuneConfig, adapter_of: str | None) -> None:
    """Refuse to keep low-rank updates if the options have none.

    Raises:
        ConfigError: if they are wanted and the options have none.
    """
    if adapter_of is not None and config.lora is None:
        raise ConfigError("keep_adapter: got no low-rank updates to keep, expected some; give --lora r=8,alpha=16")


def check_fsdp() -> None:
    """Refuse FSDP runs that are not supported.

    Raises:
        ConfigError: for the first version of FSDP.
    """
    if under_fsdp():
        from linearize.training.stage_two.sharded import check_version

        check_version()


def check_trains(data: TaskData) -> None:
    """Refuse a task without anything to train.

    Raises:
        ConfigError: if it can only be measured.
    """
    if not data.type.trains:
        raise ConfigError(
            f"stage two: task {data.task.name} has nothing to train; bring the model closer to its original with "
            "`linearize align`, and measure it with `linearize evaluate`"
        )


def check_checkpointing(model: PreTrainedModel, wanted: bool) -> None:
    """Refuse gradient checkpointing of a model that does not support it.

    Raises:
        ConfigError: if it is wanted and the model does not.
    """
    if wanted and not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"gradient_checkpointing: {type(model).__name__} does not support it; leave it out, and lower batch_size "
            "with more gradient_accumulation instead"
        )


@contextlib.contextmanager
def checkpointing(model: PreTrainedModel, wanted: bool) -> Iterator[None]:
    """Temporarily compute each layer's activations again for its gradients (Chen et al. 2016), if wanted.

    Raises:
        ConfigError: if the model does not support it.
    """
    check_checkpointing(model, wanted)
    if not wanted:
        yield
        return
    model.activation_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.activation_checkpointing_disable()
        model.disable_input_require_grads()


@contextlib.contextmanager
def dropping(model: nn.Module, share: float | None) -> Iterator[None]:
    """Temporarily drop another share of the activations everywhere in a model; None: unchanged."""
    before: list[tuple[Any, str, float]] = []
    try:
        for module, name in places(model) if share is not None else ():
            before.append((module, name, getattr(module, name)))
            setattr(module, name, share)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where a model keeps the shares that it drops: modules, and the names of their attributes."""
    found: list[tuple[nn.Module, str]] = []
    for path, module in model.named_modules():
        if LOW_RANK in path:
            continue
        if isinstance(module, _DropoutNd):
            found.append((module, "p"))
        else:
            found += [(module, n) for n, v in vars(module).items() if isinstance(v, float) and SHARE.fullmatch(n)]
    return found


def set_trained(model: PreTrainedModel, config: TuneConfig) -> None:
    """Choose what is trained: low-rank updates with kernels and head, or everything; never frozen kernels."""
    if config.lora is not None:
        add_lora(model, config.lora)
    if config.freeze_kernels:
        for layer in linear_attentions(model).values():
            layer.requires_grad_(False)


def end_training(model: PreTrainedModel, config: TuneConfig, adapter_of: str | None) -> dict[str, bytes] | None:
    """Undo `set_trained`, merging low-rank updates; return their files if `adapter_of` names their model."""
    adapter = None
    if config.lora is not None:
        adapter = None if adapter_of is None else adapter_files(model, config.lora, adapter_of)
        merge_lora(model)
    elif config.freeze_kernels:
        model.requires_grad_(True)
    model.eval()
    return adapter
