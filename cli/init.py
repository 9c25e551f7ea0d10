"""Make an untrained model with linear attention from a config of any architecture."""

from __future__ import annotations

import argparse
from dataclasses import replace

from linearize.cli._options import add_json, add_options, take_options
from linearize.jobs.config import InitJob

EPILOG = """examples:
  linearize init config.json --kernel hedgehog --task masked-lm --output fresh-bert
  linearize init my-gpt2.yaml --layers 0-2=diag_softmax,3-5=norm_1elu --task causal-lm --output fresh-gpt2
  linearize init config.json --kernel elu --task text-classification --num-labels 10 --tokenizer ./tok --output fresh

CONFIG is a JSON or YAML file with model_type and what differs from its defaults, or a folder with a config.json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, InitJob)
    add_json(parser, "print the plan as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Make the model and show what it is."""
    from linearize.cli._output import console, plan_table, print_json
    from linearize.jobs.init import init_checkpoint

    job = take_options(args, InitJob)
    if job.kernel is None and job.layers is None:
        job = replace(job, kernel="hedgehog")
    plan = init_checkpoint(job)
    out = console(to_stderr=args.json)
    assert plan is not None
    out.print(plan_table(plan))
    out.print(f"Saved {job.output}, untrained.")
    if args.json:
        print_json({"output": job.output, "plan": plan.to_dict()})
    return 0
