"""Make an untrained model with linear attention from a config of any architecture."""

from __future__ import annotations

import argparse

EPILOG = """examples:
  linearize init config.json --kernel hedgehog --task masked-lm --output fresh-bert
  linearize init my-gpt2.yaml --layers 0-2=diag_softmax,3-5=norm_1elu --task causal-lm --output fresh-gpt2
  linearize init config.json --kernel elu --task text-classification --num-labels 10 --tokenizer ./tok --output fresh

CONFIG is a JSON or YAML file with model_type and what differs from its defaults, or a folder with a config.json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help="config of transformers, as a file or folder")
    add("--kernel", metavar="NAME", help="kernel for all layers; see `linearize kernels` (hedgehog)")
    add("--kernel-arg", action="append", default=[], metavar="K=V", help="an argument of the kernel; may be repeated")
    add("--layers", metavar="PLAN", help="kernels per layer, such as 0-5=hedgehog,6-11=flexformer_n")
    add("--task", default="causal-lm", metavar="T", help="which head: a task, as in `linearize finetune` (causal-lm)")
    add("--num-labels", type=int, metavar="N", help="outputs of a classifier's head")
    add("--tokenizer", metavar="DIR", help="tokenizer or image processor to save along; folder or Hub name")
    add("--output", required=True, metavar="DIR", help="folder to make")
    add("--overwrite", action="store_true", help="replace the folder, if linearize wrote it and it holds nothing else")
    add("--seed", type=int, default=0, metavar="S", help="of all weights (0)")
    add("--json", action="store_true", help="print the plan as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Make the model and show what it is."""
    from linearize.cli._output import console, plan_table, print_json
    from linearize.cli.convert import parse_pairs
    from linearize.finetune.job import init_checkpoint
    from linearize.finetune.load import load_processor
    from linearize.finetune.tasks import task

    chosen = task(args.task)
    kernel = args.kernel or (None if args.layers else "hedgehog")
    plan = init_checkpoint(
        args.config,
        chosen,
        output=args.output,
        kernel=kernel,
        kernel_args=parse_pairs(args.kernel_arg),
        layers=args.layers,
        processor=load_processor(args.tokenizer, chosen.modality) if args.tokenizer else None,
        num_labels=args.num_labels,
        overwrite=args.overwrite,
        seed=args.seed,
    )
    out = console(to_stderr=args.json)
    out.print(plan_table(plan))
    out.print(f"Saved {args.output}, untrained.", markup=False)
    if args.json:
        print_json({"output": args.output, "plan": plan.to_dict()})
    return 0
