"""What a recipe is: one published table (or a demonstration) with a matrix over kernels and tasks, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from linearize.alignment.config import AlignConfig
from linearize.distillation.config import DistillConfig
from linearize.errors import ConfigError, unknown_name
from linearize.finetune.config import TuneConfig

FLOWS = ("finetuned", "pretrained", "transfer", "scratch", "untuned")
"""finetuned: tune the softmax model, convert it, distil, tune. pretrained: the same without the first step. transfer:
as pretrained, distilled on another task. scratch: build with the kernel in place and train. untuned: convert, distil
and align; no label is used."""

SOFTMAX = "softmax"

TILE = "tile"

FREE = ("device", "data", "keep_models", "needs", "paper", "differs", "figures", "summary")
"""What says where a run is done, or something about it, and changes no figure: a continuation may differ in it."""

Cells = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Paper:
    """Where a table comes from."""

    title: str
    url: str
    table: str


@dataclass(frozen=True)
class LayerKernel:
    """The kernel of one layer where it is another one than the row's; "softmax" leaves the layer as it is."""

    name: str
    args: dict[str, object] = field(default_factory=dict)
    window: int | None = None
    sinks: int | None = None
    exact_keys: int | None = None
    scale: str = "none"

    def arguments(self) -> dict[str, object]:
        """The kernel's arguments, window and other additions among them."""
        more = {"window": self.window, "sinks": self.sinks, "exact_keys": self.exact_keys}
        found = dict(self.args) | {name: value for name, value in more.items() if value is not None}
        # A table says what it has: recipes were written before scales were a default of `convert`.
        return found | ({"scale": self.scale} if self.window is not None or self.scale != "none" else {})


@dataclass(frozen=True)
class Kernel:
    """One row of the table.

    Attributes:
        name: the kernel, or "softmax" for the model that is not converted.
        label: what the row is called; by default the kernel's name.
        args: its arguments.
        distil: whether stage one is run.
        align: whether the alignment is run, where the recipe has one.
        window: softmax inside a window of so many tokens, beside the kernel.
        sinks: softmax for so many first tokens too.
        exact_keys: softmax for so many chosen keys per head too, see `linearize.ops.exact_keys`.
        scale: learned log-scales, see `linearize.attention.scale`.
        softmax_heads: query heads that stay softmax, such as "4:0,11:7".
        keep_softmax: numbers of layers that stay, or "1/4" for the last of every four.
        layers: kernels of single layers by their number, as a search finds them (`linearize search`); the others have
            the row's.
        rows: what this row reads in another way, `max_length` or `chunks`. A converted model takes that many tokens,
            and is tuned and measured so; softmax, which is tuned with the recipe's own rows, is measured so.
        positions: how learned positions become as many as `rows.max_length`, "tile" or "interpolate".
        note: what differs from the paper.
    """

    name: str
    label: str = ""
    args: dict[str, object] = field(default_factory=dict)
    distil: bool = True
    align: bool = True
    window: int | None = None
    sinks: int | None = None
    exact_keys: int | None = None
    scale: str = "none"
    softmax_heads: str | None = None
    keep_softmax: tuple[int, ...] | str = ()
    layers: dict[int, str | LayerKernel] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    positions: str = TILE
    note: str = ""

    @property
    def called(self) -> str:
        """The row's name."""
        return self.label or self.name

    def arguments(self) -> dict[str, object]:
        """The kernel's arguments, window and other additions among them."""
        return self.everywhere.arguments()

    @property
    def everywhere(self) -> LayerKernel:
        """The kernel of the layers that have none of their own."""
        return LayerKernel(self.name, self.args, self.window, self.sinks, self.exact_keys, self.scale)

    @property
    def single_layers(self) -> dict[int, LayerKernel]:
        """The layers with a kernel of their own, each with name and arguments."""
        return {number: LayerKernel(one) if isinstance(one, str) else one for number, one in self.layers.items()}


@dataclass(frozen=True)
class Tokens:
    """The tokenizer of a model trained from scratch: one by name, or one made here."""

    name: str | None = None
    kind: str | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        from linearize.synthetic.tokenizers import KINDS

        if (self.name is None) == (self.kind is None):
            raise ConfigError("got a name and a kind or neither, expected one of them")
        if self.kind is not None and self.kind not in KINDS:
            raise unknown_name("kind of tokenizer", self.kind, KINDS)


@dataclass(frozen=True)
class Model:
    """The model: a checkpoint by name (or a folder of an installed package), or a config to train from scratch.

    Of a checkpoint, `config` holds changes to its config, such as dropout.
    """

    name: str | None = None
    package: str | None = None
    pretrained: bool = True
    config: dict[str, object] = field(default_factory=dict)
    tokenizer: Tokens | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        if self.pretrained and (self.name is None) == (self.package is None):
            raise ConfigError("got a name and a package or neither, expected one of them for a pretrained model")
        if not self.pretrained and not isinstance(self.config.get("model_type"), str):
            raise ConfigError("got pretrained false and no config.model_type, expected one such as bert or gpt2")


@dataclass(frozen=True)
class Step:
    """What a task of the matrix changes, and what it reads.

    Attributes:
        task: a task of `linearize.finetune.tasks`; by default the one of the same name.
        dataset: Hub name, file or folder instead of the task's own.
        make: a data set made here (`linearize.synthetic.sets`), of `dataset` where it is made of something.
        options: its options.
        columns: text or image columns.
        label: label column.
        labels: class names in the order of their numbers.
        validation: split to measure on.
        score: figures whose mean is the score.
        folder: name of the folder in `data=PATH`.
        tokenizer: of a model trained from scratch.
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
class Distil(DistillConfig):
    """Stage one: its own options, and how much data it sees."""

    batch_size: int = field(default=32, metadata={"help": "rows per batch"})
    epochs: float | None = field(default=None, metadata={"help": "passes over the training rows, instead of steps"})
    holdout: int = field(default=64, metadata={"help": "rows held out of the training rows, to measure on"})
    max_length: int | None = field(
        default=None,
        metadata={"help": "tokens per row, those that the kernel's row reads at most; by default those of rows"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 1 or self.holdout < 1 or (self.epochs is not None and self.epochs <= 0):
            raise ConfigError("batch_size, holdout and epochs: expected numbers above 0")


@dataclass(frozen=True)
class Align(AlignConfig):
    """The alignment: its own options, and how much data it sees. Without `steps` there is none."""

    steps: int = field(default=0, metadata={"help": "optimizer steps; 0 skips the alignment"})
    batch_size: int = field(default=32, metadata={"help": "rows per batch"})
    holdout: int = field(default=64, metadata={"help": "held-out rows that the loss is measured on"})
    max_length: int | None = field(
        default=None,
        metadata={"help": "tokens per row, those that the kernel's row reads at most; by default those of rows"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 1 or self.holdout < 1:
            raise ConfigError("batch_size and holdout: expected numbers above 0")


@dataclass(frozen=True)
class Tune(TuneConfig):
    """Stage two: its own options, and whether the softmax model tuned on the same task and seed is the teacher."""

    teacher: bool | str = field(default=False, metadata={"help": "true, or softmax: that model guides stage two"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher not in (True, False, SOFTMAX):
            raise ConfigError(f"teacher: got {self.teacher!r}, expected true, false or {SOFTMAX}")


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        summary: one line.
        flow: one of `FLOWS`.
        kernels: rows of the table.
        tasks: columns of the table: names of tasks, or names with what differs.
        model: the model.
        paper: where the table comes from.
        needs: what it takes to run it, in words.
        data: a folder instead of the Hub: with one folder per task, or the data set itself.
        sources: tasks to distil on (transfer).
        seeds: the whole table once per seed.
        rows: how data becomes rows (`linearize.finetune.prepared.DataOptions`).
        pretrain: a task and how to train on it first, before the tasks of the table.
        pretrain_task: the task of `pretrain`.
        teacher: how the softmax model is tuned first (`TuneConfig`).
        distil: stage one.
        align: the alignment behind it, with the model's softmax, tuned where the flow tunes it, as the teacher.
        finetune: stage two (`Tune`).
        figures: the paper's figures by row and task.
        differs: what differs from the paper, one line each.
        device: where to run.
        keep_models: whether the models are kept, or only what was measured.
    """

    summary: str
    flow: str
    kernels: tuple[str | Kernel, ...]
    tasks: tuple[str, ...] | dict[str, Step]
    model: Model
    paper: Paper | None = None
    needs: str = ""
    data: str | None = None
    sources: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    rows: dict[str, object] = field(default_factory=dict)
    pretrain: dict[str, object] = field(default_factory=dict)
    pretrain_task: Step | None = None
    teacher: dict[str, object] = field(default_factory=dict)
    distil: dict[str, object] = field(default_factory=dict)
    align: dict[str, object] = field(default_factory=dict)
    finetune: dict[str, object] = field(default_factory=dict)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    device: str = "auto"
    keep_models: bool = True

    @property
    def rows_of_table(self) -> tuple[Kernel, ...]:
        """The kernels, each with its name and arguments."""
        return tuple(Kernel(one) if isinstance(one, str) else one for one in self.kernels)

    @property
    def steps(self) -> dict[str, Step]:
        """The tasks, each with what differs."""
        return dict(self.tasks) if isinstance(self.tasks, dict) else {name: Step() for name in self.tasks}
