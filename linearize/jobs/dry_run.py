"""`--dry-run`: check everything, run a few steps of the job's own stages, and estimate the cost of the whole job.

Nothing is written, and the model trained in these steps is discarded.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from linearize.attention.native.build import worth_building
from linearize.checkpoint.output import check_target, free_disk
from linearize.checkpoint.save import size_of
from linearize.core.errors import TrainingError
from linearize.core.registry import Values
from linearize.evaluation.bench.memory import SHARE, free_memory, is_out_of_memory, peak_meter, resident
from linearize.fidelity.heads import POINTS
from linearize.fidelity.measure import measure_layers
from linearize.fidelity.teacher import chain_of
from linearize.jobs import convert
from linearize.jobs.config import AlignJob, ConvertJob, DistillJob, StageOneJob
from linearize.jobs.events import Callback, Started, ignore
from linearize.jobs.finetune import open_tuning
from linearize.jobs.presets import AUTO
from linearize.jobs.stages import Context, check_start
from linearize.jobs.task_config import TuneJob
from linearize.kernel_search.loop import search
from linearize.modeling.model import kernel_parameters
from linearize.modeling.weights import is_streamed
from linearize.training.alignment.config import BLOCKWISE, AlignConfig
from linearize.training.alignment.loop import AlignResult, align
from linearize.training.processes import check_alone
from linearize.training.sharding import make_accelerator
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.loop import DistillResult, distill
from linearize.training.stage_one.streamed import stored_bytes
from linearize.training.stage_two.rows import Chosen
from linearize.training.stage_two.task_types.base import TaskData
from linearize.training.stage_two.trainer import finetune

HOW = "from real steps of this job on this machine, under its current load"
WITHOUT_NATIVE = f"{HOW}; without the native op, which `convert` compiles first and which is faster"
SEARCHED = "; stage one and the alignment with the plan that a few steps of the search chose"
AnyJob = ConvertJob | DistillJob | AlignJob | TuneJob
TIMED = 3
"""Steps of each stage: the first one is a warm-up, and an evaluation follows the last one."""
TIMED_IN_SEARCH = 7
"""Steps of a search."""
CHOICES = {"window": ("choosing the windows", 1), "keep_softmax_heads": ("choosing the heads", POINTS)}
"""What `stages.choose` chooses: its name in the estimate, and how much longer than the dry run the job takes for it."""
NO_STATES: Values = {"save_every": None, "folder": None, "resume": False}
ONCE = 10**6
"""Steps between evaluations; so many that there is one only after the last step."""


@dataclass(frozen=True)
class StageBill:
    """The estimated cost of one stage.

    Attributes:
        stage: its name.
        steps: optimizer steps.
        rows: rows per step.
        seconds_per_step: mean over the timed steps.
        timed: number of timed steps.
        evaluations: number of evaluations on the held-out rows.
        seconds: duration of the whole stage with its evaluations, unless it stops early.
        evaluation: seconds per evaluation.
    """

    stage: str
    steps: int
    rows: int
    seconds_per_step: float
    timed: int
    evaluations: int
    seconds: float
    evaluation: float = 0.0

    @property
    def text(self) -> str:
        """The cost in one line."""
        if not self.steps:
            return f"{self.stage}: {duration(self.seconds)}"
        measured = f", evaluated {self.evaluations:,} times" if self.evaluations else ""
        return (
            f"{self.stage}: {self.steps:,} steps of {self.rows:,} rows at {self.seconds_per_step:.3g} s{measured}: "
            f"{duration(self.seconds)}"
        )


@dataclass(frozen=True)
class Bill:
    """The estimated cost of a job.

    Attributes:
        output: the folder that it creates.
        data: one line about the data.
        length: the maximum number of tokens per row; None for images.
        stages: cost of each stage.
        device: the device's type.
        memory: peak bytes while the steps were timed: of the process on a CPU, of torch's tensors on another device;
            None if the system does not report it.
        memory_there: available bytes of memory; None if the system does not report it.
        disk: bytes of the result and of the states.
        disk_there: free bytes on the disk of the output.
        problem: why the trial failed; empty if it did not.
        how: where the figures come from.
    """

    output: str
    data: str
    length: int | None
    stages: tuple[StageBill, ...]
    device: str
    memory: int | None
    memory_there: int | None
    disk: int
    disk_there: int
    problem: str = ""
    how: str = HOW

    @property
    def seconds(self) -> float:
        """Duration of all stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def problems(self) -> list[str]:
        """Why the job does not fit; empty if it does."""
        problems = [self.problem] if self.problem else []
        if self.memory is not None and self.memory_there is not None and self.memory > self.memory_there:
            problems.append(f"memory: {size(self.memory)} needed, {size(self.memory_there)} available")
        if self.disk > self.disk_there:
            problems.append(f"disk: {size(self.disk)} needed, {size(self.disk_there)} free")
        return problems

    def lines(self) -> list[str]:
        """Return the estimate as lines of text."""
        rows = "" if self.length is None else f"; rows of up to {self.length:,} tokens"
        lines = [f"Data: {self.data}{rows}", *(f"Time, {stage.text}" for stage in self.stages)]
        if len(self.stages) > 1:
            lines.append(f"Time, total: {duration(self.seconds)}")
        if self.stages:
            lines.append(f"Estimated {self.how}.")
        if self.memory is not None:
            available = "" if self.memory_there is None else f" of {size(self.memory_there)}"
            lines.append(f"Memory on {self.device}: {size(self.memory)}{available}")
        lines.append(f"Folder: {self.output}, {size(self.disk)} of {size(self.disk_there)} free")
        problems = "; ".join(self.problems)
        return [*lines, f"It does not fit: {problems}." if problems else "It fits. Nothing was written."]

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self) | {"seconds": self.seconds, "fits": not self.problems, "problems": self.problems}


def duration(seconds: float) -> str:
    """Return a duration as readable text."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: int) -> str:
    """Return a number of bytes as readable text."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def dry_run(job: AnyJob, on_event: Callback = ignore) -> Bill:
    """Check everything that can be checked before a job starts, and estimate its cost.

    Args:
        job: the job.
        on_event: called with every event.

    Raises:
        LinearizeError: any error that the job would raise before its first step.
    """
    check_alone("dry run")
    check_target(job.target(), overwrite=job.overwrite, sources=job.sources())
    if isinstance(job, TuneJob):
        model, data, teacher, _ = open_tuning(job, on_event)
        whole, trial = size_of(model), _Trial(on_event, next(model.parameters()).device.type)
        trial.run("stage two", lambda: [_stage_two(job, model, data, teacher)])
        trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        length = job.data.max_length if job.task.modality == "text" else None
        # The trainer keeps two checkpoints of weights and two moments, and briefly three while it writes a new one.
        return trial.bill(str(job.target()), data.description, length, whole + 3 * (whole + 2 * trained))
    check_start(job)
    if isinstance(job, ConvertJob):
        context = convert.open_conversion(job, on_event, trial=True)
    else:
        context = convert.open_converted(job, on_event)
    model, source = context.loaded.model, context.source
    trial, how = _Trial(on_event, next(model.parameters()).device.type), HOW
    if trial.device == "cpu" and isinstance(job, ConvertJob) and worth_building():
        how = WITHOUT_NATIVE
    if isinstance(job, ConvertJob) and job.kernel == AUTO:
        trial.run("the search", lambda: [_search(context, job)])
        how += SEARCHED
    trial.stages += [
        StageBill(CHOICES[choice][0], 0, 0, 0.0, 0, 0, CHOICES[choice][1] * seconds)
        for choice, seconds in context.choosing.items()
    ]
    if source is not None and isinstance(job, StageOneJob) and job.distill.steps:
        trial.run("stage one", lambda: _trained(context, job.distill))
    alignment = job.align if source is not None and isinstance(job, ConvertJob | AlignJob) else None
    if alignment is not None and alignment.steps:
        trial.run("the alignment", lambda: _trained(context, alignment))
    disk = size_of(model)
    if job.keeps_states:
        # Each state has weights, the best weights and two moments; while one is written there is one more than `keep`.
        whole = alignment is not None and alignment.steps and alignment.train in ("blocks", "attention")
        trained = disk if whole else sum(parameter.nbytes for parameter in kernel_parameters(model))
        disk += (job.stage.keep + 1) * 4 * trained
    if isinstance(job, ConvertJob) and source is not None and job.distill.steps:
        accelerator, batch = make_accelerator(model), next(source.train_batches())
        if (chain := chain_of(model, batch)) is not None:
            # Streamed blocks leave their rows on disk, before the block and after it.
            stored = stored_bytes(chain, batch, job.distill, accelerator)
            disk += 2 * job.distill.steps * job.distill.gradient_accumulation * stored
    length = None if source is None or context.loaded.modality != "text" else source.options["max_length"]
    return trial.bill(context.target, "none is read" if source is None else source.description, length, disk, how)


class _Trial:
    """Runs a few steps of each stage and estimates its cost; peak memory is measured from construction on."""

    def __init__(self, on_event: Callback, device: str) -> None:
        self.on_event, self.device, self.problem = on_event, device, ""
        self.stages: list[StageBill] = []
        start, self.peak = peak_meter(device)
        start()

    def run(self, what: str, stage: Callable[[], Iterable[StageBill]]) -> None:
        """Run a stage, unless an earlier one failed; running out of memory or diverging is recorded as the problem."""
        if self.problem:
            return
        self.on_event(Started(f"timing {TIMED} steps of {what}"))
        try:
            self.stages += stage()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.problem = f"memory ran out in {what}; lower --batch-size, or the tokens per row"
        except TrainingError as error:
            self.problem = str(error)

    def bill(self, output: str, data: str, length: int | None, disk: int, how: str = HOW) -> Bill:
        """Return the estimate, with `disk` bytes for the output folder and its states."""
        gc.collect()
        memory: tuple[int | None, int | None] = None, None
        # Available is free memory plus what this process already holds.
        if self.device.startswith("cuda"):
            memory = self.peak(), torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        elif self.device == "cpu":
            free = free_memory()
            memory = self.peak(), None if free is None else int(SHARE * free) + resident()
        stages = tuple(self.stages)
        return Bill(output, data, length, stages, self.device, *memory, disk, free_disk(output), self.problem, how)


def _search(context: Context, job: ConvertJob) -> StageBill:
    """Return the cost of the search from a short one, and carry out its plan for the stages that follow."""
    config, seconds, start = job.search, list[float](), time.perf_counter()
    result = search(
        context.loaded.model,
        context.source,
        replace(config, **NO_STATES, steps=min(TIMED_IN_SEARCH, config.steps)),
        plan=context.plan,
        max_length=convert.longest_input(job, context.loaded),
        on_step=lambda report: seconds.append(report.seconds),
        on_event=context.on_event,
    )
    wall = time.perf_counter() - start
    context.plan = result.plan
    convert.put_in_kernels(context)
    convert.choose_heads(context)
    timed, step = len(seconds), seconds[-1] / len(seconds)
    training = (config.steps - timed) * step
    rows = context.source.options["batch_size"] * config.gradient_accumulation
    return StageBill("the search", config.steps, rows, step, timed, 0, wall + training)


def _trained(context: Context, config: DistillConfig | AlignConfig) -> list[StageBill]:
    """Run a few steps of stage one, or of each phase of the alignment, and extrapolate the cost of the whole stage."""
    run: Callable[..., DistillResult | AlignResult] = distill
    phases: list[tuple[str, DistillConfig | AlignConfig, int]] = [("stage one", config, config.steps)]
    if isinstance(config, AlignConfig):
        run = functools.partial(align, teacher=context.teacher)
        phases = [
            (f"alignment, {phase}", replace(config, blockwise=float(phase == BLOCKWISE)), steps)
            for phase, steps in config.phases()
        ]
    # One batch of held-out rows is enough here: to measure all of them can take longer than the steps.
    source, held = copy.copy(context.source), context.source.holdout_batches()
    vars(source)["holdout_batches"] = lambda: held[:1]
    bills = []
    for name, options, count in phases:
        start, few = time.perf_counter(), min(TIMED, count)
        with tempfile.TemporaryDirectory() as folder:
            # Blocks that are streamed leave their rows there.
            states = NO_STATES | {"folder": f"{folder}/states" if is_streamed(context.loaded.model) else None}
            result = run(context.loaded.model, source, replace(options, **states, steps=few, eval_every=ONCE))
        wall, seconds = time.perf_counter() - start, [report.seconds for report in result.history]
        if not seconds:
            bills.append(StageBill(name, 0, 0, 0.0, 0, 0, wall * len(held)))
            continue
        step, evaluation = _step_and_evaluation(seconds)
        measurement = evaluation if isinstance(config, AlignConfig) else _measurement(context, held[:1])
        evaluations = math.ceil(count / config.eval_every)
        # `wall` includes the measurements before and after the steps and two evaluations, each on one batch.
        whole = wall + (count - len(seconds)) * step + (evaluations - 1) * evaluation * len(held)
        whole += (len(held) - 1) * 2 * (measurement + evaluation)
        rows = source.options["batch_size"] * config.gradient_accumulation
        bills.append(StageBill(name, count, rows, step, len(seconds), evaluations, whole, evaluation * len(held)))
    return bills


def _measurement(context: Context, held: list[dict[str, torch.Tensor]]) -> float:
    """Return the seconds in which stage one measures all layers on held-out batches."""
    start = time.perf_counter()
    measure_layers(context.loaded.model, held)
    return time.perf_counter() - start


def _step_and_evaluation(seconds: list[float]) -> tuple[float, float]:
    """Return the seconds per step, and of the evaluation after the last step, from the times at which steps ended."""
    gaps = [after - before for before, after in itertools.pairwise(seconds)]
    if len(gaps) < 2:
        return (gaps or seconds)[-1], 0.0
    step = sum(gaps[:-1]) / len(gaps[:-1])
    return step, max(0.0, gaps[-1] - step)


class _Enough(Exception):
    """Ends the trainer's run after its first evaluation, before it writes a checkpoint."""


def _stage_two(job: TuneJob, model: PreTrainedModel, data: TaskData, teacher: PreTrainedModel | None) -> StageBill:
    config = job.tune
    train = len(data.train) + (len(data.extra) if data.extra and teacher else 0)
    per_epoch = max(1, math.ceil(math.ceil(train / config.batch_size) / config.gradient_accumulation))
    total = config.steps or math.ceil(config.epochs * per_epoch)
    evaluations = math.ceil(total / (config.eval_every or per_epoch)) + 1
    measured = min(len(data.validation), 2 * (config.eval_batch_size or 2 * config.batch_size))
    without_metrics = copy.copy(data.type)
    # Metrics may need all rows.
    vars(without_metrics)["compute_metrics"] = lambda predictions, labels: dict.fromkeys(data.task.score, 0.0)
    few = replace(
        data, type=without_metrics, validation=Chosen(data.validation, range(measured), still=True), selection=None
    )
    # Without epochs nothing is trained; one step is timed nevertheless.
    steps = max(1, min(TIMED, total))
    seconds, evaluation = list[float](), 0.0

    def on_log(entry: dict[str, float]) -> None:
        nonlocal evaluation
        if "eval_runtime" in entry:
            evaluation = entry["eval_runtime"] / measured
            raise _Enough

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_Enough):
        finetune(
            model,
            few,
            replace(config, steps=steps, eval_every=steps, save_every=None, selection_rows=0, report_to="none"),
            folder=Path(folder) / "training",
            on_log=on_log,
            on_step=lambda step: seconds.append(step.seconds),
            teacher=teacher,
        )
    first = seconds[0]
    step = (seconds[-1] - first) / (steps - 1) if steps > 1 else first
    evaluation *= len(data.validation) + (0 if data.selection is None else len(data.selection))
    rows = config.batch_size * config.gradient_accumulation
    whole = first + (total - 1) * step + evaluations * evaluation
    return StageBill("stage two", total, rows, step, steps, evaluations, whole, evaluation)
