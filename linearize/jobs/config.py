"""The options of each job, defined here and in the configs that a job is made of, and nowhere else.

Importing this loads nothing heavy: the help of the command line is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from linearize import kernel_options
from linearize.alignment.config import AlignConfig
from linearize.data.config import DataConfig
from linearize.distillation.config import DISTILL_LENGTH, DistillConfig
from linearize.errors import ConfigError
from linearize.jobs.presets import PRESETS, preset_options
from linearize.kernel_search.config import SearchConfig
from linearize.options import check, make, option, parse_lengths, section

KERNEL = "hedgehog"
"""The kernel of a conversion unless asked otherwise."""
ALIGN_SHARE = 0.4
"""Steps of the alignment unless asked otherwise, as a share of stage one's."""
STAGE_ONE, ALIGNMENT, OUTPUT, DATA = "stage one", "alignment, after stage one", "output", "data"
OF_DATA = (
    *("dataset", "text_column", "extra_pairs", "image_column", "holdout", "packing", "bucketing", "streaming"),
    *("batch_size", "seed"),
)
"""What of `DataConfig` stage one and the alignment leave to the user; labels are not read."""
SAME = ("gradient_accumulation", "precision", "save_every", "keep", "resume", "seed")
"""Options that the alignment inside `convert` shares with stage one."""
STEP_ROWS = 32
"""Rows of an optimizer step where nobody says."""
STAGE_ONE_TOKENS = 8192
"""Tokens of a step of stage one or of the alignment where nobody says how many rows it has."""
ROWS_SHOWN = f"as many as have {STAGE_ONE_TOKENS:,} tokens, {STEP_ROWS} at most"
DEVICES = "cpu, cuda, cuda:1, mps or auto"
POSITIONS = "how learned positions are extended: tile or interpolate"
OVERWRITE = "replace the folder, if linearize wrote it and it holds nothing else"
TENSORBOARD = "none or tensorboard, into OUTPUT.tensorboard"
AUTO = "auto"
"""In place of a kernel's name: the search chooses one for every layer."""
SEARCH, SEARCH_STATES = f"the search, with --kernel {AUTO}", ".search"
SEARCHED = ("candidates", "budget", "length", "widths", "query_sample")
"""Options of the search that have the same name in `convert`."""
PLAN_OUT = "write the plan to a YAML file, to edit and give back with `convert --plan`"
PLOT = "draw error against time of the plan and of others"
OVERWRITE_PLAN = "replace the plan file and the picture, and begin anew where an interrupted search lies"
EXAMPLE_INPUTS = (
    "inputs for the trial run where none can be made up: a .safetensors or .npz file with tensors by the names of the "
    "forward's arguments"
)
LOCAL_AS_FULL = (
    "convert layers with a sliding window or chunks too (Mistral, Gemma), as attention without it: they see all tokens "
    "then, so that the result equals the original at most up to the window's length"
)
PRESET = (
    "kernel, window and sinks that were measured to work well together; options given explicitly take precedence: "
    f"{', '.join(PRESETS)}"
)
KEPT_HEADS = (
    "query heads that stay softmax, as their keys are cached: a number, for those with the largest share in the error "
    "(copying included), or layer:head pairs such as 4:0,11:7"
)
KEPT = "layers to leave as they are, such as 0,11; or 1/4 for the last of every four"
LENGTH = f"tokens per training row; by default {DISTILL_LENGTH}, or what the model takes"


class Job:
    """A job's config; `of` takes every option under its own name, as the command line and files of options do."""

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Build a job from options by name; what is not given keeps its default.

        Raises:
            ConfigError: for an unknown or missing option, or a value that is not allowed.
        """
        return make(cls, options)


def parse_layers(text: str) -> tuple[int, ...] | str:
    """Read layer numbers such as 0-2,5; a share such as 1/4 stays a text until the number of layers is known."""
    from linearize.surgery.layers import parse_indices, parse_share

    if parse_share(text) is not None:
        return text
    return tuple(parse_indices(text, "--keep-softmax")) if text else ()


def _folders(target: str) -> dict[str, str]:
    """Return where the states of stage one ("distill"), the alignment ("align") and the search are kept."""
    base = target.rstrip("/")
    return {"distill": f"{base}.stage1", "align": f"{base}.align", "search": f"{base}{SEARCH_STATES}"}


def search_folder(model: str) -> str:
    """Return where the states of `search` are kept: where `convert --kernel auto` would keep those of its search."""
    return _folders(_target(None, model, AUTO))["search"]


def _states(values: Mapping[str, Any], target: str) -> dict[str, dict[str, Any]]:
    """Return the folders of states where some are written or read."""
    keeps = values.get("save_every") is not None or values.get("resume")
    return {name: {"folder": folder if keeps else None} for name, folder in _folders(target).items()}


def rows_of(length: object, tokens: int) -> int:
    """Return how many rows of a length have so many tokens: `STEP_ROWS`, or a half, a quarter ... of it; at least 1."""
    rows = STEP_ROWS
    # Of another type it is refused by the checks.
    while isinstance(length, int) and rows > 1 and rows * length > tokens:
        rows //= 2
    return rows


def data_rows(values: Mapping[str, object], length: str) -> dict[str, object]:
    """Return the rows per batch of stage one and of the alignment; their losses are means over tokens."""
    return {"batch_size": rows_of(values.get(length) or DISTILL_LENGTH, STAGE_ONE_TOKENS)}


def _layers() -> Any:
    return option(None, "kernels per layer, such as 0-5=hedgehog,6-11=flexformer_n", metavar="PLAN")


def _target(output: str | None, model: str, ending: str) -> str:
    """Return the output folder: as asked, or `<model-name>-<ending>`."""
    return output or f"{Path(model).name.removesuffix('.gguf')}-{ending}"


def _ending(kernel: object, plan: object) -> str:
    """Return what the default name of a conversion ends with."""
    return "mixed" if plan is not None else str(kernel or "mixed")


def _refuse(given: Mapping[str, object], why: str) -> None:
    """Refuse the first option that was given."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name}: {why}; leave {name} out")


@dataclass(frozen=True, kw_only=True)
class TrainingJob(Job):
    """What the jobs share that train a conversion, and keep states of it."""

    @property
    def stage(self) -> DistillConfig | AlignConfig | SearchConfig:
        """The options that say how states are kept."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        check(self, "options")

    @property
    def keeps_states(self) -> bool:
        """Whether states are written or read."""
        return self.stage.save_every is not None or self.stage.resume


@dataclass(frozen=True, kw_only=True)
class StageOneJob(TrainingJob):
    """Options of the jobs with a stage one."""

    model: str
    seed: int = option(0, "seed of kernels, data order and sampling", metavar="S")
    data: DataConfig = section(DataConfig, DATA, only=OF_DATA, shown={"batch_size": ROWS_SHOWN})
    distill_length: int | None = option(None, LENGTH, group=STAGE_ONE, low=1)
    distill: DistillConfig = section(DistillConfig, STAGE_ONE, names={"steps": "distill_steps"}, leave_out=("folder",))
    report_to: str = option("none", TENSORBOARD, group=STAGE_ONE)
    output: str | None = None
    overwrite: bool = option(False, OVERWRITE, group=OUTPUT)
    device: str = option("auto", DEVICES, group=OUTPUT, metavar="D")

    def target(self) -> str:
        """Return the output folder."""
        raise NotImplementedError

    @property
    def stage(self) -> DistillConfig:
        """The options that say how states are kept."""
        return self.distill

    def state_folders(self) -> list[str]:
        """Return where states are kept."""
        return list(_folders(self.target()).values())

    def sources(self) -> list[str | None]:
        """Return what is read, and must not be written over."""
        return [self.model, *(name for name, _ in self.data.sources)]


@dataclass(frozen=True, kw_only=True)
class ConvertJob(StageOneJob):
    """Options of `convert`."""

    model: str = option(help="Hub name, folder or GGUF file of a model", positional=True, metavar="MODEL")
    kernel: str | None = option(KERNEL, f"kernel for all layers, see `linearize kernels`; or {AUTO}", metavar="NAME")
    kernel_args: Mapping[str, object] = kernel_options.kernel_args()
    preset: str | None = option(None, PRESET, metavar="NAME")
    layers: str | None = _layers()
    keep_softmax: tuple[int, ...] | str = option((), KEPT, metavar="LAYERS", parse=parse_layers)
    plan: str | None = option(
        None, "what becomes of every layer: a file of --plan-out, perhaps edited", metavar="FILE.yaml"
    )
    example_inputs: str | None = option(None, EXAMPLE_INPUTS, metavar="FILE")
    local_as_full: bool = option(False, LOCAL_AS_FULL)
    window: int | None = kernel_options.window()
    sinks: int = kernel_options.sinks()
    exact_keys: int = kernel_options.exact_keys()
    scale: str | None = kernel_options.scale()
    keep_softmax_heads: str | None = option(None, KEPT_HEADS, metavar="N_OR_HEADS")
    task: str | None = option(
        None, "head to load, such as fill-mask; by default the one the checkpoint names", metavar="TASK"
    )
    revision: str | None = option(None, "branch, tag or commit on the Hub", metavar="REV")
    max_length: int | None = option(None, "longest input that the result shall take, in tokens")
    image_size: int | None = option(
        None, "pixels a side of the square images that the result shall take, for models of images", metavar="P", low=1
    )
    positions: str = option("tile", POSITIONS, metavar="HOW")
    search: SearchConfig = section(
        SearchConfig, SEARCH, prefix="search", shared=(*SAME, *SEARCHED), leave_out=("folder",)
    )
    plan_out: str | None = option(None, PLAN_OUT, group=SEARCH, metavar="FILE.yaml")
    plot: str | None = option(None, PLOT, group=SEARCH, metavar="FILE.png")
    align: AlignConfig = section(
        AlignConfig,
        ALIGNMENT,
        prefix="align",
        shared=SAME,
        leave_out=("folder",),
        shown={"steps": "two fifths of those of stage one"},
    )
    output: str | None = option(None, "folder to make (<model-name>-<kernel>)", group=OUTPUT, metavar="DIR")

    @property
    def softmax_heads_count(self) -> int | None:
        """How many heads stay softmax; None if they are named, or none was asked for."""
        given = self.keep_softmax_heads or ""
        return int(given) if given.isdecimal() else None

    def target(self) -> str:
        """Return the output folder: as asked, or `<model-name>-<kernel>`."""
        return _target(self.output, self.model, _ending(self.kernel, self.plan))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size is not None and self.max_length is not None:
            raise ConfigError(
                f"image-size: got {self.image_size} beside max-length {self.max_length}, which says the same in "
                "tokens; drop one of them"
            )
        if self.preset is not None and (self.plan is not None or self.kernel == AUTO):
            other = f"--kernel {AUTO}" if self.plan is None else "--plan FILE"
            raise ConfigError(
                f"preset: got {self.preset!r} beside {other}, which chooses as well; leave one of them out"
            )
        chosen: dict[str, Any] = {"--layers": self.layers, "--kernel-arg": self.kernel_args, "--window": self.window}
        chosen |= {"--sinks": self.sinks, "--exact-keys": self.exact_keys, "--scale": self.scale}
        chosen["--keep-softmax-heads"] = self.keep_softmax_heads
        if self.plan is not None:
            chosen |= {"--keep-softmax": self.keep_softmax, "--kernel": None if self.kernel == KERNEL else self.kernel}
            _refuse(chosen, "--plan FILE says what becomes of every layer")
        elif self.kernel == AUTO:
            advice = "name arguments with the candidates, as in --candidates hedgehog,luna:window=32"
            _refuse(chosen, f"--kernel {AUTO} chooses kernel and arguments of every layer; {advice}")
        if self.kernel != AUTO:
            usual = SearchConfig()
            own = ("candidates", "budget", "length", "steps", "swaps", "widths")
            given = {name: getattr(self.search, name) != getattr(usual, name) for name in own}
            given |= {"plan_out": self.plan_out, "plot": self.plot}
            names = {"steps": "--search-steps", "swaps": "--search-swaps", "plan_out": "--plan-out"}
            said = {names.get(name, f"--{name}"): value for name, value in given.items()}
            _refuse(said, f"nothing is searched without --kernel {AUTO}")

    @staticmethod
    def derive(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return what follows from other options: a preset's, the alignment's steps, and the folders of states."""
        preset = preset_options(values)
        kernel = {"kernel": KERNEL, **preset, **values}["kernel"]
        target = _target(values.get("output"), values["model"], _ending(kernel, values.get("plan")))
        steps = values.get("distill_steps", DistillConfig.steps)
        found = _states(values, target)
        # Of another type it is refused by stage one's own checks.
        found["align"]["steps"] = round(ALIGN_SHARE * steps) if isinstance(steps, int) else 0
        return found | {"": dict(preset), "data": data_rows(values, "distill_length")}


@dataclass(frozen=True, kw_only=True)
class DistillJob(StageOneJob):
    """Options of `distill`: going on with stage one of a converted checkpoint."""

    model: str = option(help="converted checkpoint: folder or Hub name", positional=True, metavar="MODEL_OR_DIR")
    output: str | None = option(None, "folder to make (<folder>-distilled)", group=OUTPUT, metavar="DIR")

    def target(self) -> str:
        """Return the output folder: as asked, or `<folder>-distilled`."""
        return _target(self.output, self.model, "distilled")

    @staticmethod
    def derive(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return what follows from other options: the folder of states."""
        target = _target(values.get("output"), values["model"], "distilled")
        return {"distill": _states(values, target)["distill"], "data": data_rows(values, "distill_length")}


@dataclass(frozen=True, kw_only=True)
class AlignJob(TrainingJob):
    """Options of `align`."""

    model: str = option(help="converted checkpoint: folder or Hub name", positional=True, metavar="MODEL_OR_DIR")
    teacher: str | None = option(
        None, "the softmax model that it was made from, or tuned; by default its own weights", metavar="ORIGINAL"
    )
    seed: int = option(0, "seed of the data order and of low-rank updates", metavar="S")
    data: DataConfig = section(DataConfig, DATA, only=OF_DATA, shown={"batch_size": ROWS_SHOWN})
    length: int | None = option(None, LENGTH, group=DATA, low=1)
    align: AlignConfig = section(AlignConfig, "alignment", leave_out=("folder",))
    report_to: str = option("none", TENSORBOARD, group="alignment")
    output: str | None = option(None, "folder to make (<folder>-aligned)", group=OUTPUT, metavar="DIR")
    overwrite: bool = option(False, OVERWRITE, group=OUTPUT)
    device: str = option("auto", DEVICES, group=OUTPUT, metavar="D")

    def target(self) -> str:
        """Return the output folder: as asked, or `<folder>-aligned`."""
        return _target(self.output, self.model, "aligned")

    @property
    def stage(self) -> AlignConfig:
        """The options that say how states are kept."""
        return self.align

    def state_folders(self) -> list[str]:
        """Return where states are kept."""
        return [_folders(self.target())["align"]]

    def sources(self) -> list[str | None]:
        """Return what is read, and must not be written over."""
        return [self.model, self.teacher, *(name for name, _ in self.data.sources)]

    @staticmethod
    def derive(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return what follows from other options: the folder of states."""
        target = _target(values.get("output"), values["model"], "aligned")
        return {"align": _states(values, target)["align"], "data": data_rows(values, "length")}


@dataclass(frozen=True)
class InitJob(Job):
    """Options of `init`."""

    config: str | Mapping[str, object] = option(
        help="config of transformers, as a file or folder", positional=True, metavar="CONFIG"
    )
    output: str = option(help="folder to make", metavar="DIR")
    task: str = option("causal-lm", "which head: a task, as in `linearize finetune`", metavar="T")
    kernel: str | None = option(None, "kernel for all layers; see `linearize kernels` (hedgehog)", metavar="NAME")
    kernel_args: Mapping[str, object] = kernel_options.kernel_args()
    layers: str | None = _layers()
    tokenizer: str | None = option(
        None, "tokenizer or image processor to save along; folder or Hub name", metavar="DIR"
    )
    num_labels: int | None = option(None, "outputs of a classifier's head", low=1)
    overwrite: bool = option(False, OVERWRITE)
    seed: int = option(0, "of all weights", metavar="S")


@dataclass(frozen=True)
class ExportJob(Job):
    """Options of `export`."""

    model: str = option(help="converted checkpoint", positional=True, metavar="DIR")
    output: str = option(help="folder to make", metavar="X")
    format: str = option("onnx", "what to write", choices=("onnx",), metavar="F")
    last_logits: bool = option(False, "of a model that writes: the logits of a prompt's last token alone")
    time: tuple[int, ...] = option(
        (),
        "time onnxruntime beside PyTorch at these lengths, on one row",
        metavar="N,N",
        shown="no",
        parse=parse_lengths,
    )
    overwrite: bool = option(False, OVERWRITE)

    def __post_init__(self) -> None:
        check(self, "options")


@dataclass(frozen=True)
class DemoJob(Job):
    """Options of `demo`."""

    kernel: str = option("hedgehog", "kernel", metavar="NAME")
    steps: int | None = option(
        None, "steps of stage one; a sixth as many of alignment (default: what a minute and a half has room for)"
    )
    tokens: int = option(8192, "length of the long document")
    output: str = option("demo-output", "folder to make; replaced if it is there", metavar="DIR")
