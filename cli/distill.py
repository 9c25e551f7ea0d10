"""Go on with stage one on a converted checkpoint: more steps, other data, longer rows."""

from __future__ import annotations

import argparse

from linearize.cli._stage_one import add_stage_one, show

EPILOG = """examples:
  linearize distill ./roberta-base-hedgehog --dataset reviews.jsonl --distill-steps 2000
  linearize distill ./bert-luna --distill-length 4096 --query-sample 256 --batch-size 2 --output bert-luna-long
  linearize distill ./bert-luna --feed student --loss output --distill-steps 300

A model that is not converted yet: linearize convert MODEL, which does the same after converting it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("model", metavar="MODEL_OR_DIR", help="converted checkpoint: folder or Hub name")
    add_stage_one(parser, "<folder>-distilled")


def run(args: argparse.Namespace) -> int:
    """Distil further."""
    from linearize.workflow import DistillOptions, distill_checkpoint

    values = {name: value for name, value in vars(args).items() if name != "json"}
    options = DistillOptions(**values)
    return show(lambda listen: distill_checkpoint(options, listen), options.target(), as_json=args.json)
