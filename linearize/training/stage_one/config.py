"""Options of stage one."""

from __future__ import annotations

from dataclasses import dataclass

from linearize.core.options import option
from linearize.training.config import LARGEST, PRECISIONS, RunConfig

LOSSES = ("auto", "weights", "output", "both")
DISTILL_LENGTH = 256
"""Default tokens per training row: attention is learned well on short rows, and they are cheap."""
FEEDS = ("teacher", "student")
QUANTIZED = ("4bit", "8bit")
"""The frozen weights' bits, as libraries call them."""


@dataclass(frozen=True)
class DistillConfig(RunConfig):
    """How kernels learn to imitate softmax. None means the default in the kernel's registry entry."""

    steps: int = option(1000, "optimizer steps; 0 skips stage one", low=0)
    learning_rate: float | None = option(
        None, "peak learning rate of AdamW; by default the kernel's own", low=0, high=LARGEST
    )
    weight_decay: float | None = option(None, "AdamW's weight decay; by default the kernel's own", low=0, high=LARGEST)
    warmup: float | None = option(
        None, "share of the steps in which the rate rises; by default the kernel's own", low=0, high=1
    )
    loss: str = option(
        "auto", "weights, output, both, or auto: what the kernel supports", choices=LOSSES, metavar="LOSS"
    )
    negative_penalty: float | None = option(
        None, "weight of negative attention weights in the loss; by default the kernel's own", low=0, high=LARGEST
    )
    output_weight: float = option(1.0, "weight of the output's error in the loss `both`", low=0, high=LARGEST)
    feed: str = option(
        "teacher", "whose hidden states feed the next layer: teacher or student", choices=FEEDS, metavar="WHOSE"
    )
    query_sample: int | None = option(None, "compute the loss on N random queries per row, for long rows", low=1)
    eval_every: int = option(100, "steps between evaluations of the held-out loss", low=1)
    patience: int = option(5, "evaluations without a better held-out loss after which to stop; 0: never", low=0)
    precision: str = option("no", "precision of the frozen model: no, bf16 or fp16", choices=PRECISIONS, metavar="TYPE")
    quantize_frozen: str | None = option(
        None,
        "hold frozen weights in 4 or 8 bits while kernels learn (bitsandbytes); the result has the original weights",
        choices=QUANTIZED,
        metavar="BITS",
    )
    seed: int = option(0, "seed of the order of the data and the sampling")

    def __post_init__(self) -> None:
        self.check("stage one")
