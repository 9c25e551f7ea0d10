"""The options of the jobs that train kernels, and of `init`, `export`, `embed` and `demo`.

The command line builds its help from them, so importing this module loads nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass
from pathlib import Path
from typing import ClassVar, Self

from linearize.core import kernel_options
from linearize.core.errors import ConfigError
from linearize.core.kernel_options import Additions
from linearize.core.options import MOST_SEED, check, make, option, section
from linearize.core.registry import ReadOnlyValues, Values
from linearize.data.config import DataConfig
from linearize.jobs import presets
from linearize.jobs.presets import AUTO, PRESETS, ROW_TOKENS, ROW_WINDOWS, STEP_ROWS, WINDOW
from linearize.kernel_search.config import SearchConfig
from linearize.training.alignment.config import AlignConfig
from linearize.training.config import RunConfig
from linearize.training.stage_one.config import DISTILL_LENGTH, DistillConfig
from linearize.training.trackers import REPORT_TO

KERNEL = "hedgehog"
"""Default kernel of a conversion."""
ALIGN_SHARE = 0.4
"""Default steps of the alignment, as a share of stage one's."""
STAGE_ONE_TOKENS = 8192
"""Default upper limit on the tokens per step of stage one or of the alignment."""
OF_DATA = ("dataset", "text_column", "image_column", "holdout", "packing", "streaming", "batch_size", "seed")
"""The options of `DataConfig` for stage one and the alignment, which read no labels."""
SAME = ("gradient_accumulation", "precision", "save_every", "keep", "resume", "seed")
"""Options that the stages inside `convert` share."""

STAGE_ONE, ALIGNMENT, OUTPUT, DATA = "stage one", "alignment, after stage one", "output", "data"
SEARCH = f"the search, with --kernel {AUTO}"
DEVICES = "cpu, cuda, cuda:1, mps or auto"
POSITIONS = "how learned positions are extended: tile or interpolate"
OVERWRITE = "replace an existing folder, if linearize wrote it and it holds nothing else"
PRESET = (
    f"options that were measured to work well together; options given explicitly take precedence: {', '.join(PRESETS)}"
)
KEPT = "layers that keep softmax, such as 0,11; or 1/4 for the last of every four"
KEPT_HEADS = (
    "query heads that keep softmax, with a cache of their keys: a number or a share such as 5%, which selects those "
    "that contribute most to the error (copying included), or layer:head pairs such as 4:0,11:7"
)
WINDOWS = (
    f"softmax inside a window of W tokens, the kernel outside it; or {AUTO}:W, which chooses window, exact keys, and "
    f"kernel or no kernel for every layer, with at most the total state of W in every layer ({AUTO} means "
    f"{AUTO}:{WINDOW})"
)
LENGTH = f"tokens per training row; by default {DISTILL_LENGTH}, or fewer if the model takes fewer"
LATER = f"tokens per training row; by default as many as the checkpoint was trained on, at least {DISTILL_LENGTH}"
ROWS = f"{LENGTH}; with a window of W, {ROW_WINDOWS} W up to {ROW_TOKENS:,}; see --preset"
EXAMPLE_INPUTS = (
    "inputs for the trial run, if they cannot be generated: a .safetensors or .npz file with tensors named like the "
    "arguments of the model's forward"
)
LOCAL_AS_FULL = (
    "also convert layers with a sliding window or chunks (Mistral, Gemma), without their window: they then see all "
    "tokens, so the result can equal the original only up to the window's length"
)
LAYERS = "kernels per layer, such as 0-5=hedgehog,6-11=flexformer_n"
HEAD = "head to load, such as fill-mask; by default the one that the checkpoint names"
STREAM = (
    "stage one block after block: each block's weights are read from safetensors files when its turn comes, and the "
    "hidden states lie on disk next to the output; an interrupted run resumes after its last finished block. The "
    "result equals that of the whole model; the alignment is skipped"
)
PLAN_OUT = "write the plan to a YAML file, to edit and pass to `convert --plan`"


class Job:
    """Base class of a job's options; `of` takes them by name, like the command line and config files."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    def __post_init__(self) -> None:
        check(self, "options")

    @classmethod
    def of(cls, **options: object) -> Self:
        """Build a job from options by name; those left out keep their defaults.

        Raises:
            ConfigError: for an unknown or missing option, or a value that is not allowed.
        """
        return make(cls, options)


def parse_layers(text: str) -> tuple[int, ...] | str:
    """Parse layer numbers such as 0-2,5; a share such as 1/4 stays a string until the number of layers is known."""
    from linearize.conversion.layers import parse_indices, parse_share

    if parse_share(text) is not None:
        return text
    return tuple(parse_indices(text, "--keep-softmax")) if text else ()


def _folder(values: ReadOnlyValues, ending: str) -> str:
    """Return the output folder: the one given, or `<model-name>-<ending>`."""
    return values.get("output") or f"{Path(values['model']).name.removesuffix('.gguf')}-{ending}"


def _refuse(given: Mapping[str, object], why: str) -> None:
    """Raise an error that names the first option that is set.

    Raises:
        ConfigError: with the reason `why`, if any option is set.
    """
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name}: {why}; leave {name} out")


@dataclass(frozen=True, kw_only=True)
class TrainingJob(Job):
    """Options of the jobs that train kernels and keep states on disk.

    Attributes:
        ending: suffix of the default output folder.
        endings: suffixes of the state folders, by section; the first one is the job's stage.
        row_length: name of the option with the tokens per row.
        continues: whether the job continues to train a converted checkpoint.
    """

    ending: ClassVar[str]
    endings: ClassVar[Mapping[str, str]]
    row_length: ClassVar[str] = "distill_length"
    continues: ClassVar[bool] = False

    model: str
    seed: int = option(0, "seed of kernels, data order and sampling", metavar="S")
    data: DataConfig = section(
        DataConfig,
        DATA,
        only=OF_DATA,
        shown={"batch_size": f"as many as fit into {STAGE_ONE_TOKENS:,} tokens, at most {STEP_ROWS}"},
    )
    output: str | None = None
    overwrite: bool = option(False, OVERWRITE, group=OUTPUT)
    device: str = option("auto", DEVICES, group=OUTPUT, metavar="D")

    @property
    def stage(self) -> RunConfig:
        """The options of the job's stage, including how states are kept."""
        stage: RunConfig = getattr(self, next(iter(self.endings)))
        return stage

    @property
    def keeps_states(self) -> bool:
        """Whether states are written or read."""
        return self.stage.save_every is not None or self.stage.resume

    def target(self) -> str:
        """Return the output folder: the one given, or `<model-name>-<ending>`."""
        return self.folder(vars(self))

    def sources(self) -> list[str | None]:
        """Return the inputs, which the output must not replace."""
        return [self.model, *(name for name, _ in self.data.sources)]

    @classmethod
    def folder(cls, values: ReadOnlyValues) -> str:
        """Return the output folder for these options."""
        return _folder(values, cls.ending)

    @classmethod
    def derive(cls, values: ReadOnlyValues) -> dict[str, Values]:
        """Return the defaults that depend on other options: state folders, rows per batch, rows as in training."""
        base = cls.folder(values).rstrip("/")
        keeps = values.get("save_every") is not None or values.get("resume") or values.get("stream_blocks")
        derived = {part: {"folder": f"{base}{ending}" if keeps else None} for part, ending in cls.endings.items()}
        usual: dict[str, object] = {}
        if cls.continues and cls.row_length not in values:
            usual = presets.rows_of_training(values, cls.row_length)
        rows = presets.rows_of({**usual, **values}.get(cls.row_length) or DISTILL_LENGTH, STAGE_ONE_TOKENS)
        return {**derived, "": usual, "data": {"batch_size": rows}}


@dataclass(frozen=True, kw_only=True)
class StageOneJob(TrainingJob):
    """Options of the jobs that run stage one."""

    distill_length: int | None
    distill: DistillConfig = section(DistillConfig, STAGE_ONE, names={"steps": "distill_steps"}, leave_out=("folder",))
    report_to: str = option("none", REPORT_TO, group=STAGE_ONE)


@dataclass(frozen=True, kw_only=True)
class ConvertJob(StageOneJob):
    """Options of `convert`."""

    endings: ClassVar[Mapping[str, str]] = {"distill": ".stage1", "align": ".align", "search": ".search"}

    distill_length: int | None = option(None, ROWS, group=STAGE_ONE, low=1)
    model: str = option(help="Hub name, folder or GGUF file of a model", positional=True, metavar="MODEL")
    kernel: str | None = option(KERNEL, f"kernel for all layers, see `linearize kernels`; or {AUTO}", metavar="NAME")
    kernel_args: Mapping[str, object] = kernel_options.kernel_args()
    preset: str | None = option(None, PRESET, metavar="NAME")
    layers: str | None = option(None, LAYERS, metavar="PLAN")
    keep_softmax: tuple[int, ...] | str = option((), KEPT, metavar="LAYERS", parse=parse_layers)
    plan: str | None = option(
        None, "a plan for every layer: a file written by --plan-out, which may be edited", metavar="FILE.yaml"
    )
    example_inputs: str | None = option(None, EXAMPLE_INPUTS, metavar="FILE")
    local_as_full: bool = option(False, LOCAL_AS_FULL)
    window: str | int | None = option(None, WINDOWS, metavar="W", parse=presets.parse_window)
    additions: Additions = section(Additions, leave_out=("window",))
    keep_softmax_heads: str | None = option(None, KEPT_HEADS, metavar="N_OR_HEADS")
    task: str | None = option(None, HEAD, metavar="TASK")
    revision: str | None = option(None, "branch, tag or commit on the Hub", metavar="REV")
    max_length: int | None = option(None, "longest input that the result must take, in tokens")
    image_size: int | None = option(
        None, "pixels per side of the square images that the result must take, for image models", metavar="P", low=1
    )
    positions: str = option("tile", POSITIONS, metavar="HOW")
    stream_blocks: bool = option(False, STREAM, group=STAGE_ONE)
    search: SearchConfig = section(
        SearchConfig,
        SEARCH,
        prefix="search",
        shared=(*SAME, "candidates", "budget", "length", "query_sample"),
        leave_out=("folder",),
    )
    plan_out: str | None = option(None, PLAN_OUT, group=SEARCH, metavar="FILE.yaml")
    align: AlignConfig = section(
        AlignConfig,
        ALIGNMENT,
        prefix="align",
        shared=SAME,
        leave_out=("folder",),
        shown={"steps": "two fifths of stage one's"},
    )
    output: str | None = option(None, "output folder (<model-name>-<kernel>)", group=OUTPUT, metavar="DIR")

    @property
    def keeps_states(self) -> bool:
        """Whether states are written or read."""
        return self.stream_blocks or super().keeps_states

    @property
    def chooses_windows(self) -> bool:
        """Whether a window is chosen for each layer."""
        return isinstance(self.window, str)

    @property
    def chooses_heads(self) -> bool:
        """Whether the heads that keep softmax are given as a number or share, so that they must be chosen."""
        return (self.keep_softmax_heads or "").removesuffix("%").isdecimal()

    def softmax_heads(self, heads: int) -> int:
        """Return how many of `heads` heads keep softmax, if a number or share is given."""
        given = self.keep_softmax_heads or ""
        return max(1, round(heads * int(given[:-1]) / 100)) if given.endswith("%") else int(given)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size is not None and self.max_length is not None:
            raise ConfigError(
                f"image-size: got {self.image_size} and max-length {self.max_length}, which both set the size; "
                "drop one of them"
            )
        if self.chooses_heads and "%" in str(self.keep_softmax_heads) and self.softmax_heads(100) > 100:
            raise ConfigError(f"keep_softmax_heads: got {self.keep_softmax_heads}, expected at most 100%")
        if self.preset is not None and (self.plan is not None or self.kernel == AUTO):
            other = f"--kernel {AUTO}" if self.plan is None else "--plan FILE"
            raise ConfigError(
                f"preset: got {self.preset!r} and {other}, which also chooses kernels; leave one of them out"
            )
        own = {name: getattr(self, name) for name in ("layers", "window", "keep_softmax_heads")}
        chosen = {f"--{name.replace('_', '-')}": value for name, value in {**own, **self.additions.given}.items()}
        chosen["--kernel-arg"] = self.kernel_args
        if self.plan is not None:
            chosen |= {"--keep-softmax": self.keep_softmax, "--kernel": None if self.kernel == KERNEL else self.kernel}
            _refuse(chosen, "--plan FILE already determines every layer")
        elif self.kernel == AUTO:
            # After the search, a number of heads can be chosen as in any conversion.
            chosen["--keep-softmax-heads"] = None if self.chooses_heads else self.keep_softmax_heads
            advice = "give arguments with the candidates, as in --candidates hedgehog,luna:window=32"
            _refuse(chosen, f"--kernel {AUTO} chooses kernel and arguments of every layer; {advice}")
        quantized = self.distill.quantize_frozen is not None
        if self.stream_blocks or quantized:
            whole = {
                "kernel": AUTO if self.kernel == AUTO else None,
                "window": self.window if self.chooses_windows else None,
                "keep_softmax_heads": self.keep_softmax_heads if self.chooses_heads else None,
                "align_steps": self.align.steps,
                "quantize_frozen": self.distill.quantize_frozen if self.stream_blocks else None,
                "save_every": self.distill.save_every if self.stream_blocks else None,
            }
            other = "--stream-blocks" if self.stream_blocks else "--quantize-frozen"
            reasons = {"save_every": "it keeps a state after each block", "quantize_frozen": "it holds one block only"}
            for name, value in whole.items():
                if value:
                    why = reasons.get(name, "it needs the whole model")
                    raise ConfigError(f"{name}: got {value} with {other}, but {why}; leave one of them out")
        if self.kernel != AUTO:
            usual = SearchConfig()
            alike = ("candidates", "budget", "length")
            given = {f"--{name}": getattr(self.search, name) != getattr(usual, name) for name in alike}
            given["--search-steps"] = self.search.steps != usual.steps
            _refuse(
                {**given, "--plan-out": None if self.chooses_windows else self.plan_out},
                f"nothing is searched without --kernel {AUTO}",
            )

    @classmethod
    def folder(cls, values: ReadOnlyValues) -> str:
        """Return the output folder: the one given, or `<model-name>-<kernel>`, with "mixed" for several kernels."""
        ending = "mixed" if values.get("plan") is not None else values.get("kernel") or "mixed"
        return _folder(values, ending)

    @classmethod
    def derive(cls, values: ReadOnlyValues) -> dict[str, Values]:
        """Return the defaults that depend on other options, including a preset's and the alignment's steps."""
        usual = dict(presets.preset_options(values, rows=True))
        if "distill_length" not in {**usual, **values}:
            usual |= presets.rows_for(values.get("window", usual.get("window")))
        derived = super().derive({"kernel": KERNEL, **usual, **values})
        steps = {**usual, **values}.get("distill_steps", DistillConfig.steps)
        # Steps of another type are refused by stage one's own checks.
        aligned = isinstance(steps, int) and not values.get("stream_blocks") and not values.get("quantize_frozen")
        derived["align"]["steps"] = round(ALIGN_SHARE * steps) if aligned else 0
        return {**derived, "": usual}


@dataclass(frozen=True, kw_only=True)
class DistillJob(StageOneJob):
    """Options of `distill`, which continues stage one on a converted checkpoint."""

    ending: ClassVar[str] = "distilled"
    endings: ClassVar[Mapping[str, str]] = {"distill": ".stage1"}
    continues: ClassVar[bool] = True

    distill_length: int | None = option(None, LATER, group=STAGE_ONE, low=1)
    model: str = option(help="converted checkpoint: folder or Hub name", positional=True, metavar="MODEL_OR_DIR")
    output: str | None = option(None, "output folder (<folder>-distilled)", group=OUTPUT, metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class AlignJob(TrainingJob):
    """Options of `align`."""

    ending: ClassVar[str] = "aligned"
    endings: ClassVar[Mapping[str, str]] = {"align": ".align"}
    row_length: ClassVar[str] = "length"
    continues: ClassVar[bool] = True

    model: str = option(help="converted checkpoint: folder or Hub name", positional=True, metavar="MODEL_OR_DIR")
    teacher: str | None = option(
        None, "the softmax model it was made from, tuned or not; by default its own weights", metavar="ORIGINAL"
    )
    length: int | None = option(None, LATER, group=DATA, low=1)
    align: AlignConfig = section(AlignConfig, "alignment", leave_out=("folder",))
    report_to: str = option("none", REPORT_TO, group="alignment")
    output: str | None = option(None, "output folder (<folder>-aligned)", group=OUTPUT, metavar="DIR")

    def sources(self) -> list[str | None]:
        """Return the inputs, which the output must not replace."""
        return [self.teacher, *super().sources()]


@dataclass(frozen=True, kw_only=True)
class SearchJob(TrainingJob):
    """Options of `search`; its states, and the plan of an interrupted search, are named as those of `convert`."""

    ending: ClassVar[str] = AUTO
    endings: ClassVar[Mapping[str, str]] = {"search": ".search"}

    model: str = option(help="Hub name, folder or GGUF file of a model", positional=True, metavar="MODEL")
    search: SearchConfig = section(SearchConfig, "search", leave_out=("folder",))
    keep_softmax: tuple[int, ...] | str = option(
        (), f"{KEPT}, in addition to those of the budget", metavar="LAYERS", parse=parse_layers
    )
    example_inputs: str | None = option(None, EXAMPLE_INPUTS, metavar="FILE")
    local_as_full: bool = option(False, LOCAL_AS_FULL)
    task: str | None = option(None, HEAD, metavar="TASK")
    revision: str | None = option(None, "branch, tag or commit on the Hub", metavar="REV")
    max_length: int | None = option(
        None, "longest input that the conversion must take, for kernels that depend on it", low=1
    )
    distill_length: int | None = option(None, LENGTH, group=DATA, low=1)
    plan_out: str | None = option(None, PLAN_OUT, group=OUTPUT, metavar="FILE.yaml")
    plot: str | None = option(
        None, "plot error against time for the chosen plan and for others", group=OUTPUT, metavar="FILE.png"
    )
    overwrite: bool = option(
        False, "replace the plan file, the picture and the states of an interrupted search", group=OUTPUT
    )


@dataclass(frozen=True)
class InitJob(Job):
    """Options of `init`."""

    config: str | Mapping[str, object] = option(
        help="a transformers config: file or folder", positional=True, metavar="CONFIG"
    )
    output: str = option(help="output folder", metavar="DIR")
    task: str = option("causal-lm", "task that determines the head, as in `linearize finetune`", metavar="T")
    kernel: str | None = option(None, "kernel for all layers; see `linearize kernels` (hedgehog)", metavar="NAME")
    kernel_args: Mapping[str, object] = kernel_options.kernel_args()
    layers: str | None = option(None, LAYERS, metavar="PLAN")
    tokenizer: str | None = option(
        None,
        "tokenizer or image processor to save with the model: folder or Hub name; by default the config's folder",
        metavar="DIR",
    )
    num_labels: int | None = option(None, "number of classes of a classifier's head", low=1)
    matching_keys: bool = option(
        False, "start keys with the queries' weights, so that equal tokens attend to each other from the first step"
    )
    overwrite: bool = option(False, OVERWRITE)
    seed: int = option(0, "seed of all weights", metavar="S", low=0, high=MOST_SEED)


@dataclass(frozen=True)
class ExportJob(Job):
    """Options of `export`."""

    model: str = option(help="converted checkpoint", positional=True, metavar="DIR")
    output: str = option(help="output folder", metavar="X")
    format: str = option("onnx", "output format", choices=("onnx",), metavar="F")
    last_logits: bool = option(False, "for causal models: only the logits of a prompt's last token")
    onnxruntime_op: bool = option(False, "compute steps by onnxruntime's LinearAttention, which other programs lack")
    overwrite: bool = option(False, OVERWRITE)


@dataclass(frozen=True)
class EmbedJob(Job):
    """Options of `embed`."""

    model: str = option(help="converted sentence embedder: folder or Hub name", positional=True, metavar="DIR")
    dataset: str = option(help="documents: Hub data set, local file or folder", metavar="NAME_OR_PATH")
    data: DataConfig = section(DataConfig, only=("split", "text_column"), shown={"text_column": "found"})
    spans: int | None = option(None, "also one vector per span of N tokens, from the same pass", low=1)
    prompt: str | None = option(
        None, "name of the embedder's prompt to put before each document; by default the one it uses by default"
    )
    batch_tokens: int = option(16_384, "tokens per batch, with padding; as many documents as fit, at least one", low=1)
    output: str | None = option(None, "output file, .parquet or .npy (<model>-vectors.parquet)", metavar="FILE")
    overwrite: bool = option(False, "replace the output, if `embed` wrote it")
    resume: bool = option(False, "continue an interrupted run of the same output")
    device: str = option("auto", DEVICES, metavar="D")

    def target(self) -> Path:
        """Return the output file: the one given, or `<model>-vectors.parquet`."""
        return Path(self.output or f"{Path(self.model).name}-vectors.parquet")


@dataclass(frozen=True)
class DemoJob(Job):
    """Options of `demo`."""

    kernel: str = option("hedgehog", "kernel", metavar="NAME")
    steps: int = option(18, "steps of stage one; the alignment has a sixth as many", low=0)
    tokens: int = option(8192, "length of the long document, in tokens", low=512)
    output: str = option("demo-output", "output folder; an existing one is replaced", metavar="DIR")
