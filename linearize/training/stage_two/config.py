"""Options of stage two, and of the rows that stage two and evaluations read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from linearize.core.errors import ConfigError
from linearize.core.options import MOST_SEED, check, option
from linearize.training.adapters import LoraConfig, parse_lora
from linearize.training.config import PRECISIONS
from linearize.training.trackers import REPORT_TO

SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial")
POLYNOMIAL_END = 1e-7
"""The rate at which transformers' polynomial schedule ends."""
LARGEST = 1e9
_amount = partial(option, low=0, below=LARGEST)
"""Declares a rate, a weight or a number of epochs: one of `LARGEST` or more is a typing error."""


@dataclass(frozen=True)
class TuneConfig:
    """How a model is tuned on a task.

    Raises:
        ConfigError: on construction, if a value is out of range or two options exclude each other.
    """

    learning_rate: float = _amount(2e-5, "peak learning rate of AdamW")
    batch_size: int = option(32, "rows per step and device", low=1)
    epochs: float = _amount(3.0, "passes over the training rows")
    steps: int | None = option(None, "optimizer steps, instead of epochs", low=1)
    weight_decay: float = _amount(0.0, "AdamW's weight decay")
    warmup: float = _amount(0.06, "share of the steps in which the rate rises; from 1 on, a number of steps")
    schedule: str = option(
        "cosine", "how the rate falls: cosine, linear, or another schedule of transformers", choices=SCHEDULES
    )
    max_grad_norm: float = _amount(1.0, "gradient clipping; 0: none")
    betas: tuple[float, float] = option((0.9, 0.999), "decay rates of AdamW's moving averages")
    gradient_accumulation: int = option(1, "batches per optimizer step", low=1)
    gradient_checkpointing: bool = option(
        False, "recompute each layer's activations for its gradient, to save memory: slower, same result"
    )
    eval_every: int | None = option(None, "steps between evaluations; by default once per epoch", low=1)
    eval_batch_size: int | None = option(None, "rows per batch of an evaluation; by default twice batch_size", low=1)
    save_every: int | None = option(
        None, "steps between states for --resume, in addition to those of evaluations and of Ctrl-C", low=1
    )
    patience: int = option(0, "evaluations without improvement after which to stop; 0: never", low=0)
    group_by_length: bool = option(False, "put texts of similar length in one batch, to pad less")
    dropout: float | None = option(
        None,
        "share of the activations that dropout layers drop; by default none with a teacher alone, else the share in "
        "the model's config",
        low=0,
        below=1,
    )
    precision: str = option("no", "mixed precision: no, bf16 or fp16", choices=PRECISIONS, metavar="TYPE")
    freeze_kernels: bool = option(False, "do not train the kernels")
    kernel_learning_rate: float | None = _amount(
        None, "peak rate of the kernels; by default 3e-4 with a teacher, else learning_rate"
    )
    teacher_hidden_weight: float = _amount(1.0, "weight of every layer's hidden states' error against the teacher's")
    teacher_logits_weight: float = _amount(
        1.0, "weight of the divergence from the teacher's logits (squared error for regression)"
    )
    temperature: float = option(1.0, "temperature of the softmaxes in that divergence", above=0, below=LARGEST)
    labels_from: float = option(0.5, "with a teacher: share of steps before the labels join the loss", low=0, high=1)
    labels_ramp: float = option(0.2, "share of the steps in which the weight of the labels then rises", low=0, high=1)
    labels_weight: float = _amount(1.0, "final weight of the labels; 0: the teacher alone")
    selection_rows: int | None = option(
        None,
        "rows held out of the training rows to choose the state to keep; by default 5 %, from 32 to 500; "
        "0: choose on the validation rows",
        low=0,
    )
    seed: int = option(0, "seed of the order of the rows, dropout and a new head", low=0, high=MOST_SEED)
    log_every: int = option(50, "steps between entries of the log", low=1)
    report_to: str = option("none", REPORT_TO)
    lora: LoraConfig | None = option(
        None, "low-rank updates of the attention's weights, merged when saved", parse=parse_lora, metavar="r=8,alpha=16"
    )

    def __post_init__(self) -> None:
        check(self, "stage two")
        if not self.teacher_hidden_weight and not self.teacher_logits_weight:
            raise ConfigError("stage two, teacher_hidden_weight and teacher_logits_weight: got 0, expected one above")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"stage two, betas: got {self.betas}, expected two numbers from 0 to below 1")
        if self.schedule == "polynomial" and self.learning_rate <= POLYNOMIAL_END:
            raise ConfigError(
                f"stage two, learning_rate: got {self.learning_rate}, expected more than {POLYNOMIAL_END}, where the "
                "schedule polynomial ends; raise it, or choose another schedule"
            )
        rate = self.kernel_learning_rate
        if rate is not None and self.freeze_kernels:
            raise ConfigError(f"stage two, kernel_learning_rate: got {rate} and freeze_kernels; drop one of them")

    @property
    def final_labels_weight(self) -> float:
        """Weight of the labels at the end of training with a teacher; 0 if they never join."""
        return self.labels_weight if self.labels_from < 1 else 0.0


MEASURED_ONLY = ("auto_length", "chunks", "trains")
"""Fields of `DataOptions` that training does not read."""


@dataclass(frozen=True)
class DataOptions:
    """How a task's data becomes rows."""

    max_length: int = option(
        128,
        "tokens per row; longer texts are cut",
        shown="as the model was tuned, else 128 (language models: 1,024) or its limit",
        low=2,
    )
    limit: int | None = option(
        None, "only the first N training rows (texts, not their windows); for images, N evenly spread ones", low=1
    )
    validation_limit: int | None = option(None, "the same for the rows to measure on", low=1)
    stride: int | None = option(
        None, "new tokens per window; by default all but one (perplexity), or all but 128 (long answers)", low=1
    )
    mask_share: float = option(0.15, "share of tokens to predict (masked language models)", above=0, below=1)
    augment: bool = option(False, "crop and flip training images at random")
    seed: int = option(0, "seed of held-out rows, masks, crops and new pairs", low=0, high=MOST_SEED)
    extra_pairs: float = option(
        0.0,
        "new pairs of the training texts per training row, for a teacher to label; half of them share words",
        low=0,
        high=100,
    )
    auto_length: bool = False
    """Whether max_length is the most that the model takes, rather than the user's; shorter rows lower it."""
    chunks: bool = False
    """Whether texts to measure on are read in chunks of max_length, whose outputs are averaged, rather than cut."""
    trains: bool = True
    """Whether texts to train on are tokenised; to measure, at most their labels are read."""

    def __post_init__(self) -> None:
        check(self, "data")
