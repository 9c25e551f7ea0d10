"""Align a converted checkpoint with its original: hidden states, pooled output and logits, on unlabelled data."""

from __future__ import annotations

import argparse
from typing import Any

from linearize.cli._options import add_config, take_config
from linearize.cli._stage_one import add_data, add_output

EPILOG = """examples:
  linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --text-column text
  linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --steps 2000 --save-every 200   # then with --resume
  linearize align ./bert-cola-hedgehog --teacher ./bert-cola --dataset cola.jsonl.gz              # a tuned original
  linearize align ./bert-hedgehog --dataset mrpc.jsonl.gz --text-column sentence1,sentence2 --extra-pairs 0.5
  linearize align ./vit-hedgehog --dataset ./photos --train kernels

First each block learns to give what the original's block gives on the original's inputs (--blockwise), then the whole
model. The teacher is the checkpoint's own softmax as long as its weights are the original's; afterwards --teacher says
what it is. Labels are not used. `linearize convert` does this by itself after stage one."""

SHARED = ("folder", "keep")
"""Fields that are named otherwise, or follow from the output."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from linearize.alignment.config import AlignConfig

    parser.add_argument("model", metavar="MODEL_OR_DIR", help="converted checkpoint: folder or Hub name")
    parser.add_argument("--teacher", metavar="ORIGINAL", help="the softmax model that it was made from, or tuned")
    data = add_data(parser)
    data.add_argument("--length", type=int, metavar="N", help="tokens per row (256, or what the model takes)")
    data.add_argument("--batch-size", type=int, default=32, metavar="B", help="rows per batch (32)")
    add_config(parser.add_argument_group("alignment"), AlignConfig, leave_out=SHARED)
    report_to = parser.add_argument_group("reports")
    report_to.add_argument(
        "--report-to", default="none", metavar="R", help="none or tensorboard, into OUTPUT.tensorboard (none)"
    )
    add_output(parser, "<folder>-aligned")


def job_from(args: argparse.Namespace) -> Any:
    """Turn parsed arguments into an `AlignJob`.

    Raises:
        ConfigError: for values that do not fit.
    """
    from linearize.alignment.config import AlignConfig
    from linearize.alignment.job import AlignJob
    from linearize.data import DataConfig

    values = vars(args).copy()
    given = take_config(values, AlignConfig)
    values.pop("json")
    data = DataConfig(
        dataset=values.pop("dataset"),
        text_column=values.pop("text_column"),
        extra_pairs=values.pop("extra_pairs"),
        image_column=values.pop("image_column"),
        holdout=values.pop("holdout"),
        packing=values.pop("packing"),
        bucketing=values.pop("bucket_by_length"),
        streaming=values.pop("streaming"),
        batch_size=values.pop("batch_size"),
        seed=given.get("seed", 0),
    )
    target = AlignJob(values["model"], output=values["output"]).target()
    if given.get("save_every") is not None or given.get("resume"):
        given["folder"] = f"{target.rstrip('/')}.align"
    return AlignJob(data=data, align=AlignConfig(**given), **values)


def run(args: argparse.Namespace) -> int:
    """Align."""
    from linearize.alignment.job import align_checkpoint
    from linearize.cli._output import StepProgress, closeness_table, console, on_interrupt, print_json
    from linearize.cli._stage_one import kept_states
    from linearize.distillation.processes import is_main

    job = job_from(args)
    out = console(to_stderr=args.json)
    out.quiet = not is_main()
    progress = StepProgress(out)

    def listen(event: str, data: Any) -> None:
        if event == "data":
            out.print(f"The alignment learns from: {data}", markup=False)
        elif event == "align step":
            progress(data)
        elif event == "aligned":
            progress.stop()
            out.print(closeness_table(data))

    try:
        with on_interrupt(lambda: kept_states(job.target(), "align")):
            saved = align_checkpoint(job, listen)
    finally:
        progress.stop()
    out.print(f"Saved {saved.output} ({saved.seconds:.0f} s).", markup=False)
    if args.json and is_main():
        print_json(saved.to_dict())
    return 0
