"""Run `evaluate`, `longdoc`, `report` and `compare`: measure checkpoints, on a task or against softmax."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import RenderableType

from linearize.cli._output import Screen, fidelity_table, number, shown, table
from linearize.cli._progress import as_lines, at_work
from linearize.evaluation.bench.rows import mebibytes
from linearize.evaluation.options import CompareOptions, ReportOptions
from linearize.evaluation.report.compare import NUMBERS, write_comparison
from linearize.evaluation.report.gather import answer
from linearize.evaluation.report.page import PAGE, write_report
from linearize.jobs import events
from linearize.jobs.evaluate import Evaluation, SideResult, Times, evaluate_checkpoint
from linearize.jobs.events import Event
from linearize.jobs.task_config import EvaluateJob, LongdocJob
from linearize.training.stage_two.tasks import Task, several_labels

FEW = 60
"""With fewer rows, intervals of skewed figures are noticeably too narrow."""
HARTIGAN = "89 % (8 inputs) to 93 % (60)"
"""What the intervals of `linearize.evaluation.report.paired.mean_difference` cover."""


def print_few(out: Screen, count: int, covers: str = "83 % (8 rows) to 93 % (60)") -> None:
    """Say how far an interval over a few rows can be trusted; `covers` is measured on exponential figures."""
    if count < FEW:
        skewed = f"too narrow for skewed figures: of exponential ones it covers {covers}"
        out.print(f"A 95 % interval over {count} rows is {skewed}.")


def evaluate(job: EvaluateJob, args: argparse.Namespace, out: Screen) -> object:
    """Measure and print the results."""
    with at_work(out, "reading the data") as work:
        result = evaluate_checkpoint(job, work)
    out.print(f"Data: {result.data}")
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.facts.items())
    title = f"{job.model} on {job.task.name}{f' ({facts})' if facts else ''}"
    out.print(sides_table(title, result.sides, job.task, result.times, chance=result.chance))
    print_positions(out, result)
    times = [] if result.times is None else [result.times.text]
    for line in [*result.notes, *(one.sentence for one in result.differences), *times]:
        out.print(line)
    print_few(out, int(result.facts.get("questions") or result.facts["rows"]))
    if result.recovered is not None:
        above = "" if result.chance is None else " above chance"
        out.print(f"{result.recovered:.1f} % of the original's score{above} is recovered.")
    return asdict(result)


def longdoc(job: LongdocJob, args: argparse.Namespace, out: Screen) -> object:
    """Run all steps and print the comparison."""
    from linearize.jobs.longdoc import run_longdoc, work_folder

    folder = work_folder(job.target())

    def kept() -> str:
        if not folder.exists():
            return "nothing was written"
        return f"finished steps are in {folder}; continue with the same line and --resume"

    def announce(event: Event) -> None:
        if isinstance(event, events.Started):
            what = event.what[0].upper() + event.what[1:]
            out.print(what, style="bold" if event.what.startswith("step") else None)

    with at_work(out, "inspecting model and data", kept, announce) as work:
        result = run_longdoc(job, work)
    title = f"{job.model} on {result.task}: {result.rows:,} rows, the longest of {result.longest_row:,} tokens"
    out.print(sides_table(title, result.sides, job.task, result.times, chance=result.chance))
    for line in [*(one.sentence for one in result.differences), *result.notes, result.times.text]:
        out.print(line)
    print_few(out, result.rows)
    out.print(result.verdict, style="bold")
    files = "original/, linear/, results.json and times.json"
    out.print(f"Saved {result.output} ({result.seconds:.0f} s): {files}.")
    return asdict(result)


def print_positions(out: Screen, result: Evaluation) -> None:
    """Print the loss by position, if there is more than one range of positions."""
    by_side = [{loss.first: loss for loss in side.by_position} for side in result.sides]
    firsts = sorted(set().union(*by_side))
    if len(firsts) < 2:
        return
    rows = []
    for first in firsts:
        cells = [losses.get(first) for losses in by_side]
        last = max(loss.last for loss in cells if loss is not None)
        rows.append([f"{first:,} to {last:,}", *("-" if loss is None else f"{loss.nll:.4f}" for loss in cells)])
    columns = ["tokens before", *(side.name for side in result.sides)]
    title = "Loss by number of preceding tokens (nats per token)"
    out.print(table(title, columns, rows, right=tuple(range(1, len(columns)))))


def sides_table(
    title: str, sides: Sequence[SideResult], task: Task, times: Times | None, *, chance: float | None = None
) -> RenderableType:
    """Build the table of a comparison, one row per side."""
    if not {*task.score} <= {*sides[0].metrics}:
        task = several_labels(task)
    more = [name for name in sides[0].metrics if (name,) != task.score and name != "tokens"]
    costs = {} if times is None else {one.name: one for one in times.sides}
    memory = any(one.peak_bytes is not None for one in costs.values())
    score, *names = (text.replace("_", " ") for text in (", ".join(task.score), *more))
    columns = ["side", "length", "rows cut", f"score ({score})", "95 % interval", *names]
    columns += ["s per row" if times is None or not times.noisy else "s per row (noisy)"] if costs else []
    columns += ["peak MiB"] if memory else []
    rows = []
    for side in sides:
        length = shown(side.max_length, "{:,}")
        cut = "-" if side.cut_share is None else f"{100 * side.cut_share:.1f} %"
        figures = [number(side.metrics.get(name), 4) for name in more]
        interval = "-" if side.interval is None else " to ".join(map(task.written, side.interval))
        row = [side.name, length, cut, task.written(side.score), interval, *figures]
        cost = costs.get(side.name)
        # A side without a part of its attention is measured, but not timed.
        if costs:
            row.append("-" if cost is None else f"{cost.seconds:.3g}")
        if memory:
            row.append(mebibytes(None if cost is None else cost.peak_bytes))
        rows.append(row)
    if chance is not None:
        rows.append(["chance", "", "", task.written(chance), *[""] * (len(columns) - 4)])
    return table(title, columns, rows, right=tuple(range(1, len(columns))))


def report(options: ReportOptions, args: argparse.Namespace, out: Screen) -> object:
    """Write the report and print its fidelity table."""
    found = write_report(options, args.output, overwrite=args.overwrite, on_event=as_lines(out))
    out.print(answer(found))
    out.print(fidelity_table(f"Kernel against softmax ({found.inputs})", found.fidelity))
    for line in (*found.notes, *(f"Left out: {what}" for what in found.left_out)):
        out.print(line)
    out.print(f"Open {args.output.rstrip('/')}/{PAGE}")
    return found.to_dict() | {"output": args.output}


def compare(options: CompareOptions, args: argparse.Namespace, out: Screen) -> object:
    """Compare the checkpoints, print the table, and write the numbers."""
    compared = write_comparison(options, args.output, overwrite=args.overwrite, on_event=as_lines(out))
    figures = ("kl", "total_variation", "negative_share", "output_error", "cosine", "seconds", "speedup")
    rows = [
        [c.name, c.kernels, f"{c.parameters_added:,}", *(number(getattr(c, f)) for f in figures)]
        for c in compared.conversions
    ]
    columns = ["name", "kernels", "added", "KL", "TV", "negative", "error", "cosine", "seconds", "x softmax"]
    if compared.noisy:
        columns[-2:] = [f"{name} (noisy)" for name in columns[-2:]]
    at = f"; timed at {compared.timed_at}" if compared.timed_at else ""
    out.print(table(f"On {compared.inputs}{at}", columns, rows, right=tuple(range(2, 10))))
    for line in (*compared.verdicts, *compared.notes):
        out.print(line)
    print_few(out, min((len(x) for c in compared.conversions for x in c.per_input.values()), default=FEW), HARTIGAN)
    out.print(f"Numbers: {args.output.rstrip('/')}/{NUMBERS}")
    return asdict(compared) | {"output": args.output}
