"""Align a converted checkpoint with its original: hidden states, pooled output and logits, on unlabelled data."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from linearize.cli._dry_run import add_dry_run, show_bill
from linearize.cli._options import add_json, add_options, take_options
from linearize.jobs.config import AlignJob

if TYPE_CHECKING:
    from linearize.jobs.events import Event

EPILOG = """examples:
  linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --text-column text
  linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --steps 2000 --save-every 200   # then with --resume
  linearize align ./bert-cola-hedgehog --teacher ./bert-cola --dataset cola.jsonl.gz              # a tuned original
  linearize align ./bert-hedgehog --dataset mrpc.jsonl.gz --text-column sentence1,sentence2 --extra-pairs 0.5
  linearize align ./vit-hedgehog --dataset ./photos --train kernels
  linearize align ./roberta-base-hedgehog --config mine.yaml --steps 2000                         # options from a file
  linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --dry-run                       # what it would cost

First each block learns to give what the original's block gives on the original's inputs (--blockwise), then the whole
model. The teacher is the checkpoint's own softmax as long as its weights are the original's; afterwards --teacher says
what it is. Labels are not used. `linearize convert` does this by itself after stage one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, AlignJob)
    add_dry_run(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Align."""
    from linearize.cli._output import StepProgress, closeness_table, console, on_interrupt, print_json
    from linearize.cli._progress import kept_states, show_findings
    from linearize.jobs import events
    from linearize.jobs.align import align_checkpoint

    job = take_options(args, AlignJob)
    if args.dry_run:
        return show_bill(job, as_json=args.json)
    out = console(to_stderr=args.json)
    progress = StepProgress(out)

    def on_event(event: Event) -> None:
        match event:
            case events.DataOpened(description):
                out.print(f"The alignment learns from: {description}", markup=False)
            case events.StepDone(report):
                progress(report)
            case events.Aligned(result):
                progress.stop()
                out.print(closeness_table(result))

    try:
        with on_interrupt(lambda: kept_states(job.target(), "align")):
            saved = align_checkpoint(job, on_event)
    finally:
        progress.stop()
    out.print(f"Saved {saved.output} ({saved.seconds:.0f} s).", markup=False)
    show_findings(out, saved.findings)
    if args.json:
        print_json(saved.to_dict())
    return 0
