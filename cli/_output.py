"""The output of the verbs: tables, JSON, and the progress of long work.

People read stderr and stdout; with --json, programs read stdout. Long work shows a progress bar on a terminal, and
lines and a heartbeat in a log.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from linearize.core.errors import printable
from linearize.core.parsing import finite
from linearize.jobs import events
from linearize.jobs.events import Callback, Event
from linearize.modeling.plan import UNKNOWN, LayerPlan, Plan
from linearize.training.stage_one.processes import is_main

if TYPE_CHECKING:
    from linearize.fidelity.measure import Fidelity
    from linearize.jobs.advice import Findings
    from linearize.kernel_search.result import SearchResult, SearchStep
    from linearize.training.alignment.loop import AlignResult, AlignStep
    from linearize.training.stage_one.loop import DistillResult, StepReport
    from linearize.training.stage_two.tuner import TuneStep

    Report = StepReport | AlignStep | TuneStep | SearchStep

ROOMY = 90
"""Width of a terminal, in characters, with room for a bar, the layers' losses, and tables of many columns."""


class Screen(Console):
    """A console that is safe from control characters in names and metadata, and records when it last printed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spoke = time.monotonic()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render as rich does, without control characters in the text; rich adds its own styles later."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def print(self, *objects: object, **options: Any) -> None:
        """Print as rich does, but do not treat text in brackets as markup."""
        super().print(*objects, **{"markup": False} | options)
        self.spoke = time.monotonic()


def console(*, to_stderr: bool = False) -> Screen:
    """Return a console that honours NO_COLOR, COLUMNS and the terminal's width; 120 columns without any of these.

    Only the main process prints.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    known = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Screen(file=stream, width=None if known else 120, soft_wrap=False, highlight=False, quiet=not is_main())


def print_json(data: object) -> None:
    """Print one JSON document, from the main process only; NaN and infinity, which JSON lacks, become null."""
    if is_main():
        print(json.dumps(finite(data), indent=2, allow_nan=False))


class WholeWords:
    """A table that never breaks words; if its columns do not fit, a list with one line per cell.

    Args:
        columns: the headings.
        rows: the cells as plain text, never markup.
        right: indices of the right-aligned columns.
    """

    BORDER = 3
    """Characters that a column's border and padding take; the table itself takes one more."""

    def __init__(self, columns: list[str], rows: list[list[str]], right: tuple[int, ...]) -> None:
        self.columns, self.rows, self.right = columns, rows, right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the table or the list, depending on the available width."""
        columns = [[name, *(row[at] for row in self.rows)] for at, name in enumerate(self.columns)]
        least = [_longest(word for text in texts for word in text.split()) for texts in columns]
        widths = [_longest(line for text in texts for line in text.splitlines()) for texts in columns]
        room = options.max_width - self.BORDER * len(columns) - 1
        if sum(least) > room:
            yield from self._list()
            return
        while sum(widths) > room:
            # Shrink the widest column that can shrink; rich would also shrink the others.
            widths[max((width, at) for at, width in enumerate(widths) if width > least[at])[1]] -= 1
        table = Table(header_style="bold")
        for at, (name, width) in enumerate(zip(self.columns, widths, strict=True)):
            justify = "right" if at in self.right else "left"
            table.add_column(Text(name), justify=justify, overflow="fold", width=width)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*map(Text, row))
        yield table

    def _list(self) -> Iterator[Text]:
        """Yield the first cell of each row as a heading, then the other cells as name and value."""
        for first, *rest in self.rows:
            yield Text(f"{self.columns[0]} {first}".strip(), style="bold", overflow="fold")
            for name, text in zip(self.columns[1:], rest, strict=True):
                if text:
                    yield Text(f"  {name}: {text}" if name else f"  {text}", overflow="fold")


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def table(title: str, columns: list[str], rows: Sequence[Sequence[object]], *, right: tuple[int, ...] = ()) -> Group:
    """Build a table; cells are plain text, never markup, and words are not broken."""
    # The title of a rich table would wrap at the table's width.
    return Group(Text(title, style="bold"), WholeWords(columns, [[str(cell) for cell in row] for row in rows], right))


def plan_table(plan: Plan) -> Group:
    """Return a plan as a table: every attention layer, its kernel or why it is kept, and what to expect."""
    from linearize.conversion.plan import expectations

    rows = []
    for (*facts, _), layers in itertools.groupby(plan.layers, _alike):
        group = list(layers)
        known = [str(layer.index) for layer in group if layer.index is not None]
        numbers = "-".join(dict.fromkeys([*known[:1], *known[-1:]]))
        # The names differ only in numbers: `layer.0-5.self`.
        parts = zip(*(re.split(r"(\d+)", layer.module) for layer in group), strict=True)
        module = "".join(part[0] if len(set(part)) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
        rows.append([numbers, module, *facts])
    title = f"{plan.architecture}: {len(plan.converted)} of {len(plan.layers)} attentions become linear"
    columns = ["layer", "module", "becomes", "heads/kv x size", "sees", "why it stays"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Group(table(title, columns, rows, right=(0,)), *(Text(line) for line in expectations(plan)))


def _alike(layer: LayerPlan) -> tuple[str, ...]:
    """Return a layer's cells, and its module name without numbers; layers with equal results share a row."""
    shape = layer.shape
    known = shape != UNKNOWN
    arguments = ", ".join(f"{name}={value}" for name, value in (layer.arguments | layer.hybrid.changed).items())
    return (
        f"{layer.kernel} ({arguments})" if arguments else layer.kernel,
        f"{shape.heads}/{shape.key_heads} x {shape.head_dim}" if known else "unknown",
        ("causal" if shape.causal else "both ways") if known else "unknown",
        layer.reason,
        re.sub(r"\d+", "#", layer.module),
    )


LARGE = 1e5
"""Numbers from here on are written with three digits and an exponent, unless they are integers."""


def number(value: float | None, digits: int = 3) -> str:
    """Format a figure: integers above 1 (counts) without decimals, large numbers as 2.57e6, None as a dash."""
    if value is None:
        return "-"
    if math.isfinite(value) and float(value).is_integer() and abs(value) > 1:
        return f"{value:.0f}"
    return f"{value:.2e}".replace("e+0", "e").replace("e+", "e") if abs(value) >= LARGE else f"{value:.{digits}f}"


EVERY, SHARE, SELDOM = 8.0, 0.1, 300.0
"""Seconds without output in a log before a heartbeat line: 8, later a tenth of the time so far, at most 300."""


class Heartbeat:
    """Context manager that prints what is still running to a log that has been silent for some time.

    The lines become less frequent over time. A terminal has progress bars instead.
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
                self.out.print(f"... {self.what} ({time.monotonic() - self.start:.0f} s so far)", soft_wrap=True)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a message about the results that were kept."""


@contextlib.contextmanager
def on_interrupt(kept: Callable[[], str]) -> Iterator[None]:
    """Give a Ctrl-C inside the block a message about the results kept and how to continue; `main` prints it.

    A message from the work itself takes precedence. Among nested blocks the outer one decides: it knows the whole work.
    """
    try:
        yield
    except Interrupted:
        raise Interrupted(kept()) from None
    except KeyboardInterrupt as interrupt:
        raise Interrupted(str(interrupt) or kept()) from None


class StepProgress:
    """A bar with the loss on a terminal (without the bar on a narrow one), plain lines elsewhere."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self.bar: Progress | None = None

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
            self.bar.add_task(self.stage(report), total=report.steps, loss="")
            self.bar.start()
        losses = list(report.losses.values())
        layers = f" (layers {min(losses):.2f} to {max(losses):.2f})" if roomy and losses else ""
        text = f"loss {report.loss:.3f}{layers}"
        stage = self.stage(report)
        self.bar.update(self.bar.task_ids[0], description=stage, total=report.steps, completed=report.step, loss=text)
        if report.held_out is not None:
            self.bar.console.print(self._line(report))

    @staticmethod
    def stage(report: Report) -> str:
        """Return the stage of a step."""
        return f"{report.stage}, {report.phase}" if report.phase else report.stage

    @classmethod
    def where(cls, report: Report) -> str:
        """Return a step's number, elapsed time and remaining time."""
        stage = f"{cls.stage(report)}, " if report.phase else ""
        return f"{stage}step {report.step}/{report.steps}, {report.seconds:.0f} s, {report.left:.0f} s left"

    @classmethod
    def short(cls, report: Report) -> str:
        """Return a step's number, times and loss."""
        return f"{cls.where(report)}: loss {report.loss:.4f}"

    @classmethod
    def _line(cls, report: Report) -> str:
        layers = f"; per layer {' '.join(f'{loss:.2f}' for loss in report.losses.values())}" if report.losses else ""
        held_out = "" if report.held_out is None else f", held out {report.held_out:.4f}"
        return f"{cls.short(report)}{held_out}{layers}"

    def stop(self) -> None:
        """Remove the bar from the screen."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class Work:
    """Shows the events of long work, as the callback of a job.

    Attributes:
        out: the console.
        says: whether it prints a line at the start of slow work.
        beat: prints to a log what is still running.
        progress: the progress bar.
        findings: the job's findings, available at its end.
        saved: whether its result was written.
    """

    def __init__(self, out: Screen, what: str) -> None:
        self.out, self.says = out, False
        self.beat, self.progress = Heartbeat(out, what), StepProgress(out)
        self.findings: Findings | None = None
        self.saved = False
        self._last: Report | None = None

    def __call__(self, event: Event) -> None:
        """Show an event."""
        out, beat = self.out, self.beat
        self.saved = self.saved or isinstance(event, events.Saved)
        match event:
            case events.Planned(plan):
                out.print(plan_table(plan))
            case events.DataOpened(description):
                out.print(f"Data: {description}")
                beat.what = "measuring the start"
            case events.StepDone(report):
                self._last = report
                self.progress(report)
                done = report.step == report.steps
                beat.what = "measuring the result" if done else f"training, {self.progress.short(report)}"
            case events.Logged(entry):
                # A line of a log also gives the remaining time, as the bar does on a terminal.
                timed = self._last is not None and self._last.step == entry["step"]
                out.print(log_line(entry, self.progress.where(self._last) if self._last and timed else None))
            case events.Noted(text):
                out.print(text)
            case events.Started(what):
                beat.what = what
                if self.says:
                    out.print(f"... {what}")
            case events.Searched(searched):
                self.progress.stop()
                beat.what = "continuing after the search"
                show_search(out, searched)
            case events.Distilled(distilled):
                self.progress.stop()
                beat.what = "continuing after stage one"
                out.print(summary_of(distilled))
                title = "Kernel against softmax, before > after stage one"
                title = f"{title} ({distilled.before.queries} held-out queries)"
                out.print(fidelity_table(title, distilled.after, distilled.before))
            case events.Aligned(aligned):
                self.progress.stop()
                out.print(closeness_table(aligned))
            case events.Concluded(findings):
                self.findings = findings


@contextlib.contextmanager
def at_work(out: Screen, what: str, kept: Callable[[], str] = lambda: "nothing was written") -> Iterator[Work]:
    """Show long work: its events, what is running (initially `what`), and the results kept on Ctrl-C."""
    work = Work(out, what)
    try:
        with work.beat, on_interrupt(kept):
            yield work
    finally:
        work.progress.stop()


def as_lines(out: Console) -> Callback:
    """Return a callback that prints a line at the start of slow work."""

    def on_event(event: Event) -> None:
        if isinstance(event, events.Started):
            out.print(f"... {event.what}", markup=False)

    return on_event


def show_findings(out: Console, findings: Findings) -> None:
    """Print a job's findings and the suggested next command; lines are not wrapped, so that they can be copied."""
    for line in findings.lines():
        out.print(line, soft_wrap=True)


HIDDEN = ("epoch", "total_flos", "eval_runtime", "train_runtime", "eval_model_preparation_time")


def log_line(entry: dict[str, float], where: str | None = None) -> str:
    """Return one entry of the trainer's log as a line; `where` replaces its step."""
    shown = {name: value for name, value in entry.items() if isinstance(value, float) and "per_second" not in name}
    figures = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if name not in HIDDEN)
    where = where or f"step {entry['step']}/{entry['steps']}"
    return f"{where}: {figures}"


def summary_of(result: DistillResult) -> str:
    """Return one line about the result of stage one."""
    if result.stopped == "nothing to learn":
        return "Stage one skipped: no kernel of this plan has anything to learn."
    return (
        f"Stage one: {result.steps} steps in {result.seconds:.0f} s, ended by {result.stopped}; "
        f"kept step {result.best_step}."
    )


def fidelity_table(title: str, after: Fidelity, before: Fidelity | None = None) -> Group:
    """Return a table of how close each layer is to softmax; with `before`, before and after stage one."""
    figures = ["kl", "total_variation", "negative_share", "output_error"]
    columns = ["layer", "kernel", "KL (nats/query)", "total variation", "negative weights", "output error"]
    rows = [[layer.module, layer.kernel, *(number(getattr(layer, f)) for f in figures)] for layer in after.layers]
    rows.append(["mean", "", *(number(after.mean(f)) for f in figures)])
    if before is not None:
        earlier = [[getattr(layer, f) for f in figures] for layer in before.layers]
        for row, values in zip(rows, [*earlier, [before.mean(f) for f in figures]], strict=True):
            row[2:] = [f"{number(value)} > {text}" for value, text in zip(values, row[2:], strict=True)]
        if after.mean("window_error") is not None:
            # The control: softmax's weight outside the window, and the error of the window alone.
            columns += ["far mass", "window alone"]
            for row, layer in zip(rows, after.layers, strict=False):
                row += [number(layer.far_mass), number(layer.window_error)]
            rows[-1] += [number(after.mean("far_mass")), number(after.mean("window_error"))]
    return table(title, columns, rows, right=tuple(range(2, len(columns))))


def closeness_table(result: AlignResult) -> Group:
    """Return a table of how close the whole model is to its teacher, before and after the alignment."""
    before, after = result.before, result.after
    rows = [
        [f"hidden state, {name}", "relative error", f"{error:.3f} > {after.layers[name]:.3f}"]
        for name, error in before.layers.items()
    ]
    rows.append(["pooled output", "cosine", f"{before.cosine:.4f} > {after.cosine:.4f}"])
    if before.logits is not None:
        rows.append(["logits", "divergence", f"{before.logits:.4f} > {after.logits:.4f}"])
    kept = f"kept step {result.best_step}" if result.best_step else "nothing better than the start was found"
    title = f"Whole model against its original, before > after {result.steps} steps of alignment ({kept})"
    return table(title, ["what", "figure", "before > after"], rows, right=(2,))


def show_search(out: Console, result: SearchResult) -> None:
    """Print the choice for each layer with its reason, and the plans that were tried."""
    from linearize.kernel_search.result import WORTH

    rows = [[x.layer, x.module, x.label, f"{x.error:.3f}", f"{x.share:.3g}", x.why] for x in result.layers]
    columns = ["layer", "module", "becomes", "output error", "of softmax's time", "why"]
    title = f"The plan, within {result.limit:.3g} of softmax's time at {result.length:,} tokens"
    out.print(table(title, columns, rows, right=(0, 3, 4)))
    points = [
        [
            f"{point.name}{' *' if point.efficient else ''}",
            point.kernels,
            f"{point.error:.4g}",
            f"{point.cosine:.4f}",
            f"{point.share:.3g}",
            f"{point.seconds:.3g}",
        ]
        for point in result.points
    ]
    columns = ["choice", "kernels", "error", "pooled cosine", "of softmax's time", "seconds"]
    title = f"Whole model against its original, without alignment; error: {result.figure}"
    out.print(table(title, columns, points, right=(2, 3, 4, 5)))
    out.print("*: no other choice is both closer and cheaper.")
    uniform = result.uniform
    if uniform is not None:
        kernel = uniform.name.removesuffix(" everywhere").partition("(")[0].strip()
        text = f"{uniform.name} is as good: error {uniform.error:.4g}, at {uniform.share:.3g} of softmax's time"
        out.print(f"{text}; the simpler choice is: --kernel {kernel}")
    elif result.gain is not None:
        how = f"{result.gain:.1%} below" if result.gain >= WORTH else "as large as"
        plan = f"The plan's error is {how} that of {result.reference} everywhere"
        out.print(f"{plan}, at {result.points[0].share:.3g} of softmax's time.")
    out.print(f"Search: {result.steps} steps, {result.tried} plans tried, {result.seconds:.0f} s.")
    if result.noisy:
        out.print("The machine was noisy while costs were measured: a later search measures them again.")
