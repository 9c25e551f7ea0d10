"""Long documents from end to end: tune a model, convert it for longer inputs, tune that alike, and compare them."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from linearize.cli._options import add_dry_run, add_json, add_options, take_options
from linearize.cli._progress import show_bill
from linearize.jobs.longdoc_config import LongdocJob

if TYPE_CHECKING:
    from rich.console import Console

    from linearize.cli._output import Heartbeat, StepProgress
    from linearize.jobs.events import Event
    from linearize.jobs.longdoc import LongdocResult

EPILOG = """examples:
  linearize longdoc bert-base-uncased --task text-classification --dataset ./reviews --max-length 8192
  linearize longdoc bert-base-uncased --task text-classification --dataset ./reviews --quick      # a taste
  linearize longdoc bert-base-uncased --task text-classification --dataset ./reviews --max-length 8192 --dry-run
  linearize longdoc bert-base-uncased --task text-classification --dataset ./reviews --max-length 8192 --resume
  linearize longdoc ./my-bert --task text-classification --dataset cases.jsonl --max-length 4096 --align-length 2048
  linearize longdoc ./my-bert --task text-classification --dataset cases.jsonl --preset encoder --positions interpolate
  linearize longdoc roberta-base --task text-regression --dataset ./essays --max-length 2048 --chunk-length 256

The original is tuned at its own length (512, say), cut there. It is then converted for --max-length tokens, aligned on
long rows, where positions after its old end are learned, and tuned with the same options on whole documents. Both are
measured on the same rows: the original cut, the original in chunks whose logits are averaged, the linear model cut
alike, the linear model on whole documents. The output holds original/, linear/, results.json, and times.json with all
that depends on the machine. Ctrl-C loses nothing: the same line and --resume continue at the step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, LongdocJob)
    add_dry_run(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run all steps and print the comparison."""
    from linearize.cli._output import Heartbeat, StepProgress, console, on_interrupt, print_json
    from linearize.jobs.longdoc import run_longdoc

    job = take_options(args, LongdocJob)
    if args.dry_run:
        return show_bill(job, as_json=args.json)
    out = console(to_stderr=args.json)
    progress = StepProgress(out)
    beat = Heartbeat(out, "looking at model and data")
    try:
        with beat, on_interrupt(lambda: kept(job)):
            result = run_longdoc(job, lambda event: show(event, out, progress, beat))
    finally:
        progress.stop()
    if args.json:
        print_json(asdict(result))
        return 0
    print_result(out, job, result)
    return 0


def kept(job: LongdocJob) -> str:
    """Say what an interrupted run left on the disk."""
    from linearize.jobs.longdoc_data import work_folder

    work = work_folder(job.target())
    if not work.exists():
        return "nothing was written"
    return f"finished steps are in {work}; continue with the same line and --resume"


def show(event: Event, out: Console, progress: StepProgress, beat: Heartbeat) -> None:
    """Show an event of any step."""
    from linearize.cli._progress import show_training, summary_of
    from linearize.cli.finetune import log_line
    from linearize.jobs import events

    match event:
        case events.Started(what):
            progress.stop()
            beat.what = what
            out.print(what[0].upper() + what[1:], markup=False, style="bold" if what.startswith("step") else None)
        case events.DataOpened(description):
            out.print(f"Data: {description}", markup=False)
        case events.PositionsExtended(report):
            out.print(f"Inputs: {report.note}", markup=False)
        case events.Distilled(result):
            progress.stop()
            out.print(summary_of(result), markup=False)
        case events.Logged(entry):
            line = log_line(entry)
            beat.what = f"tuning, {line}"
            out.print(line, markup=False)
        case _:
            show_training(event, out, progress, beat)


def print_result(out: Console, job: LongdocJob, result: LongdocResult) -> None:
    """Print the comparison and its verdict."""
    from linearize.cli.evaluate import sides_table

    title = f"{job.model} on {result.task}: {result.rows:,} rows, the longest of {result.longest_row:,} tokens"
    out.print(sides_table(title, result.sides, job.task, result.times, chance=result.chance))
    for line in [*(one.sentence for one in result.differences), *result.notes, result.times.text]:
        out.print(line, markup=False)
    out.print(result.verdict, markup=False, style="bold")
    files = "original/, linear/, results.json and times.json"
    out.print(f"Saved {result.output} ({result.seconds:.0f} s): {files}.", markup=False)
