"""Runs in several processes, as `accelerate launch` and `torchrun` start them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from linearize.core.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator


def several() -> bool:
    """Tell whether a launcher started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    """Tell whether this is the process that prints and writes; true for a single process."""
    return not several() or os.environ.get("RANK", "0") == "0"


def under_fsdp() -> bool:
    """Tell whether several processes share the weights (FSDP)."""
    return several() and os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def check_alone(what: str) -> None:
    """Check that a launcher did not start several processes.

    Raises:
        ConfigError: if it did.
    """
    if several():
        raise ConfigError(f"{what}: got several processes, expected one; start it without a launcher")


def own_device(name: str) -> str:
    """Return the device of this process; "auto" gives each process of a machine its own GPU.

    Raises:
        ConfigError: if one device is named for several processes, or FSDP would use GPUs despite `cpu`.
    """
    from linearize.checkpoint.loading import check_device

    if not several():
        return check_device(name)
    if name not in ("auto", "cpu"):
        raise ConfigError(
            f"device: got {name!r} for {os.environ['WORLD_SIZE']} processes, expected auto, which gives each its own, "
            "or cpu; leave --device out"
        )
    device = check_device("auto")
    if name == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        if device == "cuda" and under_fsdp():
            raise ConfigError("device: got cpu under FSDP where there are GPUs, which it uses; launch without FSDP")
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


def wait_for_all() -> None:
    """Wait until every process has reached this call."""
    if several():
        from accelerate import PartialState

        PartialState().wait_for_everyone()


def autocast(accelerator: Accelerator, precision: str) -> AbstractContextManager[None]:
    """Return the autocast context of a pass: `precision`, or with "no" that of the user's `accelerate config`."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if dtype is None:
        return accelerator.autocast()
    return torch.autocast(accelerator.device.type, dtype)
