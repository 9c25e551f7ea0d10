"""Continue stage one on a converted checkpoint: more steps, other data, longer rows."""

from __future__ import annotations

import argparse

from linearize.cli._options import add_dry_run, add_json, add_options, take_options
from linearize.cli._progress import show_bill, show_result, shown
from linearize.jobs.config import DistillJob

EPILOG = """examples:
  linearize distill ./roberta-base-hedgehog --dataset reviews.jsonl --distill-steps 2000
  linearize distill ./bert-luna --distill-length 4096 --query-sample 256 --batch-size 2 --output bert-luna-long
  linearize distill ./bert-luna --feed student --loss output --distill-steps 300
  linearize distill ./bert-luna --distill-length 4096 --dry-run                # what it would cost, nothing written

For a model that is not converted yet, `linearize convert MODEL` does the same after converting it.

several processes or machines, for this verb and `convert` (--batch-size is per process):
  accelerate config                                                # once: how many processes, on which devices
  accelerate launch --no_python linearize distill ./roberta-base-hedgehog --dataset reviews.jsonl
  accelerate launch --config_file fsdp.yaml --no_python linearize distill ./big-model-hedgehog --precision bf16
  ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 --no-python linearize distill ./bert-luna        # on CPUs
Every process has all kernels and its share of the rows; gradients are added up. Under FSDP the frozen model is spread
over the devices and gathered layer by layer; each process first loads it into its host's memory. fsdp.yaml:
  compute_environment: LOCAL_MACHINE
  distributed_type: FSDP
  fsdp_config: {fsdp_version: 2}
  num_machines: 1
  num_processes: 8
FSDP 1 is refused: it cannot leave the kernels out. accelerate starts FSDP on GPUs only; the spreading itself is tested
on two CPU processes. `finetune` runs under FSDP too, `align` does not. DeepSpeed is not tested: its processes share the
rows, but no weights are spread.
If one device is too small: --layers-at-a-time, --query-sample, --precision bf16, a smaller --batch-size."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, DistillJob)
    add_dry_run(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Distil further."""
    from linearize.cli._output import console
    from linearize.jobs.convert import distill_checkpoint

    job = take_options(args, DistillJob)
    if args.dry_run:
        return show_bill(job, as_json=args.json)
    out = console(to_stderr=args.json)
    with shown(out, job.target()) as on_event:
        result = distill_checkpoint(job, on_event)
    show_result(out, result, as_json=args.json)
    return 0
