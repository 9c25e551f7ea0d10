"""Options of the alignment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from linearize.errors import ConfigError

TRAINED = ("kernels", "attention", "blocks", "lora")
PRECISIONS = ("no", "bf16", "fp16")
POOLINGS = ("mean", "first")
WEIGHTS = ("hidden_weight", "pooled_weight", "logits_weight")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class AlignConfig:
    """How a whole converted model is brought close to its original."""

    steps: int = _option(400, "optimizer steps, blockwise ones included; 0 skips the alignment")
    blockwise: float = _option(0.25, "share of the steps in which each block is aligned under the teacher's inputs")
    train: str = _option("blocks", "what is trained: kernels, attention, blocks, or lora (on the attention)")
    learning_rate: float = _option(2e-4, "peak learning rate of the weights that came from the original")
    kernel_learning_rate: float = _option(1e-3, "peak learning rate of the kernels")
    hidden_weight: float = _option(1.0, "weight of the hidden states' error")
    pooled_weight: float = _option(1.0, "weight of the pooled output's distance (1 - cosine)")
    pooling: str = _option("mean", "what the pooled output is: the mean over tokens, or the first token's state")
    logits_weight: float = _option(1.0, "weight of the logits' divergence, where the model has a head")
    temperature: float = _option(1.0, "temperature of the logits' divergence")
    lora_rank: int = _option(8, "rank of the low-rank updates with train=lora")
    weight_decay: float = _option(0.0, "AdamW's weight decay")
    warmup: float = _option(0.05, "share of a phase's steps in which the rate rises; it then falls as a cosine")
    max_grad_norm: float = _option(1.0, "gradient clipping")
    eval_every: int = _option(50, "steps between evaluations on held-out data")
    patience: int = _option(3, "how often the rate is halved after two worse evaluations before the phase is stopped")
    gradient_accumulation: int = _option(1, "batches per optimizer step")
    precision: str = _option("no", "mixed precision of the passes: no, bf16 or fp16")
    save_every: int | None = _option(None, "steps between states on disk")
    keep: int = _option(2, "how many states are kept")
    folder: str | None = _option(None, "where states are kept")
    resume: bool = _option(False, "go on from the newest state in the folder")
    seed: int = _option(0, "seed of the low-rank updates")

    def __post_init__(self) -> None:
        lowest = {"steps": 0, "eval_every": 1, "patience": 0, "gradient_accumulation": 1, "keep": 1, "lora_rank": 1}
        for name, low in lowest.items():
            _whole(name, getattr(self, name), low)
        if self.save_every is not None:
            _whole("save_every", self.save_every, 1)
        if (self.save_every or self.resume) and self.folder is None:
            raise ConfigError("alignment: save_every and resume need a folder for the states; set folder")
        for name in (*WEIGHTS, "learning_rate", "kernel_learning_rate", "weight_decay"):
            _number(name, getattr(self, name), 0)
        if not any(getattr(self, name) for name in WEIGHTS):
            raise ConfigError(f"alignment: got {', '.join(WEIGHTS)} all 0, expected at least one above; raise one")
        for name in ("blockwise", "warmup"):
            _number(name, getattr(self, name), 0, 1)
        for name in ("temperature", "max_grad_norm"):
            _number(name, getattr(self, name), 1e-6)
        for name, allowed in (("train", TRAINED), ("precision", PRECISIONS), ("pooling", POOLINGS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"alignment, {name}: got {getattr(self, name)!r}, expected one of {', '.join(allowed)}"
                )

    def phases(self) -> list[tuple[str, int]]:
        """Return the phases that have steps, in order: ("blockwise" or "end to end", steps)."""
        blockwise = round(self.steps * self.blockwise)
        return [(name, n) for name, n in ((BLOCKWISE, blockwise), (END_TO_END, self.steps - blockwise)) if n]


BLOCKWISE, END_TO_END = "blockwise", "end to end"


def _whole(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"alignment, {name}: got {value!r}, expected a whole number of at least {low}")


def _number(name: str, value: Any, low: float, high: float = 1e6) -> None:
    # Written so that NaN is refused too.
    if not low <= value <= high:
        raise ConfigError(f"alignment, {name}: got {value}, expected a number from {low:g} to {high:g}")
