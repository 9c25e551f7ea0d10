"""What one training step costs, on one sequence of a model of BERT's sizes or of a checkpoint.

python -m benchmarks.steps alignment --lengths 512,2048
python -m benchmarks.steps stage-one --layers 4 --lengths 512,2048
python -m benchmarks.steps train --lengths 2048,4096 --batch-tokens 4096
"""

from __future__ import annotations

import argparse

from benchmarks.alignment import AlignmentSuite
from benchmarks.stage_one import StageOneSuite
from benchmarks.train import TrainSuite
from linearize.cli._output import as_lines, console, print_json
from linearize.cli.bench import show
from linearize.core.options import parse_lengths
from linearize.evaluation.bench.job import checked, run_tasks, threads
from linearize.evaluation.bench.models import BERT_BASE, BenchModel
from linearize.evaluation.bench.options import BenchOptions, check_lengths

SUITES = {"alignment": AlignmentSuite, "stage-one": StageOneSuite, "train": TrainSuite}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("step", choices=SUITES, help="which step")
    add("--model", default=BERT_BASE, help="Hub name or folder (%(default)s: its sizes, random weights)")
    add("--layers", type=int, help=f"layers of {BERT_BASE} (12)")
    add("--kernel", default="hedgehog", help="(%(default)s)")
    add("--lengths", type=parse_lengths, default=(512, 2048), metavar="N,N", help="tokens (512,2048)")
    add("--batch-tokens", type=int, help="train: as many sequences as have so many tokens, at least one (one)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, mps or auto (%(default)s)")
    add("--repeats", type=int, help="turns; by default as many as take ten seconds")
    add("--threads", type=int, help="threads of torch on the CPU")
    add("--no-memory", dest="memory", action="store_false", help="measure time only")
    add("--json", action="store_true", help="print every figure as JSON on stdout")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    args = parse(argv)
    options = BenchOptions(device=args.device, repeats=args.repeats, threads=args.threads, memory=args.memory)
    options, lengths = checked(options), check_lengths(args.lengths)
    how = {"layers": args.layers, "batch_tokens": args.batch_tokens, "device": options.device}
    model = BenchModel(args.model, args.kernel, longest=lengths[-1], **how)
    suite = SUITES[args.step](model)
    out = console(to_stderr=args.json)
    with threads(options.threads):
        suite.check()
        result = run_tasks([(suite, tokens) for tokens in lengths], options, as_lines(out))
    show(out, result)
    if args.json:
        print_json(result.to_dict())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
