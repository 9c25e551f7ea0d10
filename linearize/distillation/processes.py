"""Several processes, as `accelerate launch` and `torchrun` start them: which one this is, and how it waits."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from linearize.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator


def several() -> bool:
    """Tell whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    """Tell whether this is the process that prints and writes; a single one is."""
    return not several() or os.environ.get("RANK", "0") == "0"


def under_fsdp() -> bool:
    """Tell whether this is one of several processes among which the weights are shared out (FSDP)."""
    return several() and os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def check_alone(what: str) -> None:
    """Refuse what one process does by itself where several were started.

    Raises:
        ConfigError: if several were.
    """
    if several():
        raise ConfigError(f"{what}: got several processes, expected one; start it without a launcher")


def own_device(name: str) -> str:
    """Return the device of this process: of several that share a machine, "auto" gives each a GPU of its own.

    Raises:
        ConfigError: if one device is named for several processes, or FSDP would use the GPUs that shall not be used.
    """
    from linearize.loading import check_device

    if not several():
        return check_device(name)
    if name not in ("auto", "cpu"):
        raise ConfigError(
            f"device: got {name!r} for {os.environ['WORLD_SIZE']} processes, expected auto, which gives each its own, "
            "or cpu; leave --device out"
        )
    found = check_device("auto")
    if name == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        if found == "cuda" and under_fsdp():
            raise ConfigError("device: got cpu under FSDP where there are GPUs, which it takes; launch without FSDP")
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if found == "cuda" else found


def wait_for_all() -> None:
    """Wait until every process is here."""
    if several():
        from accelerate import PartialState

        PartialState().wait_for_everyone()


def autocast(accelerator: Accelerator, precision: str) -> AbstractContextManager[None]:
    """Return the context of a pass: the precision that was asked for, or the one of the user's `accelerate config`."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if dtype is None:
        return accelerator.autocast()
    return torch.autocast(accelerator.device.type, dtype)
