"""Convert a checkpoint: replace softmax by kernels, teach them to imitate it, save an ordinary HuggingFace model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from linearize.cli._backends import add_explain, explain_plan
from linearize.cli._options import add_dry_run, add_json, add_options, take_options
from linearize.cli._progress import show_bill, show_result, shown
from linearize.cli.native import add_native, prepare_native
from linearize.jobs.config import ConvertJob

if TYPE_CHECKING:
    from rich.console import Console

    from linearize.modeling.plan import Plan

EPILOG = """examples:
  linearize convert roberta-base --kernel hedgehog --max-length 4096
  linearize convert ./my-bert --kernel flexformer_n --dataset reviews.jsonl.gz --text-column text --distill-steps 500
  linearize convert gpt2 --kernel hedgehog --kernel-arg activation=exp --keep-softmax 0,11
  linearize convert mistralai/Mistral-7B-v0.1 --local-as-full     # its sliding windows are left out
  linearize convert ./SmolLM2-135M-Instruct.Q4_1.gguf --preset causal
  linearize convert ./my-llava --example-inputs one-batch.safetensors
  linearize convert google/vit-base-patch16-224 --dataset ./photos --output vit-linear
  linearize convert google/vit-base-patch16-224 --image-size 384
  linearize convert roberta-base --save-every 200        # and after a crash the same line with --resume
  linearize convert roberta-base --align-steps 1000      # a longer alignment; 0 skips it
  linearize convert roberta-base --dry-run               # the plan, and what it would cost: time, memory, room
  linearize convert roberta-base --kernel auto --budget softmax=1 --plan-out plan.yaml   # the best kernel per layer
  linearize convert roberta-base --plan plan.yaml        # that plan again, perhaps edited
  linearize convert roberta-base --config mine.yaml --distill-steps 500    # a file of options, some of them changed

Without --dataset, text models learn from a data set on the Hub or, offline, from the prose inside Python, and vision
models from a data set on the Hub or from two sample photographs. The choice is printed."""

EXPLAINED_TOKENS = 512
"""Length of the inputs of --explain-backend without --max-length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, ConvertJob)
    add = parser.add_argument
    add("--finetune", metavar="TASK", help="then tune the result on a task (cola ...), with `finetune`'s defaults")
    add("--push-to-hub", metavar="USER/NAME", help="then upload the result")
    add("--private", action="store_true", help="make a new repository on the Hub private")
    add_dry_run(parser)
    add_native(parser)
    add_explain(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Convert, or show the plan and the bill."""
    from linearize.cli._output import console
    from linearize.jobs.convert import convert_checkpoint

    job = take_options(args, ConvertJob)
    # Wrong names are refused before the first slow step.
    if args.finetune:
        from linearize.training.stage_two.tasks import task

        task(args.finetune)
    if args.push_to_hub:
        from linearize.checkpoint.push import check_repo

        check_repo(args.push_to_hub)

    def explain(out: Console, plan: Plan) -> None:
        if args.explain_backend:
            explain_plan(out, plan, job.max_length or EXPLAINED_TOKENS, job.device)

    if args.dry_run:
        prepare_native(args, job.device, None)
        return show_bill(job, as_json=args.json, planned=explain)
    # With --json stdout is for programs, and people read stderr.
    out = console(to_stderr=args.json)

    def prepare(plan: Plan) -> None:
        prepare_native(args, job.device, out)
        explain(out, plan)

    with shown(out, job.target(), prepare) as on_event:
        result = convert_checkpoint(job, on_event)
    show_result(out, result, as_json=args.json)
    if args.finetune:
        from linearize.cli.finetune import tune_in_place

        tune_in_place(job, args.finetune, to_stderr=args.json)
    if args.push_to_hub:
        from linearize.cli.push import upload
        from linearize.training.stage_one.processes import is_main

        if is_main():
            upload(job.target(), args.push_to_hub, private=args.private, to_stderr=args.json)
    return 0
