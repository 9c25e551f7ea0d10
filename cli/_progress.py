"""The progress of long work: a bar on a terminal, lines and a heartbeat in a log; also what Ctrl-C keeps."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from linearize.cli._output import ROOMY, Screen, closeness_table, fidelity_table, heads_lines, plan_table, show_search
from linearize.jobs import events
from linearize.jobs.events import Callback, Event, ignore

if TYPE_CHECKING:
    from linearize.jobs.events import Findings
    from linearize.kernel_search.result import SearchStep
    from linearize.training.alignment.loop import AlignStep
    from linearize.training.stage_one.loop import DistillResult, StepReport
    from linearize.training.stage_two.progress import TuneStep

    Report = StepReport | AlignStep | TuneStep | SearchStep

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
    except KeyboardInterrupt as interrupt:
        known = "" if isinstance(interrupt, Interrupted) else str(interrupt)
        raise Interrupted(known or kept()) from None


class StepProgress:
    """A bar with the loss on a terminal (without the bar on a narrow one), plain lines elsewhere.

    Before, between and after the steps, a terminal shows what is running, and for how long.
    """

    def __init__(self, out: Console) -> None:
        self.out = out
        self.bar: Progress | None = None
        self.waits_for = ""

    def wait(self, what: str, part: str = "") -> None:
        """Show on a terminal what is running, with how much of it is done, until the next step."""
        if not self.out.is_terminal:
            return
        if self.bar is None or what != self.waits_for:
            self.stop()
            columns = TextColumn("... {task.description}", markup=False), TimeElapsedColumn()
            # Redrawn seldom, because some of this work is timed.
            self.bar = Progress(*columns, console=self.out, transient=True, refresh_per_second=1)
            self.bar.add_task(what)
            self.bar.start()
            self.waits_for = what
        self.bar.update(self.bar.task_ids[0], description=f"{what}{part}")

    def __call__(self, report: Report) -> None:
        """Show a step."""
        if self.waits_for:
            self.stop()
        if not self.out.is_terminal:
            if report.step == 1 or report.held_out is not None:
                self.out.print(long(report))
            return
        roomy = self.out.width >= ROOMY
        if self.bar is None:
            count, loss = TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[loss]}")
            columns = [TextColumn("{task.description}"), count, TimeRemainingColumn(), loss]
            if roomy:
                columns[1:2] = [BarColumn(), count, TimeElapsedColumn()]
            self.bar = Progress(*columns, console=self.out)
            self.bar.add_task(stage_of(report), total=report.steps, loss="")
            self.bar.start()
        losses = list(report.losses.values())
        layers = f" (layers {min(losses):.2f} to {max(losses):.2f})" if roomy and losses else ""
        text = f"loss {report.loss:z.3f}{layers}"
        stage = stage_of(report)
        self.bar.update(self.bar.task_ids[0], description=stage, total=report.steps, completed=report.step, loss=text)
        if report.held_out is not None:
            self.out.print(long(report))

    def stop(self) -> None:
        """Remove the bar from the screen."""
        if self.bar is not None:
            self.bar.stop()
            self.bar, self.waits_for = None, ""


def stage_of(report: Report) -> str:
    """Return the stage of a step, and its phase."""
    return f"{report.stage}, {report.phase}" if report.phase else report.stage


def where(report: Report) -> str:
    """Return a step's number, elapsed time, remaining time, speed and peak memory of the device."""
    stage = f"{stage_of(report)}, " if report.phase else ""
    speed = ""
    if report.tokens and report.seconds:
        speed = f", {report.tokens / report.seconds:,.0f} tokens/s"
    elif report.pace:  # Pictures and sounds have no tokens.
        speed = f", {1 / report.pace:.3g} steps/s"
    times = f"{report.seconds:.0f} s, {report.left:.0f} s left"
    return f"{stage}step {report.step}/{report.steps}, {times}{speed}{device_memory()}"


def device_memory() -> str:
    """Return the most memory that tensors had on this process's CUDA device, as text; empty without one."""
    from torch import cuda

    return f", up to {cuda.max_memory_allocated() / 1e9:.1f} GB" if cuda.is_initialized() else ""


def short(report: Report) -> str:
    """Return a step's number, times and loss."""
    return f"{where(report)}: loss {report.loss:z.4f}"


def long(report: Report) -> str:
    """Return a step's number, times and all its losses."""
    names = numbered([name.removeprefix("logits/") for name in report.losses])
    named = zip(names, report.losses.values(), strict=True)
    layers = f"; per layer {' '.join(f'{name}:{loss:z.2f}' for name, loss in named)}" if report.losses else ""
    held_out = "" if report.held_out is None else f", held out {report.held_out:.4f}"
    return f"{short(report)}{held_out}{layers}"


def numbered(names: list[str]) -> list[str]:
    """Return the names of modules by their layer's number alone, where no two have the same; other names stay."""
    numbers = [re.findall(r"(?:^|\.)(\d+)(?:\.|$)", name) for name in names]
    short = [found[0] if len(found) == 1 else name for name, found in zip(names, numbers, strict=True)]
    return short if len(set(short)) == len(names) else names


class Work:
    """Shows the events of long work, as the callback of a job.

    Attributes:
        out: the console.
        also: called with each event after it was shown.
        beat: prints to a log what is still running.
        progress: the progress bar; between stages, what is running.
        findings: the job's findings, available at its end.
        saved: whether its result was written.
        measured_step: step whose measurement on the validation rows was the last to be shown.
    """

    def __init__(self, out: Screen, what: str, also: Callback = ignore) -> None:
        self.out, self.also = out, also
        self.beat, self.progress = Heartbeat(out, what), StepProgress(out)
        self.findings: Findings | None = None
        self.saved = False
        self.measured_step: float | None = None
        self._last: Report | None = None
        self._measured: set[str] = set()
        self._trained = False
        self._what = what

    def now(self, what: str, part: str = "") -> None:
        """Note what is running, and how much of it is done."""
        self._what, self.beat.what = what, f"{what}{part}"
        self.progress.wait(what, part)

    def __call__(self, event: Event) -> None:
        """Show an event."""
        out = self.out
        self.saved = self.saved or isinstance(event, events.Saved)
        match event:
            case events.Planned(plan):
                out.print(plan_table(plan))
                self.now("preparing the training")
            case events.HeadsChosen(plan):
                out.print("\n".join(heads_lines(plan)))
            case events.DataOpened(description):
                out.print(f"Data: {description}")
                self.now("measuring the start")
            case events.StepDone(report):
                self._last = report
                self.progress(report)
                self.beat.what = f"training, {short(report)}"
                if report.step == report.steps:
                    self.now("measuring the result")
            case events.Logged(entry):
                self._show_log(entry)
            case events.Noted(text):
                out.print(text)
            case events.Started(what):
                self.now(what)
            case events.Advanced(done, total):
                self.now(self._what, f", {done}/{total}")
            case events.Searched() | events.Distilled() | events.Aligned():
                self.progress.stop()
                self._show_stage(event)
            case events.Concluded(findings):
                self.findings = findings
        self.also(event)

    def _show_log(self, entry: dict[str, float]) -> None:
        """Show an entry of the trainer's log."""
        figures = figures_of(entry)
        # After its last step the trainer measures the kept state, which was usually measured before.
        if self._trained and figures in self._measured:
            return
        self._trained = self._trained or "train_loss" in entry
        self._measured.add(figures)
        if "eval_score" in entry:
            self.measured_step = entry["step"]
        # A line of a log also gives the remaining time, as the bar does on a terminal.
        timed = self._last is not None and self._last.step == entry["step"]
        place = where(self._last) if self._last and timed else f"step {entry['step']}/{entry['steps']}"
        self.out.print(f"{place}: {figures}")

    def _show_stage(self, event: events.Searched | events.Distilled | events.Aligned) -> None:
        """Show the result of a stage."""
        match event:
            case events.Searched(searched):
                show_search(self.out, searched)
                self.now("continuing after the search")
            case events.Distilled(distilled):
                self.out.print(summary_of(distilled))
                queries = f"({distilled.before.queries} held-out queries)"
                title = f"Kernel against softmax, before > after stage one {queries}"
                self.out.print(fidelity_table(title, distilled.after, distilled.before))
                self.now("continuing after stage one")
            case events.Aligned(aligned):
                self.out.print(closeness_table(aligned))
                self.now("continuing after the alignment")


@contextlib.contextmanager
def at_work(
    out: Screen, what: str, kept: Callable[[], str] = lambda: "nothing was written", also: Callback = ignore
) -> Iterator[Work]:
    """Show long work: its events, what is running (initially `what`), and the results kept on Ctrl-C.

    After an event was shown, `also` gets it.
    """
    work = Work(out, what, also)
    try:
        with work.beat:
            # Nothing was written yet, and `kept` may refer to the value that this function has not yielded yet.
            work.now(what)
            with on_interrupt(kept):
                yield work
    finally:
        work.progress.stop()


def as_lines(out: Console) -> Callback:
    """Return a callback that prints a line at the start of slow work."""

    def on_event(event: Event) -> None:
        if isinstance(event, events.Started):
            out.print(f"... {event.what}", markup=False)

    return on_event


HIDDEN = ("epoch", "total_flos", "eval_runtime", "train_runtime", "eval_model_preparation_time", "eval_score")
"""Entries of the trainer's log that tell nothing more; the score is one of the metrics."""
NAMES = {
    "train_loss": "mean loss",
    "grad_norm": "gradient norm",
    "eval_loss": "validation loss",
    "eval_selection": "held-out loss",
    "eval_selection_error": "its standard error",
}


def figures_of(entry: Mapping[str, float]) -> str:
    """Return the figures of an entry of the trainer's log under names of people."""
    shown = {name: value for name, value in entry.items() if isinstance(value, float) and "per_second" not in name}
    names = {name: NAMES.get(name, name.removeprefix("eval_").replace("_", " ")) for name in shown}
    whole = {name: value.is_integer() and abs(value) >= 1e4 for name, value in shown.items()}
    return ", ".join(
        f"{names[name]} {value:{',.0f' if whole[name] else '.4g'}}"
        for name, value in shown.items()
        if name not in HIDDEN
    )


def summary_of(result: DistillResult) -> str:
    """Return one line about the result of stage one."""
    if result.stopped == "nothing to learn":
        return "Stage one skipped: no kernel of this plan has anything to learn."
    return (
        f"Stage one: {result.steps} steps in {result.seconds:.0f} s, ended by {result.stopped}; "
        f"kept step {result.best_step}."
    )
