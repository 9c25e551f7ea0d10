"""Convert a checkpoint: replace softmax by kernels, teach them to imitate it, save an ordinary HuggingFace model."""

from __future__ import annotations

import argparse
from typing import Any

from linearize.cli._native import add_native, prepare_native
from linearize.cli._options import add_config, take_config
from linearize.cli._stage_one import add_stage_one, show
from linearize.errors import ConfigError

EPILOG = """examples:
  linearize convert roberta-base --kernel hedgehog --max-length 4096
  linearize convert ./my-bert --kernel flexformer_n --dataset reviews.jsonl.gz --text-column text --distill-steps 500
  linearize convert gpt2 --kernel hedgehog --kernel-arg activation=exp --keep-softmax 0,11
  linearize convert google/vit-base-patch16-224 --dataset ./photos --output vit-linear
  linearize convert roberta-base --save-every 200        # and after a crash the same line with --resume
  linearize convert roberta-base --align-steps 1000      # a longer alignment; 0 skips it
  linearize convert roberta-base --dry-run

Without --dataset, text models learn from a stated Hub data set or, offline, from the prose inside Python;
vision models likewise or from two sample photographs. The choice is printed."""


SHARED = ("gradient_accumulation", "precision", "save_every", "keep", "folder", "resume", "seed")
"""Options of the alignment that are those of stage one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hub name or folder of a transformers checkpoint")
    add(
        "--kernel", default="hedgehog", metavar="NAME", help="kernel for all layers; see `linearize kernels` (hedgehog)"
    )
    add("--kernel-arg", action="append", default=[], metavar="K=V", help="an argument of the kernel; may be repeated")
    add("--layers", metavar="PLAN", help="kernels per layer, such as 0-5=hedgehog,6-11=flexformer_n")
    add("--keep-softmax", metavar="LAYERS", help="layers to leave as they are, such as 0,11")
    add("--window", type=int, metavar="W", help="softmax inside a window of W tokens, the kernel outside it")
    add("--task", metavar="TASK", help="head to load, such as fill-mask; by default the one the checkpoint names")
    add("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    add("--max-length", type=int, metavar="N", help="longest input that the result shall take, in tokens")
    add(
        "--positions",
        default="tile",
        metavar="HOW",
        help="how learned positions are extended: tile or interpolate (tile)",
    )
    add("--finetune", metavar="TASK", help="then tune the result on a task (cola ...), with `finetune`'s defaults")
    add("--push-to-hub", metavar="USER/NAME", help="then upload the result")
    add("--private", action="store_true", help="make a new repository on the Hub private")
    add("--dry-run", action="store_true", help="print the plan and change nothing")
    add_native(parser)
    add_stage_one(parser, "<model-name>-<kernel>")
    from linearize.alignment.config import AlignConfig

    group = parser.add_argument_group("alignment, after stage one")
    group.add_argument(
        "--align-steps",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="steps; 0 skips the alignment (two fifths of those of stage one)",
    )
    add_config(group, AlignConfig, prefix="align", leave_out=("steps", *SHARED))


def options_from(args: argparse.Namespace) -> Any:
    """Turn parsed arguments into `ConvertOptions`.

    Raises:
        ConfigError: for text that cannot be read.
    """
    from linearize.alignment.config import AlignConfig
    from linearize.surgery.layers import parse_indices
    from linearize.workflow import ConvertOptions

    same = vars(args).copy()
    align = take_config(same, AlignConfig, prefix="align")
    for name in ("kernel_arg", "dry_run", "json", "keep_softmax", "finetune", "push_to_hub", "private", "no_native"):
        same.pop(name)
    kept = tuple(parse_indices(args.keep_softmax, "--keep-softmax")) if args.keep_softmax else ()
    return ConvertOptions(**same, kernel_args=parse_pairs(args.kernel_arg), keep_softmax=kept, align=align)


def parse_pairs(pairs: list[str]) -> dict[str, str]:
    """Read repeated K=V options.

    Raises:
        ConfigError: if one has no equals sign, or a name comes twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--kernel-arg: got {pair!r}, expected NAME=VALUE such as activation=exp")
        if name in found:
            raise ConfigError(f"--kernel-arg: {name} is given twice; give it once")
        found[name] = value
    return found


def run(args: argparse.Namespace) -> int:
    """Convert, or show the plan."""
    from linearize.distillation.processes import is_main
    from linearize.workflow import convert_checkpoint, make_plan

    options = options_from(args)
    if args.dry_run:
        from linearize.cli._output import console, plan_table, print_json

        _, plan = make_plan(options)
        print_json(plan.to_dict()) if args.json else console().print(plan_table(plan))
        return 0
    if args.finetune:
        # Everything that can be refused is refused before the first slow step.
        from linearize.finetune.tasks import task

        task(args.finetune)
    if args.push_to_hub:
        from linearize.checkpoint.push import check_repo

        check_repo(args.push_to_hub)
    show(
        lambda listen: convert_checkpoint(options, listen),
        options.target(),
        as_json=args.json,
        planned=lambda out: prepare_native(args, out),
    )
    if args.finetune:
        from linearize.cli.finetune import tune_in_place

        tune_in_place(options.target(), args.finetune, args.dataset, args.device, args.seed, to_stderr=args.json)
    if args.push_to_hub and is_main():
        from linearize.cli.push import upload

        upload(options.target(), args.push_to_hub, private=args.private, to_stderr=args.json)
    return 0
