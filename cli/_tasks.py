"""Options that finetune and evaluate share: which task, on which data."""

from __future__ import annotations

import argparse
from typing import Any


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    add = parser.add_argument
    add("--task", required=True, metavar="T", help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, text-classification, "
        "text-regression, masked-lm, causal-lm, image-classification, cifar10, token-classification, "
        "question-answering")  # fmt: skip
    add("--dataset", metavar="NAME_OR_PATH", help="Hub data set, file, folder, or folder with one folder per task")
    add("--columns", metavar="A[,B]", help="columns of the text, or of the two texts")
    add("--label-column", metavar="C", help="column of the label")
    add("--labels", metavar="A,B,...", help="class names in the order of their numbers")
    add("--split", metavar="NAME", help="split to measure on (validation, or else test, or else held-out rows)")
    add("--max-length", type=int, metavar="N", help="tokens per row; longer texts are cut (128, or what it takes)")
    add("--stride", type=int, metavar="N", help="new tokens per window, for perplexity and long answers (all but one)")
    add("--limit", type=int, metavar="N", help="only the first N training rows")
    add("--batch-size", type=int, default=32, metavar="B", help="rows per step (32)")
    add("--device", default="auto", metavar="D", help="cpu, cuda, cuda:1, mps or auto (auto)")
    add("--json", action="store_true", help="print the result as JSON on stdout")


def task_from(args: argparse.Namespace) -> Any:
    """Build the task that was asked for."""
    from linearize.finetune.tasks import task

    return task(
        args.task,
        columns=tuple(args.columns.split(",")) if args.columns else (),
        label=args.label_column,
        labels=tuple(args.labels.split(",")) if args.labels else (),
        validation=args.split,
    )


def rows_from(args: argparse.Namespace, **more: Any) -> Any:
    """Build the options of the rows."""
    from linearize.finetune.load import usual_length
    from linearize.finetune.prepared import DataOptions

    length = args.max_length or usual_length(args.model)
    return DataOptions(max_length=length, stride=args.stride, limit=args.limit, **more)


def percent(score: float, task: Any) -> str:
    """Write a score as papers do: shares as points."""
    return f"{100 * score:.2f}" if task.percent else f"{score:.3f}"
