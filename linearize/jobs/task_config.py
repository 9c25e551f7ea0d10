"""The options of `finetune`, `evaluate` and `longdoc`; those of the other jobs are in `linearize.jobs.config`.

The command line builds its help from them, so importing this module loads nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from linearize.core import kernel_options
from linearize.core.errors import CheckpointError, ConfigError
from linearize.core.kernel_options import Additions
from linearize.core.options import MOST_SEED, option, parse_names, section
from linearize.core.registry import ReadOnlyValues, Values
from linearize.jobs.config import DEVICES, OVERWRITE, POSITIONS, PRESET, WINDOWS, Job
from linearize.jobs.presets import STEP_ROWS, parse_window, preset_options, rows_of
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.tasks import TASKS, Task, task

DATASET = "Hub data set, file, folder, or folder with one folder per task"
STAGE_TWO_TOKENS = 4096
"""Default upper limit on the tokens per forward pass of stage two."""


@dataclass(frozen=True)
class TaskChoice:
    """A task, and the columns of its data."""

    task: str = option(help=f"{', '.join(TASKS)} (similarity, duplicates and retrieval: evaluation only)", metavar="T")
    columns: tuple[str, ...] = option(
        (), "column of the text, or columns of both texts", metavar="A[,B]", parse=parse_names
    )
    label_column: str | None = option(None, "column of the label", metavar="C")
    labels: tuple[str, ...] = option((), "class names in numeric order", metavar="A,B,...", parse=parse_names)
    split: str | None = option(None, "split to measure on (validation, otherwise test, otherwise held-out rows)")

    def resolve(self) -> Task:
        """Return the task.

        Raises:
            UnknownNameError: for an unknown task.
        """
        return task(self.task, columns=self.columns, label=self.label_column, labels=self.labels, validation=self.split)


@dataclass(frozen=True)
class TuneJob(Job):
    """Options of `finetune`; `task` is a `linearize.training.stage_two.tasks.Task`."""

    model: str = option(
        help="converted or ordinary transformers checkpoint; folder or Hub name", positional=True, metavar="DIR"
    )
    task: Task = section(TaskChoice)
    dataset: str | None = option(None, DATASET, metavar="NAME_OR_PATH")
    output: str | None = option(None, "output folder (<model>-<task>)", metavar="DIR")
    overwrite: bool = option(False, OVERWRITE)
    resume: bool = option(False, "continue an interrupted run of the same output")
    new_head: bool = option(False, "replace a trained head that has a different number of labels")
    device: str = option("auto", DEVICES, metavar="D")
    teacher: str | None = option(None, "teacher: the softmax original, tuned for the same task", metavar="DIR")
    keep_adapter: bool = option(
        False, "with --lora: also save the low-rank updates separately, in OUTPUT/adapter, for peft", group="tuning"
    )
    data: DataOptions = section(
        DataOptions,
        only=("max_length", "limit", "validation_limit", "stride", "mask_share", "augment", "extra_pairs", "seed"),
    )
    tune: TuneConfig = section(
        TuneConfig,
        "tuning",
        leave_out=("betas",),
        shown={
            "batch_size": f"{STEP_ROWS}; for rows of more than {STAGE_TWO_TOKENS // STEP_ROWS} tokens, as many as fit "
            f"into {STAGE_TWO_TOKENS:,}",
            "gradient_accumulation": f"1; without batch_size, as needed for a step of {STEP_ROWS} rows",
        },
    )

    def target(self) -> Path:
        """Return the output folder: the one given, or `<model>-<task>`."""
        return Path(self.output or f"{Path(self.model).name}-{self.task.name}")

    @property
    def in_place(self) -> bool:
        """Whether the result replaces the checkpoint itself."""
        target = self.target()
        return os.path.exists(target) and os.path.exists(self.model) and os.path.samefile(target, self.model)

    def sources(self) -> list[str | None]:
        """Return the inputs, which the output must not replace, except that it may replace the checkpoint itself."""
        return [None if self.in_place else self.model, self.dataset, self.teacher]

    @staticmethod
    def derive(values: ReadOnlyValues) -> dict[str, Values]:
        """Return the defaults that depend on other options: row length, batch size and gradient accumulation."""
        from linearize.training.stage_two.load import usual_length

        # The model's limit, if it is small.
        most = TASKS[values["task"]].type.train_tokens if values.get("task") in TASKS else DataOptions.max_length
        length = values["max_length"] if "max_length" in values else usual_length(values["model"], most)
        derived: dict[str, Values] = {"data": {"max_length": length}}
        if "batch_size" not in values:
            rows = rows_of(length, STAGE_TWO_TOKENS)
            derived["tune"] = {"batch_size": rows, "gradient_accumulation": STEP_ROWS // rows}
        return derived


@dataclass(frozen=True)
class EvaluateJob(Job):
    """Options of `evaluate`; `task` is a `linearize.training.stage_two.tasks.Task`."""

    model: str = option(
        help="checkpoint with a trained head; folder or Hub name", positional=True, metavar="DIR_OR_MODEL"
    )
    task: Task = section(TaskChoice)
    dataset: str | None = option(None, DATASET, metavar="NAME_OR_PATH")
    compare: str | None = option(
        None,
        "the softmax model it was made from, tuned the same way; each side reads at its own length",
        metavar="ORIGINAL",
    )
    data: DataOptions = section(
        DataOptions,
        only=("max_length", "limit", "validation_limit", "stride"),
        shown={"max_length": "its length when it was tuned, otherwise what model and data allow"},
    )
    batch_size: int | None = option(None, "rows per batch; by default as many as 16,384 tokens hold, at most 32", low=1)
    device: str = option("auto", DEVICES, metavar="D")
    chunks: bool = option(
        True, "with --compare: also let the original read rows in chunks, and average its outputs", shown="yes"
    )
    chunk_length: int | None = option(None, "tokens per chunk; by default the original's length", low=2)
    ablate: tuple[str, ...] = option(
        (),
        "also measure the model without a part of its attention, to show the benefit of that part: kernel, window, "
        "exact-keys, routed or attention; or several, as in kernel,window",
        metavar="PART",
        parse=parse_names,
    )
    memory: bool = option(False, "with --compare: peak memory of the longest row, in one process per side")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_length is not None and (self.compare is None or not self.chunks):
            raise ConfigError(
                f"options, chunk_length: got {self.chunk_length}, but only an original is read in chunks; give "
                "--compare ORIGINAL, without --no-chunks"
            )
        if self.memory and self.compare is None:
            raise ConfigError(
                "options, memory: got true, but memory is measured only in a comparison; give --compare ORIGINAL"
            )

    @staticmethod
    def derive(values: ReadOnlyValues) -> dict[str, Values]:
        """Return the defaults that depend on other options: the row length, and the seed of rows that are held out.

        Without a validation split, the held-out rows of another seed are rows that the model was tuned on.
        """
        from linearize.training.stage_two.load import recorded, whole_length

        # A missing model or an unknown task is refused elsewhere.
        if values.get("task") not in TASKS:
            return {}
        tuned = recorded(values["model"])
        data: Values = {}
        seed = tuned.get("seed") if tuned.get("task") == values["task"] else None
        if type(seed) is int and 0 <= seed <= MOST_SEED:
            data["seed"] = seed
        if "max_length" not in values:
            data |= {"max_length": whole_length(values["model"], TASKS[values["task"]]), "auto_length": True}
        return {"data": data}


CONVERSION, TUNING, OUTPUT = "conversion", "tuning, the same for both models", "output"
TUNED = (
    *("learning_rate", "batch_size", "epochs", "steps", "warmup", "kernel_learning_rate", "selection_rows"),
    *("precision", "gradient_checkpointing"),
)
"""Fields of `TuneConfig` that are options of `longdoc`."""


@dataclass(frozen=True, kw_only=True)
class LongdocJob(Job):
    """Options of `longdoc`; `task` is a `linearize.training.stage_two.tasks.Task`."""

    model: str = option(help="Hub name, folder or GGUF file of a model", positional=True, metavar="MODEL")
    task: Task = section(TaskChoice)
    dataset: str = option(help="Hub data set, file, or folder with one file per split", metavar="NAME_OR_PATH")
    max_length: int | None = option(None, "longest document that the linear model can read, in tokens", low=2)
    rows: DataOptions = section(DataOptions, only=("limit", "validation_limit"))
    chunk_length: int | None = option(None, "tokens per chunk of the original; by default as many as it takes", low=2)
    quick: bool = option(
        False,
        "a quick look in about 10 minutes on two cores: lengths, rows and steps depend on the model's size; options "
        "given explicitly take precedence",
    )
    memory: bool = option(True, "measure the peak memory of the longest document", shown="yes")
    kernel: str = option("hedgehog", "kernel for all layers; see `linearize kernels`", group=CONVERSION, metavar="NAME")
    kernel_args: Mapping[str, object] = kernel_options.kernel_args(CONVERSION)
    preset: str | None = option(None, PRESET, group=CONVERSION, metavar="NAME")
    window: str | int | None = option(None, WINDOWS, group=CONVERSION, metavar="W", parse=parse_window)
    additions: Additions = section(Additions, CONVERSION, leave_out=("window",))
    positions: str = option("tile", POSITIONS, group=CONVERSION, metavar="HOW")
    distill_steps: int = option(1000, "steps of stage one; 0 skips it", group=CONVERSION, low=0)
    distill_length: int | None = option(
        None, "tokens per row of stage one; by default as many as the original takes", group=CONVERSION, low=2
    )
    align_steps: int = option(400, "steps of the alignment; 0 skips it", group=CONVERSION, low=0)
    align_length: int | None = option(
        None,
        "tokens per row of the alignment, which trains the positions beyond the original's; by default max_length",
        group=CONVERSION,
        low=2,
    )
    batch_tokens: int = option(
        16_384, "tokens per batch in all stages; as many rows as fit, at least one", group=CONVERSION, low=1
    )
    save_every: int = option(100, "steps between states of every stage; Ctrl-C saves one too", group=CONVERSION, low=1)
    tune: TuneConfig = section(
        TuneConfig, TUNING, only=TUNED, shown={"batch_size": "32, in batches of batch_tokens", "precision": "no"}
    )
    seed: int = option(0, "seed of everything", metavar="S", low=0, high=MOST_SEED)
    output: str | None = option(None, "output folder (<model-name>-long)", group=OUTPUT, metavar="DIR")
    overwrite: bool = option(False, OVERWRITE, group=OUTPUT)
    resume: bool = option(False, "continue an interrupted run of the same output", group=OUTPUT)
    device: str = option("auto", DEVICES, group=OUTPUT, metavar="D")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.task.type.row_labels:
            raise ConfigError(
                f"task: got {self.task.name}, expected one that predicts a class or a number for each text, such as "
                "text-classification; for others use: linearize evaluate MODEL --compare ORIGINAL"
            )

    @staticmethod
    def derive(values: ReadOnlyValues) -> dict[str, Values]:
        """Return a preset's options that exist here (`convert` also gets its name), and the sizes of a quick run."""
        return {"": {**preset_options(values), **(quick_sizes(values) if values.get("quick") else {})}}

    def attention(self) -> Values:
        """Return the options of the attention, in the format of `ConvertJob.of`."""
        own = {"kernel": self.kernel, "kernel_arg": self.kernel_args, "preset": self.preset}
        return own | vars(self.additions) | {"window": self.window}

    def target(self) -> Path:
        """Return the output folder: the one given, or `<model-name>-long`."""
        return Path(self.output or f"{Path(self.model).name}-long")

    def sources(self) -> list[str]:
        """Return the inputs, which the output must not replace."""
        return [self.model, self.dataset]


QUICK = 3e13
"""Operations of a `quick` run: 10 minutes at 50 billion per second, which two cores reach in fp32."""
QUICK_BATCH, QUICK_TOKENS, QUICK_EPOCHS = 8, 4096, 1.0
_TUNING, _STAGE_ONE, _ALIGNMENT, _MEASURING = 0.5, 0.08, 0.12, 0.3
"""Shares of these operations."""


def quick_sizes(values: ReadOnlyValues) -> dict[str, object]:
    """Return the options of a run of `QUICK` operations; {} if there is no such model, or it cannot be read.

    They depend only on the model's number of parameters and its lengths, so they are the same on every machine.

    Args:
        values: the options given explicitly.
    """
    from linearize.training.stage_two.load import length_limit

    try:
        short, cost = length_limit(values["model"]) or 1, float(_parameters(values["model"]))
    except CheckpointError:
        # It is refused elsewhere.
        return {}
    given = values.get("max_length")
    long = given if isinstance(given, int) else 2 * short
    # Operations per parameter and token: forward pass 2, training step 6, stage one 3, alignment (with its teacher) 8.
    rows = _TUNING * QUICK / (6 * cost * QUICK_EPOCHS * (short + long))
    # Four sides; and both models before the first epoch, after each epoch, and at the end.
    tokens = 3 * short + long + (QUICK_EPOCHS + 2) * (short + long)
    measured = _MEASURING * QUICK / (2 * cost * tokens)
    distill_steps = max(5, int(_STAGE_ONE * QUICK / (3 * cost * QUICK_TOKENS)))
    align_steps = max(3, int(_ALIGNMENT * QUICK / (8 * cost * QUICK_TOKENS)))
    return {
        "max_length": long,
        "limit": max(16, int(rows)),
        "validation_limit": max(24, int(measured)),
        "batch_size": QUICK_BATCH,
        "epochs": QUICK_EPOCHS,
        "distill_steps": min(LongdocJob.distill_steps, distill_steps),
        "align_steps": min(LongdocJob.align_steps, align_steps),
        "batch_tokens": QUICK_TOKENS,
    }


def _parameters(name: str) -> int:
    """Return the number of parameters that each token passes through: all except the embeddings.

    Raises:
        CheckpointError: if the model cannot be read.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    from linearize.checkpoint.loading import explained
    from linearize.conversion.gguf import located

    with explained(name, "its config"), torch.device("meta"):
        place, where = located(name)
        model = AutoModel.from_config(AutoConfig.from_pretrained(place, **where))
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    inner = {path: weight for path, weight in model.named_parameters() if "embedding" not in path}
    return sum(weight.numel() for weight in inner.values() if id(weight) not in tables)
