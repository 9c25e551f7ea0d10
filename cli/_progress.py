"""What the verbs that train show while they work: events, tables of results, findings, and the bill of a dry run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, Group

    from linearize.cli._output import Heartbeat, Screen, StepProgress
    from linearize.fidelity.measure import Fidelity
    from linearize.jobs.advice import Findings
    from linearize.jobs.convert import ConvertResult
    from linearize.jobs.dry_run import AnyJob
    from linearize.jobs.events import Callback, Event
    from linearize.kernel_search.result import SearchResult
    from linearize.modeling.plan import Plan
    from linearize.training.alignment.loop import AlignResult
    from linearize.training.stage_one.loop import DistillResult


def kept_states(target: str, *endings: str) -> str:
    """Say what an interrupted search, stage one or alignment left on disk (folders `<target>.<ending>`)."""
    from linearize.training.stage_one.run import StateFolder

    for ending in endings or ("align", "stage1", "search"):
        folder = f"{target.rstrip('/')}.{ending}"
        steps = StateFolder(folder, 1).steps()
        if steps:
            return f"the state of step {steps[-1]} is in {folder}; resume with the same line and --resume"
    return "nothing was written; --save-every N keeps a state every N steps"


@contextlib.contextmanager
def shown(
    out: Screen, target: str, planned: Callable[[Plan], None] | None = None, learns: str = "Stage one learns from"
) -> Iterator[Callback]:
    """Give a callback that shows the events of a conversion, distillation or alignment.

    Args:
        out: the console.
        target: the folder that the job makes.
        planned: called with the plan once the model is loaded.
        learns: introduces the data.
    """
    from linearize.cli._output import at_work, plan_table
    from linearize.jobs.events import Planned

    with at_work(out, "loading the model", lambda: kept_states(target)) as (progress, beat):

        def on_event(event: Event) -> None:
            if isinstance(event, Planned):
                out.print(plan_table(event.plan))
                if planned is not None:
                    planned(event.plan)
            else:
                show_training(event, out, progress, beat, learns)

        yield on_event


def show_result(out: Console, result: ConvertResult, *, as_json: bool) -> None:
    """Print what a conversion, distillation or alignment made, and what it found."""
    from linearize.cli._output import print_json

    out.print(f"Saved {result.output} ({result.parameters_added:,} parameters added, {result.seconds:.0f} s).")
    if result.findings is not None:
        show_findings(out, result.findings)
    if as_json:
        print_json(result.to_dict())


def show_bill(job: AnyJob, *, as_json: bool, planned: Callable[[Console, Plan], None] | None = None) -> int:
    """Check a job and print its plan and its bill.

    Args:
        job: the job.
        as_json: whether stdout is for JSON.
        planned: called with the console and the plan once the plan is made.

    Returns:
        0 if it fits, else 2.
    """
    from linearize.cli._output import Heartbeat, console, plan_table, print_json
    from linearize.jobs import events
    from linearize.jobs.dry_run import dry_run

    out = console(to_stderr=as_json)
    plans = []

    def on_event(event: Event) -> None:
        match event:
            case events.Planned(plan):
                plans.append(plan)
                out.print(plan_table(plan))
                if planned is not None:
                    planned(out, plan)
            case events.PositionsExtended(report):
                out.print(f"Inputs: {report.note}")
            case events.Noted(text):
                out.print(text)
            case events.Started(what):
                beat.what = what
                if out.is_terminal:
                    out.print(f"... {what}")

    with Heartbeat(out, "checking") as beat:
        bill = dry_run(job, on_event)
    for line in bill.lines():
        out.print(line, soft_wrap=True)
    if as_json:
        print_json((plans[0].to_dict() if plans else {}) | {"bill": bill.to_dict()})
    return 2 if bill.problems else 0


def show_findings(out: Console, findings: Findings) -> None:
    """Print what a job found and what comes next; lines to copy are not folded."""
    for line in findings.lines():
        out.print(line, soft_wrap=True)


def as_lines(out: Console) -> Callback:
    """Return a callback that prints a line at the start of anything slow."""
    from linearize.core.events import Started

    def on_event(event: Event) -> None:
        if isinstance(event, Started):
            out.print(f"... {event.what}", markup=False)

    return on_event


def show_training(
    event: Event, out: Console, progress: StepProgress, beat: Heartbeat, learns: str = "Stage one learns from"
) -> None:
    """Show an event of a search, of stage one or of the alignment; `learns` introduces the data."""
    from linearize.jobs import events

    match event:
        case events.PositionsExtended(report):
            out.print(f"Inputs: {report.note}")
        case events.DataOpened(description):
            out.print(f"{learns}: {description}")
            beat.what = "measuring how close the kernels are"
        case events.StepDone(report):
            progress(report)
            beat.what = f"training, {progress.short(report)}"
        case events.Noted(text):
            out.print(text)
        case events.Started(what):
            beat.what = what
        case events.Searched(result):
            progress.stop()
            beat.what = "what follows the search"
            show_search(out, result)
        case events.Distilled(result):
            progress.stop()
            beat.what = "what follows stage one"
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


def fidelity_table(before: Fidelity, after: Fidelity) -> Group:
    """Show how close each layer is to softmax, before and after stage one."""
    from linearize.cli._output import number, table

    figures = ("kl", "total_variation", "negative_share", "output_error")
    columns = ["layer", "kernel", "KL (nats/query)", "total variation", "negative weights", "output error"]
    rows = [
        [new.module, new.kernel, *(f"{number(getattr(old, f))} > {number(getattr(new, f))}" for f in figures)]
        for old, new in zip(before.layers, after.layers, strict=True)
    ]
    rows.append(["mean", "", *(f"{number(before.mean(f))} > {number(after.mean(f))}" for f in figures)])
    if after.mean("window_error") is not None:
        # The control: softmax's weight outside the window, and the error of the window alone.
        for row, layer in zip(rows, after.layers, strict=False):
            row += [number(layer.far_mass), number(layer.window_error)]
        rows[-1] += [number(after.mean("far_mass")), number(after.mean("window_error"))]
        columns += ["far mass", "window alone"]
    title = f"Kernel against softmax, before > after stage one ({before.queries} held-out queries)"
    return table(title, columns, rows, right=tuple(range(2, len(columns))))


def closeness_table(result: AlignResult) -> Group:
    """Show how close the whole model is to its teacher, before and after the alignment."""
    from linearize.cli._output import table

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
    """Print each layer's choice with its reason, and the points."""
    from linearize.cli._output import table
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
            "-" if point.bytes is None else f"{point.bytes / 2**20:,.0f}",
        ]
        for point in result.points
    ]
    columns = ["choice", "kernels", "error", "pooled cosine", "of softmax's time", "seconds", "MiB"]
    title = f"Whole model against its original, not aligned; error: {result.figure}"
    out.print(table(title, columns, points, right=(2, 3, 4, 5, 6)))
    out.print("*: nothing else is both closer and cheaper. -: memory was not measured.")
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
        out.print("The machine was noisy while costs were measured; measure them again with --remeasure.")
