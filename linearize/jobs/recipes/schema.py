"""The keys of a recipe: a table of kernels by tasks by seeds, and the options of the stages that fill it."""

from __future__ import annotations

from dataclasses import dataclass, field

from linearize.attention.parts import check_hybrid, check_new
from linearize.attention.shape import HeadShape
from linearize.conversion.layers import kept_layers, parse_heads
from linearize.conversion.positions import METHODS
from linearize.core.errors import ConfigError, repeated, unknown_name
from linearize.core.kernel_options import Additions
from linearize.core.options import MOST_SEED, option
from linearize.core.registry import SCALES, Hybrid, kernel_info, make_config
from linearize.training.alignment.config import AlignConfig
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_two.config import TuneConfig

FLOWS = ("finetuned", "pretrained", "transfer", "scratch", "untuned")
"""finetuned: tune the softmax model, convert it, distil, tune. pretrained: the same without the first step. transfer:
like pretrained, but distilled on another task. scratch: build the model with the kernel and train it. untuned: convert,
distil and align, without labels."""

SOFTMAX = "softmax"

CHANCE = "chance"
"""Name of the table's row with the best scores of answers that ignore the input."""

TILE = "tile"

FREE = ("device", "data", "keep_models", "needs", "paper", "differs", "figures", "summary")
"""Keys that change no result, so a resumed run may have other values."""


@dataclass(frozen=True)
class Paper:
    """The paper that a table comes from."""

    title: str
    url: str
    table: str


@dataclass(frozen=True)
class Kernel(Additions):
    """A kernel with its arguments and additions.

    Attributes:
        name: the kernel, or "softmax" to leave attention unconverted.
        args: its arguments.
        scale: learned log-scales. Recipes were written before `convert` added them to windows by default, and must keep
            their meaning.
    """

    name: str
    args: dict[str, object] = field(default_factory=dict)
    scale: str = field(default=SCALES[0], kw_only=True)

    def __post_init__(self) -> None:
        if self.name == SOFTMAX:
            if self.arguments():
                raise ConfigError("softmax takes no arguments; leave them out")
            return
        info = kernel_info(self.name)
        shape = HeadShape(1, 1, 1, 1, info.causal)
        config, hybrid = make_config(info, self.args), Hybrid.of(self.arguments())
        check_hybrid(info, config, hybrid, shape)
        check_new(info, config, hybrid)

    def arguments(self) -> dict[str, object]:
        """The kernel's arguments, including the window and other additions."""
        more = self.given
        if self.window is None and self.scale == SCALES[0]:
            del more["scale"]
        return {**self.args, **more}


@dataclass(frozen=True)
class Row(Kernel):
    """One row of the table.

    Attributes:
        label: the row's name; by default the kernel's.
        distil: whether stage one is run.
        align: whether the alignment is run, if the recipe has one.
        softmax_heads: query heads that stay softmax, such as "4:0,11:7".
        keep_softmax: numbers of the layers that stay softmax, or "1/4" for the last of every four.
        layers: kernels of single layers by number, as found by `linearize search`; all others have the row's kernel.
        rows: options for data rows that differ in this row of the table: `max_length` or `chunks`. A converted model
            is extended to that length, tuned and measured with it; softmax is tuned on the recipe's rows, and only
            measured with these options.
        positions: how learned positions are extended to `rows.max_length`: "tile" or "interpolate".
        note: differences from the paper.
    """

    label: str = ""
    distil: bool = True
    align: bool = True
    softmax_heads: str | None = None
    keep_softmax: tuple[int, ...] | str = ()
    layers: dict[int, Kernel] = field(default_factory=dict)
    rows: dict[str, object] = field(default_factory=dict)
    positions: str = TILE
    note: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        softmax = self.name == SOFTMAX
        if softmax and (self.keep_softmax or self.layers or self.softmax_heads):
            raise ConfigError("softmax takes no arguments and no layers; leave them out")
        if self.softmax_heads is not None:
            parse_heads(self.softmax_heads)
        kept_layers(self.keep_softmax, 0)
        for number in self.layers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ConfigError(f"layers: got {number!r}, expected numbers of layers from 0")
        if self.positions not in METHODS:
            raise unknown_name("positions", self.positions, METHODS)
        if self.positions != TILE and (softmax or "max_length" not in self.rows):
            raise ConfigError("positions: only for a converted model with rows.max_length; leave it out")
        known = ("max_length", "chunks") if softmax else ("max_length",)
        for name in self.rows:
            if name not in known:
                raise ConfigError(f"rows: {unknown_name(f'key of the rows of {self.name}', name, known)}")
        if self.called == CHANCE:
            raise ConfigError(f"label: the name {CHANCE!r} is taken; give the row another label")
        if self.rows and self.called == SOFTMAX:
            raise ConfigError("rows: a softmax row with its own rows needs its own label; add one")

    @property
    def called(self) -> str:
        """The row's name."""
        return self.label or self.name


@dataclass(frozen=True)
class Tokens:
    """The tokenizer of a model trained from scratch: given by name, or learned from the data."""

    name: str | None = None
    kind: str | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        from linearize.jobs.synthetic.tokenizers import KINDS

        if (self.name is None) == (self.kind is None):
            raise ConfigError("got both a name and a kind, or neither; expected exactly one")
        if self.kind is not None and self.kind not in KINDS:
            raise unknown_name("kind of tokenizer", self.kind, KINDS)


@dataclass(frozen=True)
class Model:
    """The model: a checkpoint by name (or a folder of an installed package), or a config to train from scratch.

    For a checkpoint, `config` holds changes to its config, such as dropout. With `matching_keys`, the keys of an
    untrained model start with the weights of its queries.
    """

    name: str | None = None
    package: str | None = None
    pretrained: bool = True
    config: dict[str, object] = field(default_factory=dict)
    tokenizer: Tokens | None = None
    image_size: int | None = None
    matching_keys: bool = False

    def __post_init__(self) -> None:
        if self.pretrained and self.matching_keys:
            raise ConfigError("matching_keys: only for a model trained from scratch (pretrained: false); leave it out")
        if self.pretrained and (self.name is None) == (self.package is None):
            got = "neither" if self.name is None else f"name {self.name!r} and package {self.package!r}"
            raise ConfigError(f"got {got}, expected a name or a package; model.package=null removes a recipe's package")
        if not self.pretrained and not isinstance(self.config.get("model_type"), str):
            raise ConfigError("got pretrained false without config.model_type, expected a type such as bert or gpt2")

    @property
    def checkpoint(self) -> str:
        """Name or folder of the pretrained checkpoint.

        Raises:
            CheckpointError: if it belongs to a package that is not installed.
        """
        from linearize.jobs.demo import in_package

        return str(self.name if self.package is None else in_package(self.package))


@dataclass(frozen=True)
class Column:
    """One column of the table: a task, its data, and its changes to the recipe's options.

    Attributes:
        task: a task of `linearize.training.stage_two.tasks`; by default the task with the column's name.
        dataset: Hub name, file or folder to read instead of the task's own.
        make: a data set made by `linearize.jobs.synthetic.sets`, from `dataset` if it needs a source.
        options: the options of `make`.
        columns: text or image columns of the data.
        label: label column.
        labels: class names in numeric order.
        validation: split to measure on.
        score: metrics whose mean is the score.
        folder: name of the task's folder in `data=PATH`.
        tokenizer: tokenizer for a model trained from scratch.
        rows: changes to the recipe's `rows`.
        model: changes to the model's config.
        teacher: changes to the recipe's `teacher`.
        distil: changes to the recipe's `distil`.
        align: changes to the recipe's `align`.
        finetune: changes to the recipe's `finetune`.
    """

    task: str | None = None
    dataset: str | None = None
    make: str | None = None
    options: dict[str, object] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    label: str | None = None
    labels: tuple[str, ...] = ()
    validation: str | None = None
    score: tuple[str, ...] = ()
    folder: str | None = None
    tokenizer: Tokens | None = None
    rows: dict[str, object] = field(default_factory=dict)
    model: dict[str, object] = field(default_factory=dict)
    teacher: dict[str, object] = field(default_factory=dict)
    distil: dict[str, object] = field(default_factory=dict)
    align: dict[str, object] = field(default_factory=dict)
    finetune: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Batches:
    """The rows that stage one and the alignment read."""

    batch_size: int = option(32, "rows per batch", low=1)
    holdout: int = option(64, "held-out training rows that the loss is measured on", low=1)
    max_length: int | None = option(None, "tokens per row, at most the length of the table's row", low=1)


@dataclass(frozen=True)
class StageOne(DistillConfig, Batches):
    """Options of `distil`."""

    epochs: float | None = option(None, "passes over the training rows, instead of steps", above=0)


@dataclass(frozen=True)
class Alignment(AlignConfig, Batches):
    """Options of `align`."""

    steps: int = option(0, "optimizer steps; 0 skips the alignment", low=0)


@dataclass(frozen=True)
class StageTwo(TuneConfig):
    """Options of `finetune`. With `teacher`, the softmax model tuned on the same task and seed guides the training."""

    teacher: bool | str = option(False, "true, or softmax")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher not in (True, False, SOFTMAX):
            raise ConfigError(f"teacher: got {self.teacher!r}, expected true, false or {SOFTMAX}")


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        summary: one line about the recipe.
        flow: one of `FLOWS`.
        kernels: rows of the table.
        tasks: columns of the table: names of tasks, or names with their changes to the options.
        model: the model.
        paper: the paper that the table comes from.
        needs: hardware and time needed, in words.
        data: a folder to read instead of the Hub: with one folder per task, or the data set itself.
        sources: tasks to distil on (transfer); untuned: one conversion on each of them, measured on all tasks.
        source_tasks: sources that are no columns of the table, with their changes to the options.
        seeds: the whole table is made once per seed.
        rows: options for turning data into rows (`linearize.training.stage_two.config.DataOptions`).
        pretrain: options for training on a first task (`StageTwo`).
        pretrain_task: the first task.
        teacher: options for tuning the softmax model first (`TuneConfig`).
        distil: options of stage one (`StageOne`).
        align: options of the alignment after it, with the model's own softmax as the teacher (`Alignment`).
        finetune: options of stage two (`StageTwo`).
        figures: the paper's figures by row and task.
        differs: differences from the paper, one line each.
        device: device to run on.
        keep_models: whether to keep the models, or only the results.
    """

    summary: str
    flow: str
    kernels: tuple[Row, ...]
    tasks: tuple[str, ...] | dict[str, Column]
    model: Model
    paper: Paper | None = None
    needs: str = ""
    data: str | None = None
    sources: tuple[str, ...] = ()
    source_tasks: dict[str, Column] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    rows: dict[str, object] = field(default_factory=dict)
    pretrain: dict[str, object] = field(default_factory=dict)
    pretrain_task: Column | None = None
    teacher: dict[str, object] = field(default_factory=dict)
    distil: dict[str, object] = field(default_factory=dict)
    align: dict[str, object] = field(default_factory=dict)
    finetune: dict[str, object] = field(default_factory=dict)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    device: str = "auto"
    keep_models: bool = True

    def __post_init__(self) -> None:
        if self.flow not in FLOWS:
            raise ConfigError(f"flow: {unknown_name('flow', self.flow, FLOWS)}")
        for name in ("kernels", "tasks", "seeds"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: got none, expected at least one")
        if self.flow != "untuned" and (self.flow == "transfer") != bool(self.sources):
            raise ConfigError("sources: expected tasks to distil on for flow transfer, and none for other flows")
        if self.flow in ("pretrained", "transfer", "untuned") and not self.model.pretrained:
            raise ConfigError(f"model.pretrained: got false, expected true for flow {self.flow}")
        if bool(self.pretrain) != (self.pretrain_task is not None):
            raise ConfigError("pretrain: expected both pretrain and pretrain_task, or neither")
        if len(set(self.seeds)) < len(self.seeds) or not all(0 <= seed <= MOST_SEED for seed in self.seeds):
            limit = f"{MOST_SEED + 1:,}"
            raise ConfigError(f"seeds: got {list(self.seeds)}, expected different whole numbers from 0 below {limit}")
        if (twice := repeated(row.called for row in self.kernels)) is not None:
            raise ConfigError(f"kernels: two rows are called {twice!r}; give one of them another label")

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of the table by name."""
        columns = self.tasks if isinstance(self.tasks, dict) else dict.fromkeys(self.tasks, Column())
        return {str(name): column for name, column in columns.items()}
