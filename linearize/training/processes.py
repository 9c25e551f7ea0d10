"""Runs in several processes, as `accelerate launch` and `torchrun` start them; and Ctrl-C during a run."""

from __future__ import annotations

import os
import platform
import signal
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from accelerate import Accelerator


def several() -> bool:
    """Tell whether a launcher started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    """Tell whether this is the process that prints and writes; true for a single process."""
    return not several() or os.environ.get("RANK", "0") == "0"


def processor_name() -> str:
    """Return the name of the processor, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machines_used() -> str:
    """Return what a run computes on, for its record: the name of the device, threads and processes."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        name = torch.cuda.get_device_name()
    else:
        threads = torch.get_num_threads()
        name = f"{processor_name()}, {threads} thread{'s' if threads > 1 else ''}"
    count = int(os.environ.get("WORLD_SIZE", "1"))
    return f"{name}, in {count} processes" if count > 1 else name


def under_fsdp() -> bool:
    """Tell whether several processes share the weights (FSDP)."""
    return several() and os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def check_fsdp(stage: str, version: int) -> None:
    """Refuse the first version of FSDP.

    Raises:
        ConfigError: for another version than 2.
    """
    if version != 2:
        raise ConfigError(
            f"{stage}: got FSDP version {version}, expected 2; set fsdp_version: 2 under fsdp_config in the file of "
            "accelerate config"
        )


def check_launcher(stage: str) -> None:
    """Refuse ways to share weights that a stage does not have, by what `accelerate launch` sets.

    Raises:
        ConfigError: for the first version of FSDP, and for DeepSpeed: stages 1 and 2 of ZeRO make all weights views of
            one tensor, and stage 3 leaves no process a whole kernel.
    """
    if under_fsdp():
        check_fsdp(stage, int(os.environ.get("FSDP_VERSION", "1")))
    if several() and os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("1", "true"):
        raise ConfigError(
            f"{stage}: got DeepSpeed, which holds weights in forms that cannot be saved here, expected DDP or FSDP 2; "
            "launch with --multi_gpu, or with --use_fsdp --fsdp_version 2"
        )


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
        ConfigError: if one device is named for several processes.
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
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


def wait_for_all() -> None:
    """Wait until every process has reached this call."""
    if several():
        from accelerate import PartialState

        PartialState().wait_for_everyone()


def autocast(accelerator: Accelerator, precision: str) -> AbstractContextManager[None]:
    """Return the autocast context of a pass in `precision`; with "no", the user's `accelerate config` decides."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if dtype is None:
        return accelerator.autocast()
    return torch.autocast(accelerator.device.type, dtype)


class Interrupts:
    """Delays a Ctrl-C while a step is half done; a second Ctrl-C takes effect at once.

    This needs its `with` block in the main thread, where signals arrive; elsewhere it only tracks `held`.

    Attributes:
        held: whether a step is half done, so that the run's tensors must not be saved.
        waiting: whether a Ctrl-C is delayed.
    """

    def __init__(self) -> None:
        self.held = self.waiting = False
        self._before: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            if callable(self._before):
                signal.signal(signal.SIGINT, self._arrived)
        return self

    def __exit__(self, *error: object) -> None:
        if callable(self._before):
            signal.signal(signal.SIGINT, self._before)
        self._before = None

    def hold(self) -> None:
        """Mark the step as half done."""
        self.held = True

    def release(self) -> None:
        """Mark the step as done; a delayed Ctrl-C takes effect now.

        Raises:
            KeyboardInterrupt: if there was one.
        """
        self.held = False
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.held and not self.waiting:
            self.waiting = True
            return
        assert callable(self._before)
        self._before(number, frame)
