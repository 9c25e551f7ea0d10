"""Measure a checkpoint on a task; with --compare also its original, at its own length and in chunks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from linearize.cli._options import add_json, add_options, take_options
from linearize.jobs.task_config import EvaluateJob

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from linearize.jobs.evaluate import Evaluation
    from linearize.jobs.events import Event
    from linearize.jobs.sides import SideResult, Times
    from linearize.training.stage_two.tasks import Task

EPILOG = """examples:
  linearize evaluate bert-cola-linear --task cola --compare bert-cola
  linearize evaluate bert-long --task text-classification --dataset reviews.jsonl --compare bert-tuned --memory
  linearize evaluate gpt2-hedgehog --task causal-lm --dataset wiki.txt --max-length 1024 --stride 512 --compare gpt2
  linearize evaluate gpt2-window --task causal-lm --dataset wiki.txt --ablate kernel,window
  linearize evaluate vit-linear --task image-classification --dataset ./photos --json

Each side reads as many tokens of a row as it takes (or was tuned with). Rows that the original has to cut are also read
as chunks of that length, whose logits (of `similarity`: embeddings) are averaged. Differences are taken on the same
rows, with a paired bootstrap interval; if 0 is in it, the difference is within the noise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, EvaluateJob)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from linearize.cli._output import Heartbeat, console, print_json
    from linearize.jobs import events
    from linearize.jobs.evaluate import evaluate_checkpoint

    job = take_options(args, EvaluateJob)
    out = console(to_stderr=args.json)
    beat = Heartbeat(out, "reading the data")

    def on_event(event: Event) -> None:
        if isinstance(event, events.Started):
            beat.what = event.what

    with beat:
        result = evaluate_checkpoint(job, on_event)
    if args.json:
        print_json(asdict(result))
        return 0
    out.print(f"Data: {result.data}")
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.facts.items())
    title = f"{job.model} on {job.task.name}{f' ({facts})' if facts else ''}"
    print_alone(out, title, result, job.task) if len(result.sides) == 1 else print_compared(
        out, title, result, job.task
    )
    return 0


def print_alone(out: Console, title: str, result: Evaluation, task: Task) -> None:
    """Print what one model reaches."""
    from linearize.cli._output import number, table

    rows = [[name, number(value, 4)] for name, value in result.figures.items()]
    rows.append([f"score ({', '.join(task.score)})", percent(result.score, task)])
    rows.append(["95 % interval", between(result.interval, task)])
    if result.chance is not None:
        rows.append(["chance", percent(result.chance, task)])
    out.print(table(title, ["metric", "this model"], rows, right=(1,)))
    print_positions(out, result)
    for line in result.notes:
        out.print(line)


def print_compared(out: Console, title: str, result: Evaluation, task: Task) -> None:
    """Print a model and its original, and what the differences are worth."""
    out.print(sides_table(title, result.sides, task, result.times, chance=result.chance))
    print_positions(out, result)
    times = [] if result.times is None else [result.times.text]
    for line in [*result.notes, *(one.sentence for one in result.differences), *times]:
        out.print(line)
    if result.recovered is not None:
        above = "" if result.chance is None else " above chance"
        out.print(f"{result.recovered:.1f} % of the original's score{above} is recovered.")


def print_positions(out: Console, result: Evaluation) -> None:
    """Print the loss by position, where there is more than one range of them."""
    from linearize.cli._output import table

    by_side = [{one.first: one for one in side.by_position} for side in result.sides]
    firsts = sorted(set().union(*by_side))
    if len(firsts) < 2:
        return
    rows = []
    for first in firsts:
        there = [losses.get(first) for losses in by_side]
        last = max(one.last for one in there if one is not None)
        rows.append([f"{first:,} to {last:,}", *("-" if one is None else f"{one.nll:.4f}" for one in there)])
    columns = ["tokens before", *(side.name for side in result.sides)]
    title = "Loss by how many tokens stand before (nats per token)"
    out.print(table(title, columns, rows, right=tuple(range(1, len(columns)))))


def sides_table(
    title: str, sides: Sequence[SideResult], task: Task, times: Times | None, *, chance: float | None = None
) -> RenderableType:
    """Build the table of a comparison, one row per side."""
    from linearize.cli._output import number, table

    more = [name for name in sides[0].metrics if (name,) != task.score and name != "tokens"]
    costs = {} if times is None else {one.name: one for one in times.sides}
    memory = any(one.peak_bytes is not None for one in costs.values())
    columns = ["side", "length", "rows cut", f"score ({', '.join(task.score)})", "95 % interval", *more]
    columns += ["s per row" if times is None or not times.noisy else "s per row (noisy)"] if costs else []
    columns += ["peak MiB"] if memory else []
    rows = []
    for side in sides:
        length = "-" if side.max_length is None else f"{side.max_length:,}"
        cut = "-" if side.cut_share is None else f"{100 * side.cut_share:.1f} %"
        figures = [number(side.metrics.get(name), 4) for name in more]
        row = [side.name, length, cut, percent(side.score, task), between(side.interval, task), *figures]
        cost = costs.get(side.name)
        if cost is not None:
            row.append(f"{cost.seconds:.3g}")
            if memory:
                row.append("-" if cost.peak_bytes is None else f"{cost.peak_bytes / 2**20:,.0f}")
        rows.append(row)
    if chance is not None:
        rows.append(["chance", "", "", percent(chance, task), *[""] * (len(columns) - 4)])
    return table(title, columns, rows, right=tuple(range(1, len(columns))))


def between(interval: tuple[float, float] | None, task: Task) -> str:
    """Write an interval."""
    return "-" if interval is None else " to ".join(percent(end, task) for end in interval)


def percent(score: float, task: Task) -> str:
    """Write a score as papers do: shares as points."""
    return f"{100 * score:.2f}" if task.percent else f"{score:.3f}"
