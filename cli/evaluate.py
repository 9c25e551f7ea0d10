"""Measure a checkpoint on a task; with --compare also the original, and the share of its score that is recovered."""

from __future__ import annotations

import argparse
from dataclasses import asdict

EPILOG = """examples:
  linearize evaluate bert-cola-linear --task cola --compare bert-cola
  linearize evaluate gpt2-hedgehog --task causal-lm --dataset wiki.txt --max-length 1024 --stride 512 --compare gpt2
  linearize evaluate vit-linear --task image-classification --dataset ./photos --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from linearize.cli._tasks import add_task_arguments

    parser.add_argument("model", metavar="DIR_OR_MODEL", help="checkpoint with a trained head; folder or Hub name")
    add_task_arguments(parser)
    parser.add_argument("--compare", metavar="ORIGINAL", help="the softmax model that it was made of")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from linearize.cli._output import console, number, print_json, table
    from linearize.cli._tasks import percent, rows_from, task_from
    from linearize.finetune.job import evaluate_checkpoint

    task = task_from(args)
    found = evaluate_checkpoint(
        args.model,
        task,
        dataset=args.dataset,
        compare=args.compare,
        options=rows_from(args),
        batch_size=args.batch_size,
        device=args.device,
    )
    if args.json:
        print_json(asdict(found))
        return 0
    out = console()
    out.print(f"Data: {found.data}", markup=False)
    original = found.original or {}
    rows = [[name, number(value, 4), number(original.get(name), 4)] for name, value in found.figures.items()]
    compared = "-" if found.original_score is None else percent(found.original_score, task)
    rows.append([f"score ({', '.join(task.score)})", percent(found.score, task), compared])
    facts = ", ".join(f"{name} {value}" for name, value in found.facts.items())
    title = f"{args.model} on {task.name}{f' ({facts})' if facts else ''}"
    out.print(table(title, ["metric", "this model", "original"], rows, right=(1, 2)))
    if found.recovered is not None:
        out.print(f"{found.recovered:.1f} % of the original's score is recovered.", markup=False)
    return 0
