"""What is refused before stage two begins, and gradient checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from linearize.distillation.processes import under_fsdp
from linearize.errors import ConfigError
from linearize.finetune.config import TuneConfig
from linearize.finetune.prepared import TaskData

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_adapter(config: TuneConfig, adapter_of: str | None) -> None:
    """Refuse to keep low-rank updates where there are none.

    Raises:
        ConfigError: if they are wanted and the options have none.
    """
    if adapter_of is not None and config.lora is None:
        raise ConfigError("keep_adapter: got no low-rank updates to keep, expected some; give --lora r=8,alpha=16")


def check_fsdp() -> None:
    """Refuse what several processes among which the weights are shared out (FSDP) cannot do.

    Raises:
        ConfigError: for the first version of FSDP.
    """
    if under_fsdp():
        from linearize.finetune.sharded import check_version

        check_version()


def check_trains(data: TaskData) -> None:
    """Refuse a task that has nothing to train.

    Raises:
        ConfigError: if it is one.
    """
    if data.wrap is not None:
        raise ConfigError(
            f"stage two: task {data.task.name} has nothing to train; bring the model closer to its original with "
            "`linearize align`, and measure it with `linearize evaluate`"
        )


def check_checkpointing(model: PreTrainedModel, wanted: bool) -> None:
    """Refuse gradient checkpointing of a model that does not know how.

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
    """Have layers compute their activations again for their gradients in the block (Chen et al. 2016), if wanted.

    Raises:
        ConfigError: if the model does not know how.
    """
    check_checkpointing(model, wanted)
    if wanted:
        model.activation_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        if wanted:
            model.activation_checkpointing_disable()
            model.disable_input_require_grads()
