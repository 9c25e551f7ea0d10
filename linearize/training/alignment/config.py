"""Options of the alignment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from linearize.core.errors import ConfigError
from linearize.core.options import option
from linearize.training.config import LARGEST, PRECISIONS, RunConfig

TRAINED = ("kernels", "attention", "blocks", "lora")
POOLINGS = ("mean", "first", "last")
WEIGHTS = ("hidden_weight", "pooled_weight", "logits_weight")
BLOCKWISE, END_TO_END = "blockwise", "end to end"
SMALLEST = 1e-6
"""Smallest temperature or gradient norm: losses are divided by them."""
_amount = partial(option, low=0, high=LARGEST)
"""Declares a rate or a weight: one above `LARGEST` is a mistake."""


@dataclass(frozen=True)
class AlignConfig(RunConfig):
    """How the alignment brings a whole converted model close to its original.

    Raises:
        ConfigError: on construction, for a value out of range, if all weights are 0, or if states have no folder.
    """

    steps: int = option(400, "optimizer steps, blockwise ones included; 0 skips the alignment", low=0)
    blockwise: float = option(0.25, "share of steps that align each block under the teacher's inputs", low=0, high=1)
    train: str = option(
        "blocks", "what is trained: kernels, attention, blocks, or lora (on attention)", choices=TRAINED, metavar="WHAT"
    )
    learning_rate: float = _amount(2e-4, "peak learning rate of the weights that came from the original")
    kernel_learning_rate: float = _amount(1e-3, "peak learning rate of the kernels")
    hidden_weight: float = _amount(1.0, "weight of the hidden states' error")
    pooled_weight: float = _amount(1.0, "weight of the pooled output's distance (1 - cosine)")
    pooling: str = option(
        "mean", "pooled output: the mean over tokens, or the first or last token", choices=POOLINGS, metavar="HOW"
    )
    logits_weight: float = _amount(1.0, "weight of the logits' divergence, where the model has a head")
    temperature: float = option(1.0, "temperature of the logits' divergence", low=SMALLEST, high=LARGEST)
    lora_rank: int = option(8, "rank of the low-rank updates with train=lora", low=1)
    weight_decay: float = _amount(0.0, "AdamW's weight decay")
    warmup: float = option(0.05, "share of a phase in which the rate rises; it then falls as a cosine", low=0, high=1)
    max_grad_norm: float = option(1.0, "gradient clipping", low=SMALLEST, high=LARGEST)
    eval_every: int = option(50, "steps between evaluations on held-out data", low=1)
    patience: int = option(
        3, "how many times the rate is halved, each after two worse evaluations, before the phase stops", low=0
    )
    precision: str = option("no", "mixed precision of the passes: no, bf16 or fp16", choices=PRECISIONS, metavar="TYPE")
    seed: int = option(0, "seed of the low-rank updates")

    def __post_init__(self) -> None:
        self.check("alignment")
        if not any(getattr(self, name) for name in WEIGHTS):
            raise ConfigError(f"alignment: got {', '.join(WEIGHTS)} all 0, expected at least one above; raise one")

    def phases(self) -> list[tuple[str, int]]:
        """Return the phases with steps, in order: ("blockwise" or "end to end", steps)."""
        blockwise = round(self.steps * self.blockwise)
        return [(name, n) for name, n in ((BLOCKWISE, blockwise), (END_TO_END, self.steps - blockwise)) if n]
