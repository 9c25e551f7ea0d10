"""What `convert` and `distill` show while they run, and what an interrupted one has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from linearize.cli._output import Heartbeat, StepProgress
    from linearize.distillation.loop import DistillResult
    from linearize.jobs.convert import ConvertResult
    from linearize.jobs.events import Callback, Event
    from linearize.jobs.findings import Findings
    from linearize.modeling.plan import Plan


def kept_states(target: str, *endings: str) -> str:
    """Say what an interrupted search, stage one or alignment has left on disk (folders `<target>.<ending>`)."""
    from linearize.distillation.state import StateFolder

    for ending in endings or ("align", "stage1", "search"):
        folder = f"{target.rstrip('/')}.{ending}"
        steps = StateFolder(folder, 1).steps()
        if steps:
            break
    else:
        return "nothing was written; --save-every N keeps a state every N steps"
    return f"the state of step {steps[-1]} lies in {folder}; go on with the same line and --resume"


def show(
    work: Callable[[Callback], ConvertResult],
    target: str,
    *,
    as_json: bool,
    planned: Callable[[Console, Plan], None] | None = None,
) -> int:
    """Run a conversion or distillation, show what happens, and print its result.

    Args:
        work: what to run; gets a callback.
        target: the folder that it makes.
        as_json: whether stdout is for JSON.
        planned: called with the console and the plan once the model is loaded and its plan is made.
    """
    from linearize.cli._output import Heartbeat, StepProgress, console, on_interrupt, plan_table, print_json
    from linearize.jobs.events import Planned, PositionsExtended

    # With --json, stdout is for the program that reads it and people look at stderr.
    out = console(to_stderr=as_json)
    progress = StepProgress(out)
    beat = Heartbeat(out, "loading the model")

    def on_event(event: Event) -> None:
        if isinstance(event, Planned):
            out.print(plan_table(event.plan))
            if planned is not None:
                planned(out, event.plan)
        elif isinstance(event, PositionsExtended):
            out.print(f"Inputs: {event.report.note}", markup=False)
        else:
            show_training(event, out, progress, beat)

    try:
        with beat, on_interrupt(lambda: kept_states(target)):
            result = work(on_event)
    finally:
        progress.stop()
    added, seconds = result.parameters_added, result.seconds
    out.print(f"Saved {result.output} ({added:,} parameters added, {seconds:.0f} s).", markup=False)
    if result.findings is not None:
        show_findings(out, result.findings)
    if as_json:
        print_json(result.to_dict())
    return 0


def show_findings(out: Console, findings: Findings) -> None:
    """Print what a job has found, and what comes next; what is to be copied is not folded."""
    for line in findings.lines():
        out.print(line, markup=False, soft_wrap=True)


def as_lines(out: Console) -> Callback:
    """Return a callback that writes a line for each slow thing that begins."""
    from linearize.events import Started

    def on_event(event: Event) -> None:
        if isinstance(event, Started):
            out.print(f"... {event.what}", markup=False)

    return on_event


def show_training(event: Event, out: Console, progress: StepProgress, beat: Heartbeat) -> None:
    """Show an event of stage one or of the alignment behind it."""
    from linearize.cli._output import closeness_table, fidelity_table
    from linearize.jobs import events

    match event:
        case events.DataOpened(description):
            out.print(f"Stage one learns from: {description}", markup=False)
            beat.what = "measuring how close the kernels are"
        case events.StepDone(report):
            progress(report)
            beat.what = f"training, {progress.short(report)}"
        case events.Noted(text):
            out.print(text, markup=False)
        case events.Started(what):
            beat.what = what
        case events.Searched(result):
            from linearize.cli._search import show_search

            progress.stop()
            beat.what = "what follows the search"
            show_search(out, result)
        case events.Distilled(result):
            beat.what = "what follows stage one"
            progress.stop()
            out.print(summary_of(result))
            out.print(fidelity_table(result.before, result.after))
        case events.Aligned(result):
            progress.stop()
            out.print(closeness_table(result))


def summary_of(result: DistillResult) -> str:
    """Say in one line what stage one did."""
    if result.stopped == "nothing to learn":
        return "Stage one skipped: no kernel of this plan has anything to learn."
    return (
        f"Stage one: {result.steps} steps in {result.seconds:.0f} s, ended by {result.stopped}; "
        f"kept step {result.best_step}."
    )
