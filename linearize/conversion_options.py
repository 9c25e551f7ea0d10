"""What a user may say about a conversion, or about going on with stage one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StageOneOptions:
    """What a user may say about stage one and its data; see `DistillConfig` and `DataConfig`."""

    dataset: str | None = None
    text_column: str | None = None
    extra_pairs: float = 0.0
    image_column: str | None = None
    streaming: bool = False
    packing: bool = False
    bucket_by_length: bool = False
    distill_length: int | None = None
    distill_steps: int = 1000
    batch_size: int = 32
    holdout: int = 64
    learning_rate: float | None = None
    loss: str = "auto"
    output_weight: float = 1.0
    negative_penalty: float | None = None
    patience: int = 5
    feed: str = "teacher"
    query_sample: int | None = None
    layers_at_a_time: int | None = None
    gradient_accumulation: int = 1
    precision: str = "no"
    save_every: int | None = None
    keep_states: int = 2
    resume: bool = False
    output: str | None = None
    overwrite: bool = False
    device: str = "auto"
    seed: int = 0
    report_to: str = "none"


@dataclass(frozen=True)
class ConvertOptions(StageOneOptions):
    """What a user may say about a conversion; the command line's options one by one."""

    model: str = ""
    kernel: str | None = "hedgehog"
    kernel_args: Mapping[str, Any] = field(default_factory=dict)
    layers: str | None = None
    keep_softmax: tuple[int, ...] = ()
    window: int | None = None
    task: str | None = None
    revision: str | None = None
    max_length: int | None = None
    positions: str = "tile"
    align: Mapping[str, Any] = field(default_factory=dict)
    """Options of the alignment that differ from their defaults; see `AlignConfig`."""

    def target(self) -> str:
        """Return the output folder: as asked, or `<model-name>-<kernel>`."""
        return self.output or f"{Path(self.model).name}-{self.kernel or 'mixed'}"


@dataclass(frozen=True)
class DistillOptions(StageOneOptions):
    """What a user may say about going on with the distillation of a converted checkpoint."""

    model: str = ""

    def target(self) -> str:
        """Return the output folder: as asked, or `<folder>-distilled`."""
        return self.output or f"{Path(self.model).name}-distilled"
