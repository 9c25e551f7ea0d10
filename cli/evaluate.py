"""Measure a checkpoint on a task; with --compare also the original, and the share of its score that is recovered."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from linearize.cli._options import add_json, add_options, take_options
from linearize.jobs.config import EvaluateJob

EPILOG = """examples:
  linearize evaluate bert-cola-linear --task cola --compare bert-cola
  linearize evaluate gpt2-hedgehog --task causal-lm --dataset wiki.txt --max-length 1024 --stride 512 --compare gpt2
  linearize evaluate vit-linear --task image-classification --dataset ./photos --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, EvaluateJob)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from linearize.cli._output import console, number, print_json, table
    from linearize.jobs.evaluate import evaluate_checkpoint

    job = take_options(args, EvaluateJob)
    task = job.task
    found = evaluate_checkpoint(job)
    if args.json:
        print_json(asdict(found))
        return 0
    out = console()
    out.print(f"Data: {found.data}", markup=False)
    original = found.original or {}
    rows = [[name, number(value, 4), number(original.get(name), 4)] for name, value in found.figures.items()]
    compared = "-" if found.original_score is None else percent(found.original_score, task)
    rows.append([f"score ({', '.join(task.score)})", percent(found.score, task), compared])
    rows.append(["95 % interval", between(found.interval, task), between(found.original_interval, task)])
    if found.chance is not None:
        rows.append(["chance", percent(found.chance, task), ""])
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.facts.items())
    title = f"{job.model} on {task.name}{f' ({facts})' if facts else ''}"
    out.print(table(title, ["metric", "this model", "original"], rows, right=(1, 2)))
    if found.recovered is not None:
        above = "" if found.chance is None else " above chance"
        out.print(f"{found.recovered:.1f} % of the original's score{above} is recovered.", markup=False)
    elif found.original_score is not None:
        out.print("The original is not above chance, so no share of it is recovered.", markup=False)
    return 0


def between(interval: tuple[float, float] | None, task: Any) -> str:
    """Write an interval."""
    return "-" if interval is None else " to ".join(percent(end, task) for end in interval)


def percent(score: float, task: Any) -> str:
    """Write a score as papers do: shares as points."""
    return f"{100 * score:.2f}" if task.percent else f"{score:.3f}"
