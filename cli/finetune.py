"""Tune a converted (or any) checkpoint on a task and save the result; the best measured weights are kept."""

from __future__ import annotations

import argparse
from typing import Any

from linearize.errors import NotSavedError

EPILOG = """examples:
  linearize finetune bert-hedgehog --task cola --output bert-cola
  linearize finetune bert-hedgehog --task text-classification --dataset a.jsonl --columns review --label-column mood
  linearize finetune gpt2-hedgehog --task causal-lm --dataset wiki.txt --max-length 1024 --lora r=8,alpha=16
  linearize finetune bert-hedgehog --task cola --output bert-cola --resume
  linearize finetune bert-base --task mrpc --output bert-mrpc                     # the teacher: the original, tuned
  linearize finetune bert-hedgehog --task mrpc --teacher bert-mrpc --extra-pairs 1 --epochs 10

With a teacher the model follows the hidden states of every layer and the logits of the tuned original, and the labels
join half-way. The state that is kept is chosen on rows held out of the training rows, never on those reported."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from linearize.cli._tasks import add_task_arguments

    add = parser.add_argument
    add("model", metavar="DIR", help="converted checkpoint, or any of transformers; folder or Hub name")
    add_task_arguments(parser)
    add("--output", metavar="DIR", help="folder to make (<model>-<task>)")
    add("--overwrite", action="store_true", help="replace the folder, if linearize wrote it and it holds nothing else")
    add("--resume", action="store_true", help="go on with an interrupted run of the same output")
    add("--new-head", action="store_true", help="replace a trained head with another number of labels")
    add("--lora", metavar="r=8,alpha=16", help="low-rank updates of the attention's linear maps, merged when saved")
    add("--teacher", metavar="DIR", help="the softmax original tuned for the same task, which guides the model")
    add("--teacher-hidden-weight", type=float, default=1.0, metavar="W", help="of the error of hidden states (1)")
    add("--teacher-logits-weight", type=float, default=1.0, metavar="W", help="of the divergence of logits (1)")
    add("--temperature", type=float, default=1.0, metavar="T", help="of the softmaxes of that divergence (1)")
    add("--labels-from", type=float, default=0.5, metavar="S", help="share of the steps before labels join (0.5)")
    add("--labels-weight", type=float, default=1.0, metavar="W", help="weight of the labels then; 0: never (1)")
    add("--extra-pairs", type=float, default=0.0, metavar="N", help="pairs made anew per training row, labelled by the "
        "teacher alone; half of them share words (0)")  # fmt: skip
    add("--selection-rows", type=int, metavar="N", help="rows held out of training to choose the kept state on "
        "(5 %%, from 32 to 500); 0: choose on the validation rows")  # fmt: skip
    add("--learning-rate", type=float, default=2e-5, metavar="R", help="peak learning rate (2e-5)")
    add("--kernel-learning-rate", type=float, metavar="R", help="of the kernels (3e-4 with a teacher, else the same)")
    add("--epochs", type=float, default=3.0, metavar="N", help="passes over the training rows (3)")
    add("--steps", type=int, metavar="N", help="optimizer steps, instead of epochs")
    add("--weight-decay", type=float, default=0.0, metavar="W", help="AdamW's weight decay (0)")
    add("--warmup", type=float, default=0.06, metavar="S", help="share of the steps in which the rate rises (0.06)")
    add("--schedule", default="cosine", metavar="S", help="how the rate falls: cosine, linear ... (cosine)")
    add("--eval-every", type=int, metavar="N", help="steps between measurements (once per epoch)")
    add(
        "--patience",
        type=int,
        default=0,
        metavar="N",
        help="measurements without gain after which to stop; 0: never (0)",
    )
    add("--precision", default="no", metavar="P", help="mixed precision: no, bf16 or fp16 (no)")
    add("--report-to", default="none", metavar="R", help="none, tensorboard (OUTPUT.tensorboard), wandb ... (none)")
    add("--seed", type=int, default=0, metavar="S", help="of the order of the rows, dropout and a new head (0)")


def job_from(args: argparse.Namespace) -> Any:
    """Turn parsed arguments into a `TuneJob`.

    Raises:
        ConfigError: for values that are not allowed.
    """
    from linearize.adapters import parse_lora
    from linearize.cli._tasks import rows_from, task_from
    from linearize.finetune.config import TuneConfig
    from linearize.finetune.job import TuneJob

    names = ("learning_rate", "batch_size", "epochs", "steps", "weight_decay", "warmup", "schedule", "eval_every")
    names += ("patience", "precision", "report_to", "seed", "kernel_learning_rate", "teacher_hidden_weight")
    names += ("teacher_logits_weight", "temperature", "labels_from", "labels_weight", "selection_rows")
    given = {name: getattr(args, name) for name in names}
    tune = TuneConfig(**given, lora=parse_lora(args.lora) if args.lora else None)
    same = {name: getattr(args, name) for name in ("model", "dataset", "output", "overwrite", "resume", "new_head")}
    rows = rows_from(args, seed=args.seed, extra_pairs=args.extra_pairs)
    return TuneJob(task=task_from(args), device=args.device, teacher=args.teacher, data=rows, tune=tune, **same)


def run(args: argparse.Namespace) -> int:
    """Tune and print the metrics."""
    from linearize.cli._output import console, print_json

    job = job_from(args)
    out = console(to_stderr=args.json)
    result = tune(job, out)
    if args.json:
        print_json(
            {
                "output": str(job.target()),
                "metrics": result.figures,
                "score": result.score,
                "steps": result.steps,
                "selection": result.selection,
            }
        )
    return 0


def tune_in_place(model: str, task: str, dataset: str | None, device: str, seed: int, *, to_stderr: bool) -> None:
    """Tune a checkpoint with the defaults and put the result in its place."""
    from linearize.cli._output import console, on_interrupt

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [model, "--task", task, "--output", model, "--overwrite", "--device", device, "--seed", str(seed)]
    words += ["--dataset", dataset] if dataset else []
    again = f"linearize finetune {' '.join(words)} --resume"
    with on_interrupt(lambda: f"the converted model lies in {model}, untuned; go on: {again}"):
        try:
            tune(job_from(parser.parse_args(words)), console(to_stderr=to_stderr))
        except NotSavedError as error:
            error.command = ["finetune", *words]
            raise


def kept_checkpoint(job: Any) -> str:
    """Say what an interrupted stage two has left on disk, and the words that go on from there."""
    from linearize.finetune.trainer import last_checkpoint

    folder = f"{job.target()}.training"
    last = last_checkpoint(folder)
    kept = "no checkpoint was written yet" if last is None else f"{last.name} lies in {folder}"
    return f"{kept}; go on with the same line and --resume"


def tune(job: Any, out: Any) -> Any:
    """Tune, and print what happens."""
    from linearize.cli._output import on_interrupt
    from linearize.finetune.job import finetune_checkpoint

    def listen(event: str, data: Any) -> None:
        if event == "data":
            out.print(f"Data: {data}", markup=False)
        elif event == "log":
            out.print(log_line(data), markup=False)

    with on_interrupt(lambda: kept_checkpoint(job)):
        target, result = finetune_checkpoint(job, listen)
    figures = ", ".join(f"{name} {value:.4f}" for name, value in result.figures.items())
    chosen = result.selection
    out.print(
        f"Kept step {result.best_step} of {result.steps} ({result.stopped}), chosen by {chosen['by']} on "
        f"{chosen['rows']} {chosen['on']}: {figures}",
        markup=False,
    )
    out.print(f"Saved {target} ({result.seconds:.0f} s).", markup=False)
    return result


def log_line(entry: dict[str, Any]) -> str:
    """Write one entry of the trainer's log."""
    shown = {key: value for key, value in entry.items() if isinstance(value, float) and "per_second" not in key}
    hidden = ("epoch", "total_flos", "eval_runtime", "train_runtime", "eval_model_preparation_time")
    figures = ", ".join(f"{key} {value:.4g}" for key, value in shown.items() if key not in hidden)
    return f"step {entry['step']}/{entry['steps']}: {figures}"
