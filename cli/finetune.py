"""Tune a converted (or any) checkpoint on a task and save the result; the best measured weights are kept."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from linearize.cli._dry_run import add_dry_run, show_bill
from linearize.cli._options import add_json, add_options, as_words, take_options
from linearize.errors import NotSavedError
from linearize.jobs.config import ConvertJob
from linearize.jobs.task_config import TuneJob

if TYPE_CHECKING:
    from linearize.cli._output import Report, Screen
    from linearize.finetune.trainer import TuneResult
    from linearize.jobs.events import Event
    from linearize.jobs.findings import Findings

EPILOG = """examples:
  linearize finetune bert-hedgehog --task cola --output bert-cola
  linearize finetune bert-hedgehog --task text-classification --dataset a.jsonl --columns review --label-column mood
  linearize finetune gpt2-hedgehog --task causal-lm --dataset wiki.txt --max-length 1024 --lora r=8,alpha=16
  linearize finetune bert-hedgehog --task cola --lora r=8 --keep-adapter --output bert-cola  # bert-cola/adapter: peft's
  linearize finetune llama-hedgehog --task chat --dataset chats.jsonl --max-length 4096       # column `messages`
  linearize finetune bert-hedgehog --task cola --output bert-cola --resume
  linearize finetune bert-base --task mrpc --output bert-mrpc                     # the teacher: the original, tuned
  linearize finetune bert-hedgehog --task mrpc --teacher bert-mrpc --extra-pairs 1 --epochs 10
  linearize finetune bert-hedgehog --task cola --teacher bert-cola --extra-texts more.jsonl=2,lines.txt=0.5
  linearize finetune bert-hedgehog --task cola --config mine.yaml --epochs 10                # options from a file
  linearize finetune bert-hedgehog --task cola --dry-run                                     # what it would cost
  torchrun --nproc_per_node 4 --no-python linearize finetune bert-hedgehog --task sst2                # on four GPUs
  accelerate launch --config_file fsdp.yaml --no_python linearize finetune llama-hedgehog --task chat --dataset c.jsonl

Several processes share out the rows, and one writes. Under FSDP weights, gradients, the optimizer's state and the
teacher are spread over the devices and gathered layer by layer, in fp32 (--precision bf16 is autocast, as in one
process); each process first loads the model into its host's memory, and has the tuned weights there at the end. One
process gathers and writes the states, and --resume goes on to the bit with as many processes. fsdp.yaml: see
`linearize distill --help`.

With a teacher the model follows the hidden states of every layer and the logits of the tuned original, and the labels
join half-way. The state that is kept is chosen on rows held out of the training rows, never on those reported. Rows
without a label are for the teacher alone: texts of pairs paired anew (--extra-pairs 1: one per training row), and texts
of other data sets (--extra-texts more.jsonl=2: two per training row, without those that the task has already; where the
task reads one text, both of a pair).

Low-rank updates (--lora) are merged into the weights that are saved. --keep-adapter keeps them by themselves too, with
kernels and head, in OUTPUT/adapter: peft.PeftModel.from_pretrained(MODEL, "OUTPUT/adapter") puts them on the model that
was tuned, loaded with the head of the task."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, TuneJob)
    add_dry_run(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Tune and print the metrics."""
    from linearize.cli._output import console, print_json

    job = take_options(args, TuneJob)
    if args.dry_run:
        return show_bill(job, as_json=args.json)
    out = console(to_stderr=args.json)
    result, found = tune(job, out)
    if args.json:
        print_json(
            {
                "output": str(job.target()),
                "metrics": result.metrics,
                "score": result.score,
                "steps": result.steps,
                "selection": result.selection,
                "findings": found.to_dict(),
            }
        )
    return 0


def tune_in_place(converted: ConvertJob, task: str, *, to_stderr: bool) -> None:
    """Tune a converted checkpoint with the defaults and put the result in its place."""
    from linearize.cli._output import console, on_interrupt

    model = converted.target()
    options: dict[str, object] = {
        "task": task,
        "output": model,
        "overwrite": True,
        "device": converted.device,
        "seed": converted.seed,
    }
    if converted.data.dataset is not None:
        options["dataset"] = ",".join(name for name, _ in converted.data.sources)
    words = ["finetune", model, *as_words(options)]
    again = f"linearize {' '.join(words)} --resume"
    with on_interrupt(lambda: f"the converted model lies in {model}, untuned; go on: {again}"):
        try:
            tune(TuneJob.of(model=model, **options), console(to_stderr=to_stderr))
        except NotSavedError as error:
            error.command = words
            raise


def kept_checkpoint(job: TuneJob) -> str:
    """Say what an interrupted stage two has left on disk, and the words that go on from there."""
    from linearize.finetune.checkpoints import last_checkpoint

    folder = f"{job.target()}.training"
    last = last_checkpoint(folder)
    kept = "no checkpoint was written yet" if last is None else f"{last.name} lies in {folder}"
    return f"{kept}; go on with the same line and --resume"


def tune(job: TuneJob, out: Screen) -> tuple[TuneResult, Findings]:
    """Tune, print what happens, and return the result and the findings."""
    from linearize.cli._output import Heartbeat, StepProgress, on_interrupt
    from linearize.cli._progress import show_findings
    from linearize.finetune.tasks import above_chance
    from linearize.jobs import events
    from linearize.jobs.finetune import finetune_checkpoint

    found: list[Findings] = []
    progress = StepProgress(out)
    beat = Heartbeat(out, "loading the model and its data")
    last: list[Report] = []

    def on_event(event: Event) -> None:
        match event:
            case events.Concluded(findings):
                found.append(findings)
            case events.DataOpened(description):
                out.print(f"Data: {description}", markup=False)
            case events.Noted(text):
                out.print(text, markup=False)
            case events.StepDone(report):
                last[:] = [report]
                progress(report)
                last_one = report.step == report.steps
                beat.what = "measuring the result" if last_one else f"tuning, {progress.short(report)}"
            case events.Logged(entry):
                # The line of a log says how long it has to go, as the bar does on a terminal.
                where = progress.where(last[0]) if last and last[0].step == entry["step"] else None
                out.print(log_line(entry, where), markup=False)

    try:
        with beat, on_interrupt(lambda: kept_checkpoint(job)):
            target, result = finetune_checkpoint(job, on_event)
    finally:
        progress.stop()
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    chosen = result.selection
    kept = f"Kept step {result.best_step} of {result.steps} ({result.stopped})"
    if not result.best_step:
        kept = f"Kept what it began with, as none of {result.steps} steps ({result.stopped}) measured better"
    out.print(
        f"{kept}, chosen by {chosen['by']} on {chosen['rows']} {chosen['on']}: {metrics}",
        markup=False,
    )
    if not above_chance(job.task, result.score, chance=result.chance, interval=result.interval):
        out.print(f"Not above chance, which reaches a score of {result.chance:.4f}.", markup=False)
    out.print(f"Saved {target} ({result.seconds:.0f} s).", markup=False)
    show_findings(out, found[0])
    return result, found[0]


def log_line(entry: dict[str, float], where: str | None = None) -> str:
    """Write one entry of the trainer's log; `where` says more of its place than the step."""
    shown = {key: value for key, value in entry.items() if isinstance(value, float) and "per_second" not in key}
    hidden = ("epoch", "total_flos", "eval_runtime", "train_runtime", "eval_model_preparation_time")
    figures = ", ".join(f"{key} {value:.4g}" for key, value in shown.items() if key not in hidden)
    place = where or f"step {entry['step']}/{entry['steps']}"
    return f"{place}: {figures}"
