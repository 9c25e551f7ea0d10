"""The cost of one training step, on one sequence, for a model of BERT's sizes or a checkpoint.

python -m benchmarks.steps alignment --lengths 512,2048
python -m benchmarks.steps stage-one --layers 4 --lengths 512,2048
python -m benchmarks.steps train --lengths 2048,4096 --batch-tokens 4096
"""

from __future__ import annotations

import argparse

from benchmarks.alignment import AlignmentSuite
from benchmarks.command import add_lengths, add_machine, add_memory, measure_suites, new_parser
from benchmarks.stage_one import StageOneSuite
from benchmarks.train import TrainSuite
from linearize.evaluation.bench.job import checked
from linearize.evaluation.bench.models import BERT_BASE, BenchModel
from linearize.evaluation.options import BenchOptions, check_lengths

SUITES = {"alignment": AlignmentSuite, "stage-one": StageOneSuite, "train": TrainSuite}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("step", choices=SUITES, help="kind of step")
    add("--model", default=BERT_BASE, help="Hub name or folder (%(default)s: its sizes, random weights)")
    add("--layers", type=int, help=f"layers of {BERT_BASE} (12)")
    add("--kernel", default="hedgehog", help="(%(default)s)")
    add_lengths(parser, (512, 2048))
    add("--batch-tokens", type=int, help="train: tokens per batch, at least one sequence (one sequence)")
    add_machine(parser)
    add_memory(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure and print the results."""
    args = parse(argv)
    options = BenchOptions(device=args.device, repeats=args.repeats, threads=args.threads, memory=args.memory)
    options, lengths = checked(options), check_lengths(args.lengths)
    how = {"layers": args.layers, "batch_tokens": args.batch_tokens, "device": options.device}
    model = BenchModel(args.model, args.kernel, longest=lengths[-1], **how)
    return measure_suites([SUITES[args.step](model)], lengths, options, as_json=args.json)


if __name__ == "__main__":
    raise SystemExit(main())
