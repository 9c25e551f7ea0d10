"""`--dry-run`: all that a job checks, then a few of its own steps on the real model, and what the whole will cost.

Nothing is written. What was trained in those steps is thrown away with the model.
"""

from __future__ import annotations

import gc
import itertools
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.alignment.config import BLOCKWISE, AlignConfig
from linearize.alignment.loop import align
from linearize.attention.interface import linear_attentions
from linearize.bench.memory import is_out_of_memory
from linearize.checkpoint.output import check_target
from linearize.checkpoint.save import size_of
from linearize.distillation.config import DistillConfig
from linearize.distillation.loop import distill
from linearize.distillation.processes import check_alone
from linearize.errors import TrainingError
from linearize.finetune.checks import checkpointing
from linearize.finetune.trainer import make_trainer, set_trained
from linearize.jobs.align import open_alignment
from linearize.jobs.bill import HOW, Bill, Meter, StageBill, free_disk
from linearize.jobs.config import AUTO, AlignJob, ConvertJob, DistillJob, StageOneJob
from linearize.jobs.context import Context, check_states
from linearize.jobs.convert import longest_input, open_conversion, plan_of, put_in_kernels
from linearize.jobs.distill import open_distillation
from linearize.jobs.events import Callback, Noted, Started, ignore
from linearize.jobs.finetune import open_tuning, sources_of
from linearize.jobs.longdoc import conversion_job, tuning_job
from linearize.jobs.longdoc_config import LongdocJob
from linearize.jobs.longdoc_data import check_options, examine, quick
from linearize.jobs.task_config import TuneJob
from linearize.kernel_search.estimate import SearchEstimate, estimate
from linearize.loading import check_device, wait
from linearize.modeling.model import kernel_parameters
from linearize.native.build import worth_building
from linearize.surgery.apply import convert_model
from linearize.trackers import reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.finetune.prepared import TaskData
    from linearize.finetune.tuner import Tuner
    from linearize.jobs.finetune import Opened
    from linearize.modeling.plan import Plan

WITHOUT_NATIVE = f"{HOW}; without the native op, which `convert` compiles first and is faster with"
AnyJob = ConvertJob | DistillJob | AlignJob | TuneJob | LongdocJob
TIMED = 3
"""Steps that are done of each part: the first one warms up, the last one is followed by an evaluation."""
NO_STATES: dict[str, Any] = {"save_every": None, "folder": None, "resume": False, "eval_every": 1_000_000}


def dry_run(job: AnyJob, on_event: Callback = ignore) -> Bill:
    """Check all that a job could be refused for, and estimate what it takes.

    Args:
        job: the job.
        on_event: called with what happens, as the job's own.

    Raises:
        LinearizeError: what the job would raise before its first step.
    """
    check_alone("dry run")
    if isinstance(job, TuneJob):
        return _of_tuning(job, on_event)
    if isinstance(job, LongdocJob):
        return _of_longdoc(job, on_event)
    # Refuses unknown names; nothing is opened before the first step.
    with reporter(job.report_to, job.target()):
        pass
    teacher = None
    base = None
    if isinstance(job, ConvertJob):
        context, base = open_conversion(job, on_event)
    elif isinstance(job, DistillJob):
        context, _ = open_distillation(job, on_event)
    else:
        context, teacher = open_alignment(job, on_event)
    check_target(job.target(), overwrite=job.overwrite, sources=job.sources())
    check_states(job)
    return _of_training(context, teacher, base)


def _of_training(context: Context, teacher: PreTrainedModel | None, base: Plan | None) -> Bill:
    job, model = context.job, context.loaded.model
    device = next(model.parameters()).device.type
    work: list[tuple[str, Callable[[], list[StageBill]]]] = []
    searches: list[SearchEstimate] = []
    if isinstance(job, ConvertJob) and job.kernel == AUTO and base is not None:
        work.append(("the search", lambda: [_search(context, base, searches)]))
    if context.source is not None and isinstance(job, StageOneJob) and job.distill.steps:
        work.append(("stage one", lambda: [_stage_one(context, job.distill)]))
    if context.source is not None and isinstance(job, ConvertJob | AlignJob) and job.align.steps:
        work.append(("the alignment", lambda: _alignment(context, job.align, teacher)))
    stages, memory, problem = _tried(context.on_event, device, work)
    source = context.source
    kept = _trained_bytes(context) + sum(one.parameter_bytes for one in searches)
    states = (job.stage.keep + 1) * 4 * kept if job.keeps_states else 0
    how = WITHOUT_NATIVE if device == "cpu" and isinstance(job, ConvertJob) and worth_building() else HOW
    return Bill(
        output=context.target,
        data="none is read" if source is None else source.description,
        length=None if source is None or context.loaded.modality != "text" else source.options["max_length"],
        stages=stages,
        device=device,
        memory=memory[0],
        memory_there=memory[1],
        disk=size_of(model) + states,
        disk_there=free_disk(context.target),
        problem=problem,
        how=f"{how}; stage one and the alignment as with {_kernel(searches[0])} in every layer" if searches else how,
        search=searches[0] if searches else None,
    )


def _kernel(searched: SearchEstimate) -> str:
    return searched.reference.converted[0].kernel


def _search(context: Context, base: Plan, found: list[SearchEstimate]) -> StageBill:
    """Time the search; what comes behind it is timed with its reference in every layer."""
    job = context.job
    assert isinstance(job, ConvertJob)
    longest = longest_input(job, context.loaded)
    one = estimate(
        context.loaded.model,
        context.source,
        job.search,
        base,
        max_length=longest,
        timed=TIMED,
        on_event=context.on_event,
    )
    found.append(one)
    put_in_kernels(context, one.reference)
    rows = context.source.options["batch_size"] * job.search.gradient_accumulation
    return StageBill("the search", job.search.steps, rows, one.seconds_per_step, TIMED, len(one.rounds), one.seconds)


def _trained_bytes(context: Context) -> int:
    """Bytes of what a state holds once: the kernels, and with an alignment of more than them the whole model."""
    job, model = context.job, context.loaded.model
    kernels = sum(parameter.nbytes for parameter in kernel_parameters(model))
    whole = isinstance(job, ConvertJob | AlignJob) and job.align.steps and job.align.train in ("blocks", "attention")
    return size_of(model) if whole else kernels


def _tried(
    on_event: Callback, device: str, work: list[tuple[str, Callable[[], list[StageBill]]]]
) -> tuple[tuple[StageBill, ...], tuple[int | None, int | None], str]:
    """Do a few steps of each part; return their bills, the memory taken and there, and why it did not work."""
    meter, stages, problem = Meter(device), [], ""
    for what, tried in work:
        on_event(Started(f"timing {TIMED} steps of {what}"))
        try:
            stages += tried()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = f"memory ran out in {what}; lower --batch-size, or the tokens per row"
            break
        except TrainingError as error:
            problem = str(error)
            break
    gc.collect()
    return tuple(stages), meter.read(), problem


def _stage_one(context: Context, config: DistillConfig) -> StageBill:
    """Time stage one: its own steps, and one evaluation."""
    steps = min(TIMED, config.steps)
    quick = replace(config, **NO_STATES, steps=steps, layers_at_a_time=None, patience=0)
    start = time.perf_counter()
    done = distill(context.loaded.model, context.source, quick)
    wall = time.perf_counter() - start
    if not done.history:
        return StageBill("stage one", 0, 0, 0.0, 0, 0, wall)
    groups = 1
    if config.layers_at_a_time:
        learn = sum(layer.mixer.learnable for layer in linear_attentions(context.loaded.model).values())
        groups = max(1, math.ceil(learn / config.layers_at_a_time))
    step, evaluation = _step_and_evaluation([one.seconds for one in done.history])
    total = groups * config.steps
    evaluations = groups * math.ceil(config.steps / config.eval_every)
    # Measuring before and after is in `wall` already.
    seconds = wall + (total - steps) * step + (evaluations - 1) * evaluation
    rows = context.source.options["batch_size"] * config.gradient_accumulation
    return StageBill("stage one", total, rows, step, steps, evaluations, seconds)


def _alignment(context: Context, config: AlignConfig, teacher: PreTrainedModel | None) -> list[StageBill]:
    """Time each phase of the alignment."""
    found = []
    for phase, steps in config.phases():
        timed = min(TIMED, steps)
        alone = 1.0 if phase == BLOCKWISE else 0.0
        quick = replace(config, **NO_STATES, steps=timed, blockwise=alone)
        start = time.perf_counter()
        done = align(context.loaded.model, context.source, quick, teacher=teacher)
        wall = time.perf_counter() - start
        step, evaluation = _step_and_evaluation([one.seconds for one in done.history])
        evaluations = math.ceil(steps / config.eval_every)
        seconds = wall + (steps - timed) * step + (evaluations - 1) * evaluation
        rows = context.source.options["batch_size"] * config.gradient_accumulation
        found.append(StageBill(f"alignment, {phase}", steps, rows, step, timed, evaluations, seconds))
    return found


def _step_and_evaluation(seconds: list[float]) -> tuple[float, float]:
    """Return the seconds of a step and of the evaluation behind the last one, from the times at the steps' ends."""
    gaps = [after - before for before, after in itertools.pairwise(seconds)]
    if len(gaps) < 2:
        return (gaps or seconds)[-1], 0.0
    step = sum(gaps[:-1]) / len(gaps[:-1])
    return step, max(0.0, gaps[-1] - step)


def _of_tuning(job: TuneJob, on_event: Callback) -> Bill:
    opened = open_tuning(job, on_event)
    target = str(job.target())
    check_target(target, overwrite=job.overwrite, sources=sources_of(job))
    model = opened.model
    device = next(model.parameters()).device.type
    whole = size_of(model)
    set_trained(model, job.tune)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    work: list[tuple[str, Callable[[], list[StageBill]]]] = [("stage two", lambda: [_stage_two(job, opened)])]
    stages, memory, problem = _tried(on_event, device, work)
    return Bill(
        output=target,
        data=opened.data.description,
        length=job.data.max_length if job.task.modality == "text" else None,
        stages=stages,
        device=device,
        memory=memory[0],
        memory_there=memory[1],
        # Of the trainer's checkpoints, weights and two moments each, there are three while one is written.
        disk=whole + 3 * (whole + 2 * trained),
        disk_there=free_disk(target),
        problem=problem,
    )


def _stage_two(job: TuneJob, opened: Opened) -> StageBill:
    """Time the trainer's steps, and some batches of its evaluation."""
    config, data = job.tune, opened.data
    with tempfile.TemporaryDirectory() as folder, checkpointing(opened.model, config.gradient_checkpointing):
        trainer = make_trainer(opened.model, data, config, folder, None, opened.teacher)
        optimizer, model = trainer.create_optimizer(), trainer.model
        assert model is not None
        # What the trainer's own loop sets for its steps.
        trainer.current_gradient_accumulation_steps = config.gradient_accumulation
        batches = trainer.get_train_dataloader()
        per_epoch = max(1, math.ceil(len(batches) / config.gradient_accumulation))
        total = config.steps or math.ceil(config.epochs * per_epoch)
        times = []
        endless = itertools.chain.from_iterable(itertools.repeat(batches))
        for _ in range(min(TIMED, total)):
            start = time.perf_counter()
            for batch in itertools.islice(endless, config.gradient_accumulation):
                trainer.training_step(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            wait()
            times.append(time.perf_counter() - start)
        step = sum(times[1:]) / len(times[1:]) if len(times) > 1 else times[0]
        evaluation = _evaluation(trainer, data)
    evaluations = math.ceil(total / (config.eval_every or per_epoch)) + 1
    seconds = times[0] + (total - 1) * step + evaluations * evaluation
    rows = config.batch_size * config.gradient_accumulation
    return StageBill("stage two", total, rows, step, len(times), evaluations, seconds, evaluation)


def _of_longdoc(job: LongdocJob, on_event: Callback) -> Bill:
    """Time the steps of `longdoc` one after the other, each on a model as it will be then but for its training."""
    target = str(job.target())
    check_target(target, overwrite=job.overwrite, sources=[job.model, job.dataset])
    check_options(job)
    job = quick(job)
    data, lengths = examine(job)
    for note in lengths.notes:
        on_event(Noted(note))
    device = check_device(job.device)
    sizes: list[int] = []

    def tuned(called: str, model: str, length: int, put: Callable[[PreTrainedModel], object] | None) -> StageBill:
        asked = tuning_job(job, model, folder / called, length)
        opened = open_tuning(asked, ignore, put)
        sizes.append(size_of(opened.model))
        return replace(_stage_two(asked, opened), stage=f"tuning {called} at {length:,} tokens")

    def stage_one() -> StageBill:
        asked = conversion_job(job, folder, lengths, job.distill_length or lengths.original)
        return _stage_one(open_conversion(asked, on_event)[0], asked.distill)

    def alignment() -> list[StageBill]:
        asked = conversion_job(replace(job, distill_steps=1), folder, lengths, job.align_length or lengths.linear)
        return _alignment(open_conversion(asked, ignore)[0], replace(asked.align, steps=job.align_steps), None)

    def put(model: PreTrainedModel) -> None:
        asked = conversion_job(job, folder, lengths, lengths.linear)
        decided = plan_of(asked, model, asked.max_length)
        convert_model(model, decided, max_length=asked.max_length, positions=asked.positions)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work: list[tuple[str, Callable[[], list[StageBill]]]] = [
            ("the original's tuning", lambda: [tuned("the original", job.model, lengths.original, None)]),
        ]
        work += [("stage one", lambda: [stage_one()])] if job.distill_steps else []
        work += [("the alignment", alignment)] if job.align_steps else []
        work += [("the linear model's tuning", lambda: [tuned("the linear model", job.model, lengths.linear, put)])]
        stages, memory, problem = _tried(on_event, device, work)
    if not problem:
        rows, sides = len(data.validation), 4 if lengths.longest > lengths.original else 2
        seconds = (sides - 1) * stages[0].evaluation + stages[-1].evaluation
        stages += (StageBill("the comparison, a step per side", sides, rows, seconds / sides, 1, 0, seconds),)
    whole = max(sizes, default=0)
    return Bill(
        output=target,
        data=data.description,
        length=lengths.linear,
        stages=stages,
        device=device,
        memory=memory[0],
        memory_there=memory[1],
        # Four models, and one tuning's states: weights and two moments each, three of them while one is written.
        disk=(4 + 9) * whole,
        disk_there=free_disk(target),
        problem=problem,
    )


def _evaluation(trainer: Tuner, data: TaskData) -> float:
    """Estimate an evaluation of the rows that are measured, and of those that the kept state is chosen on."""
    count = 0
    times: list[float] = []
    for rows in (data.validation, data.selection):
        if rows is None:
            continue
        assert trainer.model is not None
        batches = trainer.get_eval_dataloader(rows)
        count += len(batches)
        for batch in itertools.islice(batches, 2 if not times else 0):
            start = time.perf_counter()
            trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
            wait()
            times.append(time.perf_counter() - start)
    return count * min(times, default=0.0)
