"""Tune a converted (or any) checkpoint on a task and save the result; the best measured weights are kept."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from linearize.cli._options import add_dry_run, add_json, add_options, take_options
from linearize.cli._progress import show_bill, show_findings
from linearize.core.errors import NotSavedError
from linearize.jobs.config import ConvertJob
from linearize.jobs.task_config import TuneJob

if TYPE_CHECKING:
    from linearize.cli._output import Report, Screen
    from linearize.jobs.advice import Findings
    from linearize.jobs.events import Event
    from linearize.training.stage_two.trainer import TuneResult

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

Several processes share the rows, and one of them writes. Under FSDP weights, gradients, the optimizer's state and the
teacher are spread over the devices and gathered layer by layer, in fp32 (--precision bf16 is autocast, as in one
process); each process first loads the model into its host's memory, and has the tuned weights there at the end. One
process gathers and writes the states, and --resume continues exactly with as many processes. For fsdp.yaml see
`linearize distill --help`.

With a teacher the model follows the hidden states of every layer and the logits of the tuned original, and the labels
join half-way. The kept state is chosen on rows held out of the training rows, never on the reported ones. Rows without
a label are for the teacher alone: new pairs of the task's texts (--extra-pairs 1: one per training row), and texts of
other data sets (--extra-texts more.jsonl=2: two per training row, without those that the task already has; both texts
of a pair if the task reads one text).

Low-rank updates (--lora) are merged into the saved weights. --keep-adapter also saves them separately, with kernels and
head, in OUTPUT/adapter: peft.PeftModel.from_pretrained(MODEL, "OUTPUT/adapter") puts them on the model that was tuned,
loaded with the head of the task."""


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
    result, findings = tune(job, console(to_stderr=args.json))
    if args.json:
        names = ("metrics", "score", "steps", "selection")
        figures = {name: getattr(result, name) for name in names}
        print_json({"output": str(job.target()), **figures, "findings": findings.to_dict()})
    return 0


def tune_in_place(converted: ConvertJob, task: str, *, to_stderr: bool) -> None:
    """Tune a converted checkpoint with the defaults and put the result in its place."""
    import shlex

    from linearize.cli._output import console, on_interrupt
    from linearize.jobs.command import line

    model = converted.target()
    datasets = ",".join(name for name, _ in converted.data.sources)
    options: dict[str, object] = {
        "task": task,
        "output": model,
        "overwrite": True,
        "device": converted.device,
        "seed": converted.seed,
        **({"dataset": datasets} if datasets else {}),
    }
    again = line("finetune", model, options)
    with on_interrupt(lambda: f"the converted model is in {model}, untuned; continue with: {again} --resume"):
        try:
            tune(TuneJob.of(model=model, **options), console(to_stderr=to_stderr))
        except NotSavedError as error:
            error.command = shlex.split(again)[1:]
            raise


def kept_checkpoint(job: TuneJob) -> str:
    """Say what an interrupted stage two left on disk, and how to resume it."""
    from linearize.training.stage_two.save import last_checkpoint

    folder = f"{job.target()}.training"
    last = last_checkpoint(folder)
    kept = "no checkpoint was written yet" if last is None else f"{last.name} is in {folder}"
    return f"{kept}; resume with the same line and --resume"


def tune(job: TuneJob, out: Screen) -> tuple[TuneResult, Findings]:
    """Tune, print what happens, and return the result and the findings."""
    from linearize.cli._output import at_work
    from linearize.jobs import events
    from linearize.jobs.finetune import finetune_checkpoint
    from linearize.training.stage_two.tasks import above_chance

    findings: list[Findings] = []
    last: list[Report] = []

    def on_event(event: Event) -> None:
        match event:
            case events.Concluded(conclusion):
                findings.append(conclusion)
            case events.DataOpened(description):
                out.print(f"Data: {description}")
            case events.Noted(text):
                out.print(text)
            case events.StepDone(report):
                last[:] = [report]
                progress(report)
                finished = report.step == report.steps
                beat.what = "measuring the result" if finished else f"tuning, {progress.short(report)}"
            case events.Logged(entry):
                # A line of a log also says how much time is left, as the bar does on a terminal.
                where = progress.where(last[0]) if last and last[0].step == entry["step"] else None
                out.print(log_line(entry, where))

    with at_work(out, "loading the model and its data", lambda: kept_checkpoint(job)) as (progress, beat):
        target, result = finetune_checkpoint(job, on_event)
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    chosen = result.selection
    kept = f"Kept step {result.best_step} of {result.steps} ({result.stopped})"
    if not result.best_step:
        kept = f"Kept the start, as none of {result.steps} steps ({result.stopped}) measured better"
    out.print(f"{kept}, chosen by {chosen['by']} on {chosen['rows']} {chosen['on']}: {metrics}")
    if not above_chance(job.task, result.score, chance=result.chance, interval=result.interval):
        out.print(f"Not above chance, which reaches a score of {result.chance:.4f}.")
    out.print(f"Saved {target} ({result.seconds:.0f} s).")
    show_findings(out, findings[0])
    return result, findings[0]


HIDDEN = ("epoch", "total_flos", "eval_runtime", "train_runtime", "eval_model_preparation_time")


def log_line(entry: dict[str, float], where: str | None = None) -> str:
    """Write one entry of the trainer's log; `where` replaces its step."""
    shown = {name: value for name, value in entry.items() if isinstance(value, float) and "per_second" not in name}
    figures = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if name not in HIDDEN)
    where = where or f"step {entry['step']}/{entry['steps']}"
    return f"{where}: {figures}"
