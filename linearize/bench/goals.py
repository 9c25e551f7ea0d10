"""What the project promises to reach, as ratios against SDPA in the same run, and whether it does here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

from linearize.bench.attention import AttentionSizes, AttentionSuite
from linearize.bench.decode import DecodeSuite
from linearize.bench.job import BenchOptions, checked, run_tasks
from linearize.bench.machine import Machine, Noise, check_dtype
from linearize.bench.measure import threads
from linearize.bench.models import BenchModel
from linearize.bench.public_op import PublicOpSuite, there
from linearize.bench.rows import Crossover, Row, ratio
from linearize.bench.suite import Suite
from linearize.bench.whole_model import ModelSuite
from linearize.events import Callback, ignore
from linearize.native import engine

KERNEL = "flexformer_n"
"""The kernel of the rows that name none."""

NOT_BUILT = "not built"

LONG = 16384


@dataclass(frozen=True)
class Goal:
    """One promise.

    Attributes:
        what: for people.
        goal: the figure to reach.
        most: whether the figure is an upper limit, and not a lower one.
        unit: of the figure.
        figure: which figure of the rows of `tasks` it is; None where what it needs is not there.
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
    """What became of a goal.

    Attributes:
        what: of the goal.
        goal: the figure to reach, with its unit and direction.
        measured: the figure here; None where it was not measured.
        unit: of the figure.
        verdict: "pass", "missed", "not built", or why there is no figure.
    """

    what: str
    goal: str
    measured: float | None
    unit: str
    verdict: str


@dataclass
class GoalsResult:
    """All verdicts, and all that was measured for them."""

    machine: Machine
    noise: Noise
    rows: list[Row]
    verdicts: list[Verdict]
    crossovers: list[Crossover] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "machine": self.machine.to_dict(),
            "noise": self.noise.to_dict(),
            "goals": [asdict(verdict) for verdict in self.verdicts],
            "rows": [row.to_dict() for row in self.rows],
        }


def goals(device: str = "cpu") -> list[Goal]:
    """Return the table: 12 heads of size 64, features of size 128, batch 1, fp32 unless the row says otherwise."""
    sizes = AttentionSizes(KERNEL, device=device)
    both = AttentionSuite(sizes)
    hedgehog = AttentionSuite(replace(sizes, kernel="hedgehog"))
    causal, given = AttentionSuite(sizes, causal=True), AttentionSuite(sizes, causal=True, features=128)
    bert = ModelSuite(BenchModel(kernel=KERNEL, longest=LONG, device=device))
    public = device == "cpu" and there()
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
    """Higher goals for the native op: measured where it is there."""
    built = suite.device == "cpu" and engine() is not None
    for tokens, goal in wanted.items():
        figure, tasks = (_speedup, ((suite, tokens),)) if built else (None, ())
        yield Goal(f"{what}, {tokens:,} tokens: native op", goal, figure=figure, tasks=tasks)


def _memory(suite: Suite) -> Iterator[Goal]:
    what = "extra memory, bidirectional forward, flexformer_n"
    long = (suite, LONG)
    yield Goal(f"{what}, {LONG:,} tokens", 65.0, True, "MiB", _mebibytes, (long,), memory=True)
    # Four times the tokens: linear is 4, quadratic 16.
    yield Goal(f"{what}: 4,096 to 16,384 tokens", 4.4, True, "x", _growth, ((suite, 4096), long), memory=True)


def _speedup(rows: list[Row]) -> float | None:
    return rows[0].speedup


def _slowdown(rows: list[Row]) -> float | None:
    return ratio(rows[0].seconds("linear"), rows[0].seconds("softmax"))


def _mebibytes(rows: list[Row]) -> float | None:
    return ratio(rows[0].memory("linear"), 2**20)


def _growth(rows: list[Row]) -> float | None:
    return ratio(rows[1].memory("linear"), rows[0].memory("linear"))


def run_goals(options: BenchOptions, on_event: Callback = ignore, table: list[Goal] | None = None) -> GoalsResult:
    """Measure every goal; what two of them need is measured once.

    Args:
        options: device, repeats and threads; everything else is the table's.
        on_event: called with what happens.
        table: the goals; None: `goals`.

    Raises:
        LinearizeError: one of its children, for everything the user can put right.
    """
    options = checked(options)
    check_dtype("bfloat16", options.device)
    table = goals(options.device) if table is None else table
    tasks: list[tuple[Suite, int]] = []
    measured: list[tuple[Suite, int]] = []
    for goal in table:
        tasks += [task for task in goal.tasks if task not in tasks]
        measured += goal.tasks if goal.memory else ()
    with threads(options.threads):
        machine, noise, rows = run_tasks(tasks, options, on_event, remember=lambda task: task in measured)
    return GoalsResult(machine, noise, rows, [_judge(goal, tasks, rows) for goal in table])


def _judge(goal: Goal, tasks: list[tuple[Suite, int]], rows: list[Row]) -> Verdict:
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
