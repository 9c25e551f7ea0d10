"""The speed and memory goals that the project promises, measured against SDPA in the same run.

python -m benchmarks.goals --json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from benchmarks.attentions import DecodeSuite, OpSuite
from benchmarks.bound import peak_rate, with_bound
from benchmarks.command import add_machine, new_parser
from benchmarks.public_op import PublicOpSuite, installed
from linearize.attention.native import engine
from linearize.cli._output import console, print_json, table
from linearize.cli._progress import as_lines
from linearize.cli.bench import show
from linearize.core.events import Callback, ignore
from linearize.evaluation.bench.job import BenchResult, checked, run_tasks, threads
from linearize.evaluation.bench.meter import check_dtype
from linearize.evaluation.bench.models import BenchModel, ModelSuite
from linearize.evaluation.bench.rows import Row, ratio
from linearize.evaluation.bench.suites import AttentionSizes, AttentionSuite, Suite
from linearize.evaluation.options import BenchOptions

KERNEL = "flexformer_n"
NOT_BUILT = "not built"
LONG = 16384


@dataclass(frozen=True)
class Goal:
    """One promised figure.

    Attributes:
        what: description.
        goal: the figure to reach.
        most: whether the goal is an upper limit instead of a lower one.
        unit: unit of the figure.
        figure: computes the figure from the rows of `tasks`; None if a library that it needs is missing.
        tasks: suites and lengths to measure for it.
        memory: whether it needs peak memory.
    """

    what: str
    goal: float
    most: bool = False
    unit: str = "x"
    figure: Callable[[list[Row]], float | None] | None = None
    tasks: tuple[tuple[Suite, int], ...] = ()
    memory: bool = False


@dataclass(frozen=True)
class Verdict:
    """Whether a goal was reached.

    Attributes:
        what: description of the goal.
        goal: the figure to reach, with its unit and direction.
        measured: the measured figure; None if it was not measured.
        unit: unit of the figure.
        verdict: "pass", "missed", "not built", or why there is no figure.
    """

    what: str
    goal: str
    measured: float | None
    unit: str
    verdict: str


def table_of_goals(device: str = "cpu") -> list[Goal]:
    """Return the goals: 12 heads of size 64, 128 features, batch size 1, fp32 by default."""
    sizes = AttentionSizes(KERNEL, device=device)
    both = AttentionSuite(sizes)
    hedgehog = AttentionSuite(replace(sizes, kernel="hedgehog"))
    causal, given = AttentionSuite(sizes, causal=True), OpSuite(sizes, causal=True)
    bert = ModelSuite(BenchModel(kernel=KERNEL, longest=LONG, device=device))
    public = device == "cpu" and installed()
    bfloat16 = AttentionSuite(replace(sizes, dtype="bfloat16"))
    return [
        *_speedups("bidirectional forward, flexformer_n", both, {512: 1.4, 4096: 10.0, LONG: 42.0}),
        *_speedups("bidirectional forward, hedgehog", hedgehog, {512: 2.0, 4096: 12.0, LONG: 50.0}),
        *_speedups("bidirectional forward in bf16, flexformer_n", bfloat16, {4096: 20.0}),
        *_speedups("bidirectional forward and backward, flexformer_n", replace(both, backward=True), {4096: 12.0}),
        *_speedups("causal forward, features given", given, {4096: 6.5}),
        Goal(
            "causal forward, features given, 4,096 tokens: against the public C++ op",
            1.0,
            figure=_speedup if public else None,
            tasks=((PublicOpSuite(sizes), 4096),) if public else (),
        ),
        *_speedups("causal forward, flexformer_n", causal, {4096: 4.0, LONG: 14.0}),
        *_native("causal forward, flexformer_n", causal, {4096: 8.5, LONG: 28.0}),
        *_speedups("causal forward and backward, features given", replace(given, backward=True), {4096: 7.4}),
        *_speedups("causal forward and backward, flexformer_n", replace(causal, backward=True), {LONG: 14.0}),
        *_speedups("decoding one token, 12 layers, flexformer_n", DecodeSuite(sizes), {8192: 40.0, 32768: 160.0}),
        *_speedups("whole BERT-base forward, flexformer_n", bert, {4096: 1.75, LONG: 4.4}),
        Goal(
            "whole BERT-base forward, flexformer_n, 128 tokens: time over softmax's",
            1.1,
            most=True,
            figure=_slowdown,
            tasks=((bert, 128),),
        ),
        *_memory(both),
    ]


def _speedups(what: str, suite: Suite, wanted: Mapping[int, float]) -> Iterator[Goal]:
    for tokens, goal in wanted.items():
        yield Goal(f"{what}, {tokens:,} tokens", goal, figure=_speedup, tasks=((suite, tokens),))


def _native(what: str, suite: Suite, wanted: Mapping[int, float]) -> Iterator[Goal]:
    """Yield the higher goals for the native op, which are measured if it is compiled."""
    built = suite.device == "cpu" and engine() is not None
    for tokens, goal in wanted.items():
        figure, tasks = (_speedup, ((suite, tokens),)) if built else (None, ())
        yield Goal(f"{what}, {tokens:,} tokens: native op", goal, figure=figure, tasks=tasks)


def _memory(suite: Suite) -> Iterator[Goal]:
    what = "extra memory, bidirectional forward, flexformer_n"
    long = (suite, LONG)
    yield Goal(f"{what}, {LONG:,} tokens", 65.0, True, "MiB", _mebibytes, (long,), memory=True)
    # Four times the tokens: linear growth is 4, quadratic 16.
    yield Goal(f"{what}: 4,096 to 16,384 tokens", 4.4, True, "x", _growth, ((suite, 4096), long), memory=True)


def _speedup(rows: list[Row]) -> float | None:
    return rows[0].speedup


def _slowdown(rows: list[Row]) -> float | None:
    return ratio(rows[0].seconds("linear"), rows[0].seconds("softmax"))


def _mebibytes(rows: list[Row]) -> float | None:
    return ratio(rows[0].memory("linear"), 2**20)


def _growth(rows: list[Row]) -> float | None:
    return ratio(rows[1].memory("linear"), rows[0].memory("linear"))


def run_goals(
    options: BenchOptions, on_event: Callback = ignore, goals: list[Goal] | None = None
) -> tuple[BenchResult, list[Verdict]]:
    """Measure every goal; measurements that several goals need are made only once.

    Args:
        options: device, repeats and threads; the goals fix everything else.
        on_event: called with every event.
        goals: the goals; None: those of `table_of_goals`.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    options = checked(options)
    check_dtype("bfloat16", options.device)
    goals = table_of_goals(options.device) if goals is None else goals
    tasks: list[tuple[Suite, int]] = []
    for goal in goals:
        tasks += [task for task in goal.tasks if task not in tasks]
    with_memory = [task for goal in goals if goal.memory for task in goal.tasks]
    with threads(options.threads):
        result = run_tasks([(*task, task in with_memory) for task in tasks], options, on_event)
        rates = {
            dtype: peak_rate(options.device, dtype)
            for dtype in {suite.sizes.dtype for suite, _ in tasks if isinstance(suite, AttentionSuite)}
        }
    rows = [
        with_bound(row, suite, rates[suite.sizes.dtype]) if isinstance(suite, AttentionSuite) else row
        for (suite, _), row in zip(tasks, result.rows, strict=True)
    ]
    return replace(result, rows=rows), [judge(goal, tasks, rows) for goal in goals]


def judge(goal: Goal, tasks: list[tuple[Suite, int]], rows: list[Row]) -> Verdict:
    """Return the verdict on a goal, given the measured rows of all tasks."""
    wanted = f"{'<=' if goal.most else '>='} {goal.goal:g} {goal.unit}"
    if goal.figure is None:
        return Verdict(goal.what, wanted, None, goal.unit, NOT_BUILT)
    mine = [rows[tasks.index(task)] for task in goal.tasks]
    figure = goal.figure(mine)
    if figure is None:
        problems = [
            f"{name} {variant.problem}" for row in mine for name, variant in row.variants.items() if variant.problem
        ]
        return Verdict(goal.what, wanted, None, goal.unit, problems[0] if problems else "not measured")
    reached = figure <= goal.goal if goal.most else figure >= goal.goal
    return Verdict(goal.what, wanted, figure, goal.unit, "pass" if reached else "missed")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = new_parser(__doc__)
    add_machine(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, and print each goal with its figure."""
    args = parse(argv)
    out = console(to_stderr=args.json)
    options = BenchOptions(device=args.device, repeats=args.repeats, threads=args.threads)
    result, verdicts = run_goals(options, as_lines(out))
    show(out, result)
    rows = [[v.what, v.goal, "-" if v.measured is None else f"{v.measured:.2f} {v.unit}", v.verdict] for v in verdicts]
    passed = sum(v.verdict == "pass" for v in verdicts)
    noisy = "; too noisy to trust" if result.noise.too_noisy else ""
    title = f"Goals: {passed} of {len(rows)} reached{noisy}"
    out.print(table(title, ["figure, against SDPA in the same run", "goal", "measured", ""], rows, right=(1, 2)))
    if args.json:
        print_json({**result.to_dict(), "goals": [asdict(verdict) for verdict in verdicts]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
