"""Options of stage one."""

from __future__ import annotations

from dataclasses import dataclass, field

from linearize.errors import ConfigError

LOSSES = ("auto", "weights", "output", "both")
PRECISIONS = ("no", "bf16", "fp16")
FEEDS = ("teacher", "student")


def _option(default: object, help: str) -> object:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class DistillConfig:
    """How kernels are taught to imitate softmax. None means: what the kernel's registry entry says."""

    steps: int = _option(1000, "optimizer steps")  # type: ignore[assignment]
    learning_rate: float | None = _option(None, "peak learning rate of AdamW")  # type: ignore[assignment]
    weight_decay: float | None = _option(None, "AdamW's weight decay")  # type: ignore[assignment]
    warmup: float | None = _option(None, "share of the steps in which the rate rises")  # type: ignore[assignment]
    loss: str = _option("auto", "weights, output, both, or auto (what the kernel supports)")  # type: ignore[assignment]
    negative_penalty: float | None = _option(None, "weight of negative mass")  # type: ignore[assignment]
    output_weight: float = _option(1.0, "weight of the output's error in the loss `both`")  # type: ignore[assignment]
    feed: str = _option("teacher", "whose hidden states feed the next layer")  # type: ignore[assignment]
    query_sample: int | None = _option(None, "queries per sequence that the loss is taken on")  # type: ignore[assignment]
    eval_every: int = _option(100, "steps between looks at the held-out loss")  # type: ignore[assignment]
    patience: int = _option(5, "looks without improvement after which to stop; 0: never")  # type: ignore[assignment]
    gradient_accumulation: int = _option(1, "batches per optimizer step")  # type: ignore[assignment]
    precision: str = _option("no", "precision of the frozen model: no, bf16 or fp16")  # type: ignore[assignment]
    layers_at_a_time: int | None = _option(None, "layers trained together; None: all")  # type: ignore[assignment]
    save_every: int | None = _option(None, "steps between states on disk")  # type: ignore[assignment]
    keep: int = _option(2, "how many states are kept")  # type: ignore[assignment]
    folder: str | None = _option(None, "where states are kept")  # type: ignore[assignment]
    resume: bool = _option(False, "go on from the newest state in the folder")  # type: ignore[assignment]
    seed: int = _option(0, "seed of the order of the data and the sampling")  # type: ignore[assignment]

    def __post_init__(self) -> None:
        least = {"steps": 0, "eval_every": 1, "patience": 0, "gradient_accumulation": 1, "keep": 1}
        optional = {"query_sample": 1, "layers_at_a_time": 1, "save_every": 1}
        for name, low in (least | optional).items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or value < low:
                raise ConfigError(f"stage one, {name}: got {value!r}, expected a whole number of at least {low}")
        if (self.save_every or self.resume) and self.folder is None:
            raise ConfigError("stage one: save_every and resume need a folder for the states; set folder")
        for name in ("learning_rate", "weight_decay", "negative_penalty", "output_weight"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e6:
                raise ConfigError(f"stage one, {name}: got {value}, expected a number of at least 0")
        for name, allowed in (("loss", LOSSES), ("precision", PRECISIONS), ("feed", FEEDS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"stage one, {name}: got {getattr(self, name)!r}, expected one of {', '.join(allowed)}"
                )
