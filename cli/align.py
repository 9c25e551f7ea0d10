"""Align a converted checkpoint with its original: hidden states, pooled output and logits, on unlabelled data."""

from __future__ import annotations

import argparse

from linearize.cli._options import add_dry_run, add_json, add_options, take_options
from linearize.cli._progress import show_bill, show_result, shown
from linearize.jobs.config import AlignJob

EPILOG = """examples:
  linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --text-column text
  linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --steps 2000 --save-every 200   # then with --resume
  linearize align ./bert-cola-hedgehog --teacher ./bert-cola --dataset cola.jsonl.gz              # a tuned original
  linearize align ./bert-hedgehog --dataset mrpc.jsonl.gz --text-column sentence1,sentence2 --extra-pairs 0.5
  linearize align ./vit-hedgehog --dataset ./photos --train kernels
  linearize align ./roberta-base-hedgehog --config mine.yaml --steps 2000                         # options from a file
  linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --dry-run                       # what it would cost

First each block learns to return what the original's block returns on the original's inputs (--blockwise), then the
whole model learns. The teacher is the checkpoint's own softmax as long as its weights are the original's; otherwise
name it with --teacher. Labels are not used. `linearize convert` aligns automatically after stage one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, AlignJob)
    add_dry_run(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Align."""
    from linearize.cli._output import console
    from linearize.jobs.align import align_checkpoint

    job = take_options(args, AlignJob)
    if args.dry_run:
        return show_bill(job, as_json=args.json)
    out = console(to_stderr=args.json)
    with shown(out, job.target(), learns="The alignment learns from") as on_event:
        result = align_checkpoint(job, on_event)
    show_result(out, result, as_json=args.json)
    return 0
