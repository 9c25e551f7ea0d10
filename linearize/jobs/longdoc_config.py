"""The options of `longdoc`; importing this loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linearize.core import kernel_options
from linearize.core.errors import ConfigError
from linearize.core.options import check, option, section
from linearize.jobs.config import DEVICES, OVERWRITE, POSITIONS, PRESET, Job
from linearize.jobs.presets import preset_options
from linearize.jobs.task_config import TaskChoice
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.tasks import Task

CONVERSION, TUNING, OUTPUT = "conversion", "tuning, of both models alike", "output"
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
    memory: bool = option(True, "measure the peak memory of the longest document", shown="yes")
    kernel: str = option("hedgehog", "kernel for all layers; see `linearize kernels`", group=CONVERSION, metavar="NAME")
    kernel_args: Mapping[str, object] = kernel_options.kernel_args(CONVERSION)
    preset: str | None = option(None, PRESET, group=CONVERSION, metavar="NAME")
    window: int | None = kernel_options.window(CONVERSION)
    sinks: int = kernel_options.sinks(CONVERSION)
    exact_keys: int = kernel_options.exact_keys(CONVERSION)
    scale: str | None = kernel_options.scale(CONVERSION)
    positions: str = option("tile", POSITIONS, group=CONVERSION, metavar="HOW")
    distill_steps: int = option(1000, "steps of stage one; 0 skips it", group=CONVERSION, low=0)
    distill_length: int | None = option(
        None, "tokens per row of stage one; by default as many as the original takes", group=CONVERSION, low=2
    )
    align_steps: int = option(400, "steps of the alignment; 0 skips it", group=CONVERSION, low=0)
    align_length: int | None = option(
        None,
        "tokens per row of the alignment, where positions after the original's end are learned; by default max_length",
        group=CONVERSION,
        low=2,
    )
    batch_tokens: int = option(
        16_384, "tokens of a batch in all stages; as many rows as fit, one at least", group=CONVERSION, low=1
    )
    save_every: int = option(100, "steps between states of every stage; Ctrl-C saves one too", group=CONVERSION, low=1)
    tune: TuneConfig = section(
        TuneConfig, TUNING, only=TUNED, shown={"batch_size": "32, in batches of batch_tokens", "precision": "no"}
    )
    seed: int = option(0, "of everything", metavar="S")
    output: str | None = option(None, "folder to make (<model-name>-long)", group=OUTPUT, metavar="DIR")
    overwrite: bool = option(False, OVERWRITE, group=OUTPUT)
    resume: bool = option(False, "continue an interrupted run of the same output", group=OUTPUT)
    device: str = option("auto", DEVICES, group=OUTPUT, metavar="D")

    def __post_init__(self) -> None:
        check(self, "options")
        if not self.task.type.row_labels:
            raise ConfigError(
                f"task: got {self.task.name}, expected one that gives a text a class or a number, such as "
                "text-classification; compare others with: linearize evaluate MODEL --compare ORIGINAL"
            )

    @staticmethod
    def derive(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the options of a preset; `convert`, which gets the preset's name too, has more of them."""
        return {"": {name: x for name, x in preset_options(values).items() if name in LongdocJob.__dataclass_fields__}}

    def attention(self) -> dict[str, Any]:
        """Return the options that `convert` has for the attention."""
        names = ("kernel", "preset", "window", "sinks", "exact_keys", "scale")
        return {"kernel_arg": self.kernel_args} | {name: getattr(self, name) for name in names}

    def target(self) -> Path:
        """Return the output folder: as asked, or `<model-name>-long`."""
        return Path(self.output or f"{Path(self.model).name}-long")
