"""What the verbs print: tables, progress and JSON. People read stderr and stdout, programs read stdout with --json."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from linearize.distillation.processes import is_main
from linearize.errors import printable
from linearize.parsing import finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import ConsoleOptions, JustifyMethod, RenderableType
    from rich.progress import TaskID

    from linearize.alignment.loop import AlignResult, AlignStep
    from linearize.distillation.loop import StepReport
    from linearize.fidelity.measure import Fidelity
    from linearize.finetune.watch import TuneStep
    from linearize.kernel_search.result import SearchStep
    from linearize.modeling.plan import LayerPlan, Plan

    Report = StepReport | AlignStep | TuneStep | SearchStep


class Screen(Console):
    """A console on which names and metadata cannot steer the terminal; knows when it last said something."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spoke = time.monotonic()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render as rich does, without control characters in the text; rich's own styles come later."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def print(self, *objects: object, **options: Any) -> None:
        """Print as rich does."""
        super().print(*objects, **options)
        self.spoke = time.monotonic()


def console(*, to_stderr: bool = False) -> Screen:
    """Return a console that honours NO_COLOR, COLUMNS and the terminal's width; 120 columns without any of these.

    Of several processes one speaks.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    known = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Screen(file=stream, width=None if known else 120, soft_wrap=False, highlight=False, quiet=not is_main())


EVERY, SHARE, SELDOM = 8.0, 0.1, 300.0
"""Seconds of silence in a log after which a heartbeat speaks: 8, later a tenth of the time so far, 300 at most."""


class Heartbeat:
    """Says in a log, after some silence, what is still being done, less and less often; use as a context.

    A terminal has bars and signs instead.
    """

    def __init__(self, out: Screen, what: str) -> None:
        self.out, self.what, self.every = out, what, EVERY
        self.start = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Heartbeat:
        """Start."""
        if not self.out.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _silence(self) -> float:
        return max(self.every, min(SELDOM, SHARE * (time.monotonic() - self.start)))

    def _run(self) -> None:
        while not self._over.wait(max(0.0, self.out.spoke + self._silence() - time.monotonic())):
            if time.monotonic() - self.out.spoke >= self._silence():
                seconds = time.monotonic() - self.start
                self.out.print(f"... {self.what} ({seconds:.0f} s so far)", markup=False, soft_wrap=True)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what was kept."""


@contextlib.contextmanager
def on_interrupt(kept: Callable[[], str]) -> Iterator[None]:
    """Have Ctrl-C in the block say what was kept and how to go on, unless the work says so itself; `main` prints it.

    Of blocks in each other the outer one has the last word: it knows of what was done before.
    """
    try:
        yield
    except Interrupted:
        raise Interrupted(kept()) from None
    except KeyboardInterrupt as interrupt:
        raise Interrupted(str(interrupt) or kept()) from None


def print_json(data: object) -> None:
    """Print one JSON document, of several processes once; NaN and infinity become null, as JSON has neither."""
    if is_main():
        print(json.dumps(finite(data), indent=2, allow_nan=False))


class WholeWords:
    """A table whose columns are as wide as their longest word; where they do not fit, one line per cell.

    Args:
        columns: what stands above.
        rows: texts, never markup.
        right: numbers of the columns that are set to the right.
    """

    BORDER = 3
    """Columns of the terminal that a column's border and padding take; the table itself takes one more."""

    def __init__(self, columns: list[str], rows: list[list[str]], right: tuple[int, ...]) -> None:
        self.columns, self.rows, self.right = columns, rows, right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Choose by the width that there is."""
        columns = [[name, *(row[at] for row in self.rows)] for at, name in enumerate(self.columns)]
        least = [self._longest(word for text in texts for word in text.split()) for texts in columns]
        most = [self._longest(line for text in texts for line in text.splitlines()) for texts in columns]
        room = options.max_width - self.BORDER * len(columns) - 1
        yield self._table(self._shares(least, most, room)) if sum(least) <= room else self._cells()

    @staticmethod
    def _shares(least: list[int], most: list[int], room: int) -> list[int]:
        """Return each column's width: the widest that can give way does; rich would also ask those that cannot."""
        widths = list(most)
        while sum(widths) > room:
            widths[max((width, at) for at, width in enumerate(widths) if width > least[at])[1]] -= 1
        return widths

    def _table(self, widths: list[int]) -> Table:
        made = Table(header_style="bold")
        for at, (name, width) in enumerate(zip(self.columns, widths, strict=True)):
            justify: JustifyMethod = "right" if at in self.right else "left"
            made.add_column(escape(name), justify=justify, overflow="fold", width=width)
        for row in self.rows:
            made.add_row(*map(escape, row))
        return made

    @staticmethod
    def _longest(texts: Iterable[str]) -> int:
        return max(map(cell_len, texts), default=0)

    def _cells(self) -> Group:
        """The first cell of each row as a heading, and the others below it, name and value."""
        lines = []
        for first, *rest in self.rows:
            lines.append(Text(f"{self.columns[0]} {first}".strip(), style="bold", overflow="fold"))
            for name, text in zip(self.columns[1:], rest, strict=True):
                if text:
                    lines.append(Text(f"  {name}: {text}" if name else f"  {text}", overflow="fold"))
        return Group(*lines)


def table(title: str, columns: list[str], rows: Sequence[Sequence[object]], *, right: tuple[int, ...] = ()) -> Group:
    """Build a table; cells are text, never markup, and words stay whole."""
    # A table's own title is wrapped to the table's width.
    return Group(Text(title, style="bold"), WholeWords(columns, [[str(cell) for cell in row] for row in rows], right))


def plan_table(plan: Plan) -> Group:
    """Show a plan: every attention, what becomes of it and why, and what to expect of it."""
    from linearize.surgery.plan import expectations

    groups: list[list[LayerPlan]] = []
    for layer in plan.layers:
        if groups and _alike(groups[-1][-1]) == _alike(layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    rows = [
        [_span([layer.index for layer in group]), _folded([layer.module for layer in group]), *_alike(group[0])[:-1]]
        for group in groups
    ]
    title = f"{plan.architecture}: {len(plan.converted)} of {len(plan.layers)} attentions become linear"
    columns = ["layer", "module", "becomes", "heads/kv x size", "sees", "why it stays"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Group(table(title, columns, rows, right=(0,)), *(Text(line) for line in expectations(plan)))


def _alike(layer: LayerPlan) -> tuple[str, ...]:
    """Return what a plan's table says of a layer, and its module without numbers: layers with the same are one row."""
    from linearize.modeling.plan import UNKNOWN

    shape = layer.shape
    known = shape != UNKNOWN
    return (
        layer.kernel + _arguments(layer.arguments | layer.hybrid.changed),
        f"{shape.heads}/{shape.key_heads} x {shape.head_dim}" if known else "unknown",
        ("causal" if shape.causal else "both ways") if known else "unknown",
        layer.reason,
        re.sub(r"\d+", "#", layer.module),
    )


def _span(numbers: Sequence[int | None]) -> str:
    known = [number for number in numbers if number is not None]
    if not known:
        return ""
    return str(known[0]) if len(known) == 1 else f"{known[0]}-{known[-1]}"


def _folded(modules: Sequence[str]) -> str:
    """Name modules that differ in numbers only: `layer.0-5.self`."""
    parts = zip(*(re.split(r"(\d+)", module) for module in modules), strict=True)
    return "".join(one[0] if len(set(one)) == 1 else f"{one[0]}-{one[-1]}" for one in parts)


def _arguments(arguments: dict[str, object]) -> str:
    return f" ({', '.join(f'{name}={value}' for name, value in arguments.items())})" if arguments else ""


LARGE = 1e5
"""Numbers from here on are written with three digits and an exponent, unless they are whole."""


def number(value: float | None, digits: int = 3) -> str:
    """Format a figure: whole numbers above 1 (counts) without decimals, large ones as 2.57e6; a dash for None."""
    if value is None:
        return "-"
    if math.isfinite(value) and float(value).is_integer() and abs(value) > 1:
        return f"{value:.0f}"
    return f"{value:.2e}".replace("e+0", "e").replace("e+", "e") if abs(value) >= LARGE else f"{value:.{digits}f}"


def fidelity_table(before: Fidelity, after: Fidelity) -> Group:
    """Show how close each layer is to softmax, before and after stage one."""

    def pair(name: str, one: Callable[[str], float | None], two: Callable[[str], float | None], digits: int = 3) -> str:
        return f"{number(one(name), digits)} > {number(two(name), digits)}"

    figures = ("kl", "total_variation", "negative_share", "output_error")
    rows = []
    for old, new in zip(before.layers, after.layers, strict=True):
        rows.append(
            [
                old.module,
                old.kernel,
                *(pair(f, functools.partial(getattr, old), functools.partial(getattr, new)) for f in figures),
            ]
        )
    rows.append(["mean", "", *(pair(f, before.mean, after.mean) for f in figures)])
    columns = ["layer", "kernel", "KL (nats/query)", "total variation", "negative weights", "output error"]
    if after.mean("window_error") is not None:
        # The control: what softmax has outside the window, and the error of the window alone.
        for row, layer in zip(rows, after.layers, strict=False):
            row += [number(layer.far_mass), number(layer.window_error)]
        rows[-1] += [number(after.mean("far_mass")), number(after.mean("window_error"))]
        columns += ["far mass", "window alone"]
    title = f"Kernel against softmax, before > after stage one ({before.queries} held-out queries)"
    return table(title, columns, rows, right=tuple(range(2, len(columns))))


def closeness_table(result: AlignResult) -> Group:
    """Show how close the whole model is to its teacher, before and after the alignment."""
    before, after = result.before, result.after
    rows = [[name, f"{old:.3f} > {after.layers[name]:.3f}"] for name, old in before.layers.items()]
    rows = [[f"hidden state, {name}", "relative error", figure] for name, figure in rows]
    rows.append(["pooled output", "cosine", f"{before.cosine:.4f} > {after.cosine:.4f}"])
    if before.logits is not None:
        rows.append(["logits", "divergence", f"{before.logits:.4f} > {after.logits:.4f}"])
    kept = f"kept step {result.best_step}" if result.best_step else "nothing better than the start was found"
    title = f"Whole model against its original, before > after {result.steps} steps of alignment ({kept})"
    return table(title, ["what", "figure", "before > after"], rows, right=(2,))


ROOMY = 90
"""Columns of a terminal that has room for a bar and the layers' losses beside the count, the time and the loss."""


class StepProgress:
    """A bar with the loss on a terminal (without the bar on a narrow one), plain lines elsewhere."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self.bar: Progress | None = None
        self.task: TaskID | None = None

    def __call__(self, report: Report) -> None:
        """Show a step."""
        if not self.out.is_terminal:
            if report.step == 1 or report.held_out is not None:
                self.out.print(self._line(report))
            return
        roomy = self.out.width >= ROOMY
        if self.bar is None:
            count, loss = TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[loss]}")
            columns = [TextColumn("{task.description}"), count, TimeRemainingColumn(), loss]
            if roomy:
                columns[1:2] = [BarColumn(), count, TimeElapsedColumn()]
            self.bar = Progress(*columns, console=self.out)
            self.task = self.bar.add_task(self.stage(report), total=report.steps, loss="")
            self.bar.start()
        assert self.task is not None
        losses = list(report.losses.values())
        layers = f" (layers {min(losses):.2f} to {max(losses):.2f})" if roomy and losses else ""
        text = f"loss {report.loss:.3f}{layers}"
        self.bar.update(self.task, description=self.stage(report), completed=report.step, loss=text)
        if report.held_out is not None:
            self.bar.console.print(self._line(report))

    @staticmethod
    def stage(report: Report) -> str:
        """Say which stage a step is of."""
        return f"{report.stage}, {report.phase}" if report.phase else report.stage

    @classmethod
    def where(cls, report: Report) -> str:
        """Say where a stage stands, and how long it has to go."""
        stage = f"{cls.stage(report)}, " if report.phase else ""
        return f"{stage}step {report.step}/{report.steps}, {report.seconds:.0f} s, {report.left:.0f} s left"

    @classmethod
    def short(cls, report: Report) -> str:
        """Say where it stands, and the loss."""
        return f"{cls.where(report)}: loss {report.loss:.4f}"

    @classmethod
    def _line(cls, report: Report) -> str:
        layers = f"; per layer {' '.join(f'{loss:.2f}' for loss in report.losses.values())}" if report.losses else ""
        held_out = "" if report.held_out is None else f", held out {report.held_out:.4f}"
        return f"{cls.short(report)}{held_out}{layers}"

    def stop(self) -> None:
        """Take the bar off the screen."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
