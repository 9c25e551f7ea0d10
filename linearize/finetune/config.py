"""Options of stage two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from linearize.adapters import LoraConfig
from linearize.errors import ConfigError

SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial")
PRECISIONS = ("no", "bf16", "fp16")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TuneConfig:
    """How a model is tuned on a task."""

    learning_rate: float = _option(2e-5, "peak learning rate of AdamW")
    batch_size: int = _option(32, "rows per step and device")
    epochs: float = _option(3.0, "passes over the training rows")
    steps: int | None = _option(None, "optimizer steps, instead of epochs")
    weight_decay: float = _option(0.0, "AdamW's weight decay")
    warmup: float = _option(0.06, "share of the steps in which the rate rises; a number of steps from 1 on")
    schedule: str = _option("cosine", "how the rate falls")
    max_grad_norm: float = _option(1.0, "gradient clipping; 0: none")
    betas: tuple[float, float] = _option((0.9, 0.999), "AdamW's decay of its averages")
    gradient_accumulation: int = _option(1, "batches per optimizer step")
    eval_every: int | None = _option(None, "steps between measurements; by default once per epoch")
    eval_batch_size: int | None = _option(None, "rows per batch when measuring; by default twice batch_size")
    patience: int = _option(0, "measurements without improvement after which to stop; 0: never")
    group_by_length: bool = _option(False, "put texts of similar length in one batch, to pad less")
    precision: str = _option("no", "mixed precision: no, bf16 or fp16")
    freeze_kernels: bool = _option(False, "leave the kernels as they are")
    kernel_learning_rate: float | None = _option(
        None, "peak rate of the kernels; by default 3e-4 with a teacher, else learning_rate"
    )
    teacher_hidden_weight: float = _option(1.0, "of the hidden states' error to the teacher's, every layer")
    teacher_logits_weight: float = _option(1.0, "of the divergence from its logits (squared error of numbers)")
    temperature: float = _option(1.0, "of the softmaxes whose divergence is taken")
    labels_from: float = _option(0.5, "with a teacher: share of the steps without labels, after which they join")
    labels_ramp: float = _option(0.2, "share of the steps in which the labels' weight then rises")
    labels_weight: float = _option(1.0, "the weight that it rises to; 0: the teacher alone")
    selection_rows: int | None = _option(
        None,
        "rows held out of the training rows to choose the kept state on; by default 5 %, from 32 to 500; "
        "0: choose on the validation rows",
    )
    seed: int = _option(0, "of the order of the rows, dropout and a new head")
    log_every: int = _option(50, "steps between entries of the log")
    report_to: str = _option("none", "where the trainer reports to: none, tensorboard, wandb ...")
    lora: LoraConfig | None = field(default=None, metadata={"help": "low-rank updates"})

    def __post_init__(self) -> None:
        for name in ("batch_size", "gradient_accumulation", "log_every"):
            _check(name, getattr(self, name), 1)
        for name in ("steps", "eval_every", "eval_batch_size"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), 1)
        _check("patience", self.patience, 0)
        if self.selection_rows is not None:
            _check("selection_rows", self.selection_rows, 0)
        for name in ("learning_rate", "weight_decay", "warmup", "max_grad_norm", "epochs", *_WEIGHTS):
            if not 0 <= getattr(self, name) < 1e9:
                raise ConfigError(f"stage two, {name}: got {getattr(self, name)}, expected a number of at least 0")
        self._check_teaching()
        for name, allowed in (("schedule", SCHEDULES), ("precision", PRECISIONS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"stage two, {name}: got {getattr(self, name)!r}, expected one of {', '.join(allowed)}"
                )

    def _check_teaching(self) -> None:
        for name in ("labels_from", "labels_ramp"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"stage two, {name}: got {getattr(self, name)}, expected a share from 0 to 1")
        if not 0 < self.temperature < 1e9:
            raise ConfigError(f"stage two, temperature: got {self.temperature}, expected a number above 0")
        if not self.teacher_hidden_weight and not self.teacher_logits_weight:
            raise ConfigError("stage two, teacher_hidden_weight and teacher_logits_weight: got 0, expected one above")
        rate = self.kernel_learning_rate
        if rate is not None and not 0 <= rate < 1e9:
            raise ConfigError(f"stage two, kernel_learning_rate: got {rate}, expected a number of at least 0")
        if rate is not None and self.freeze_kernels:
            raise ConfigError(f"stage two, kernel_learning_rate: got {rate} and freeze_kernels; drop one of them")


_WEIGHTS = ("teacher_hidden_weight", "teacher_logits_weight", "labels_weight")


def _check(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"stage two, {name}: got {value!r}, expected a whole number of at least {low}")
