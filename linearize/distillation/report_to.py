"""Curves for TensorBoard, when asked for; the plain log is written in any case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from linearize.errors import ConfigError, unknown_name

KINDS = ("none", "tensorboard")


@contextlib.contextmanager
def reporter(kind: str, folder: str | Path, tag: str = "stage_one") -> Iterator[Callable[[Any], None]]:
    """Give a function that is called with every `StepReport` while the block runs.

    Args:
        kind: one of `KINDS`.
        folder: for TensorBoard's files.
        tag: what the curves' names begin with.

    Raises:
        UnknownNameError: for another kind.
        ConfigError: if TensorBoard is not installed.
    """
    if kind not in KINDS:
        raise unknown_name("report_to", kind, KINDS)
    if kind == "none":
        yield lambda report: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "report_to: got tensorboard, but it is not installed; pip install tensorboard, or leave the option out"
        ) from None
    writer: Any = SummaryWriter(str(folder))

    def write(report: Any) -> None:
        values = {"loss": report.loss, "learning_rate": report.learning_rate, "held_out": report.held_out}
        values |= {f"layer/{name}": loss for name, loss in report.losses.items()}
        for name, value in values.items():
            if value is not None:
                writer.add_scalar(f"{tag}/{name}", value, report.step)

    try:
        yield write
    finally:
        writer.close()
