"""Run the verbs that train: `convert`, `distill`, `align`, `finetune`, `search`, `demo`; and their dry runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from linearize.cli._output import Screen, print_json, show_findings, table
from linearize.cli._progress import Work, at_work, figures_of
from linearize.cli.native import explain_plan, prepare_native
from linearize.core.errors import ConfigError
from linearize.core.events import Callback, Event, ignore
from linearize.jobs import events
from linearize.jobs.config import AlignJob, ConvertJob, DemoJob, DistillJob, SearchJob
from linearize.jobs.convert import ConvertResult, align_checkpoint, convert_checkpoint, distill_checkpoint
from linearize.training.processes import is_main
from linearize.training.states import StateFolder

if TYPE_CHECKING:
    from linearize.jobs.dry_run import AnyJob
    from linearize.jobs.task_config import TuneJob

EXPLAINED_TOKENS = 512
"""Input length for --explain-backend without --max-length."""
Job = TypeVar("Job", ConvertJob, DistillJob, AlignJob)


def convert(job: ConvertJob, args: argparse.Namespace, out: Screen) -> object:
    """Convert, or show the plan and the estimated cost; then upload the result, if requested."""
    if args.push_to_hub:
        from linearize.checkpoint.push import check_repo

        # A wrong name is refused before the first slow step.
        check_repo(args.push_to_hub)

    if args.device_memory is not None or args.devices != 1:
        return show_memory(job, args, out)

    def also(event: Event) -> None:
        if isinstance(event, events.Planned):
            prepare_native(args, job.device, None if args.dry_run else out)
            if args.explain_backend:
                explain_plan(out, event.plan, job.max_length or EXPLAINED_TOKENS, job.device)

    result = _train(job, args, out, convert_checkpoint, also)
    if args.push_to_hub and not args.dry_run and is_main():
        from linearize.cli.checkpoints import upload

        upload(job.target(), args.push_to_hub, out, private=args.private)
    return result


def show_memory(job: ConvertJob, args: argparse.Namespace, out: Screen) -> int:
    """Print what each stage of a conversion needs per device; return 0 if stage one fits, else 2."""
    from linearize.jobs.bill import memory_bill, parse_size

    if not args.dry_run or args.device_memory is None or args.devices < 1:
        raise ConfigError(
            f"device-memory: got {args.device_memory} with {args.devices} devices, expected a size and at least one "
            "device, with --dry-run"
        )
    bill = memory_bill(job, devices=args.devices, memory=parse_size(args.device_memory))
    for text in bill.lines():
        out.print(text, soft_wrap=True)
    if args.json:
        print_json(bill.to_dict())
    return 0 if bill.fits else 2


def distill(job: DistillJob, args: argparse.Namespace, out: Screen) -> object:
    """Continue stage one."""
    return _train(job, args, out, distill_checkpoint)


def align(job: AlignJob, args: argparse.Namespace, out: Screen) -> object:
    """Align with the original."""
    return _train(job, args, out, align_checkpoint)


def _train(
    job: Job,
    args: argparse.Namespace,
    out: Screen,
    run: Callable[[Job, Callback], ConvertResult],
    also: Callback = ignore,
) -> object:
    """Run a job and show its progress, or only check it (`--dry-run`); `also` gets each event after it was shown."""
    if args.dry_run:
        return show_bill(job, args, out, also)
    work: Work

    def kept() -> str:
        return f"the result is in {job.target()}" if work.saved else kept_states(job.target())

    with at_work(out, "loading the model", kept, also) as work:
        result = run(job, work)
    out.print(f"Saved {result.output} ({result.parameters_added:,} parameters added, {result.seconds:.0f} s).")
    show_findings(out, result.findings)
    return result.to_dict()


def finetune(job: TuneJob, args: argparse.Namespace, out: Screen) -> object:
    """Tune a checkpoint, and print the progress and the metrics."""
    from linearize.jobs.finetune import finetune_checkpoint
    from linearize.training.stage_two.save import MEASURED
    from linearize.training.stage_two.tasks import above_chance

    if args.dry_run:
        return show_bill(job, args, out)

    def kept() -> str:
        return f"the result is in {job.target()}" if work.saved else kept_checkpoint(job)

    with at_work(out, "loading the model and its data", kept) as work:
        target, result = finetune_checkpoint(job, work)
    chosen, early = result.selection, "" if result.stopped == "steps" else f", ended by {result.stopped}"
    step = f"Kept step {result.best_step} of {result.steps}{early}"
    if not result.best_step:
        step = f"Kept the initial weights: no measurement in {result.steps} steps{early} was better"
    # The figures of the kept state, unless they are those that were shown last.
    shown = "" if work.measured_step == result.best_step else f": {figures_of(result.metrics)}"
    out.print(f"{step}, chosen by {chosen['by']} on {chosen['rows']} {chosen['on']}{shown}")
    if not above_chance(job.task, result.score, chance=result.chance, interval=result.interval):
        out.print(f"Not above chance, which has a score of {result.chance:.4f}.")
    out.print(f"Saved {target} ({result.seconds:.0f} s).")
    assert work.findings is not None
    show_findings(out, work.findings)
    figures = {
        name: getattr(result, name) for name in (*MEASURED, "steps", "best_step", "stopped", "selection", "seconds")
    }
    return {"output": str(target), **figures, "findings": asdict(work.findings)}


def kept_checkpoint(job: TuneJob) -> str:
    """Return what an interrupted stage two left on disk, and how to resume it."""
    from linearize.training.stage_two.save import last_checkpoint

    folder = f"{job.target()}.training"
    last = last_checkpoint(folder)
    kept = "no checkpoint was written yet" if last is None else f"{last.name} is in {folder}"
    return f"{kept}; resume with the same line and --resume"


def search(job: SearchJob, args: argparse.Namespace, out: Screen) -> object:
    """Choose kernels."""
    from linearize.jobs.search import search_checkpoint

    prepare_native(args, job.device, out)
    with at_work(out, "loading the model", lambda: kept_states(job.target(), "search")) as work:
        result = search_checkpoint(job, work)
    if job.plan_out:
        out.print(f"Plan: {job.plan_out}; convert with it: linearize convert {job.model} --plan {job.plan_out}")
    if job.plot:
        out.print(f"Picture: {job.plot}")
    return {"plan": result.plan.to_dict(), **result.to_dict()}


def demo(job: DemoJob, args: argparse.Namespace, out: Screen) -> object:
    """Convert a small model, and show the speed-up."""
    from linearize.evaluation.bench.rows import mebibytes
    from linearize.jobs.demo import run_demo

    prepare_native(args, "cpu", out)

    def kept() -> str:
        return f"the converted model is in {job.output}" if work.saved else "nothing was written"

    with at_work(out, "loading the model", kept) as work:
        conversion, size, row = run_demo(job, work)
    names = {"softmax": "softmax (SDPA)", "linear": f"linear ({job.kernel})"}
    rows = [[name, f"{row.seconds(side):.2f}", mebibytes(row.memory(side))] for side, name in names.items()]
    title = f"One document of {row.tokens:,} tokens, whole model: {row.speedup:.1f} times faster"
    out.print(table(title, ["attention", "seconds", "peak memory, MiB"], rows, right=(1, 2)))
    out.print(f"The converted model is in {job.output}.")
    return {"conversion": conversion.to_dict(), "embedding_size": size, "comparison": row.side_by_side()}


def kept_states(target: str, *endings: str) -> str:
    """Return what an interrupted search, stage one or alignment left on disk (folders `<target>.<ending>`)."""
    for ending in endings or ("align", "stage1", "search"):
        folder = f"{target.rstrip('/')}.{ending}"
        states = StateFolder(folder, 1)
        if steps := states.steps():
            return f"the state of step {steps[-1]} is in {folder}; resume with the same line and --resume"
        if blocks := states.blocks():
            return f"{blocks} finished blocks are in {folder}; resume with the same line and --resume"
    return "nothing was written; --save-every N keeps a state every N steps"


def show_bill(job: AnyJob, args: argparse.Namespace, out: Screen, also: Callback = ignore) -> int:
    """Check a job and print its plan and its estimated cost; return 0 if it fits, else 2."""
    from linearize.jobs.dry_run import dry_run

    plans = []

    def on_event(event: Event) -> None:
        if isinstance(event, events.Planned):
            plans.append(event.plan)
        if not isinstance(event, events.DataOpened):
            work(event)

    with at_work(out, "checking", also=also) as work:
        bill = dry_run(job, on_event)
    for text in bill.lines():
        out.print(text, soft_wrap=True)
    if args.json:
        print_json((plans[0].to_dict() if plans else {}) | {"bill": bill.to_dict()})
    return 2 if bill.problems else 0
