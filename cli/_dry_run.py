"""`--dry-run` of the verbs that train: what would be done, and what it would cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from linearize.jobs.dry_run import AnyJob
    from linearize.jobs.events import Event
    from linearize.modeling.plan import Plan

HELP = "check everything, time a few steps, print what it would cost (time, memory, room), and write nothing"


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument("--dry-run", action="store_true", help=HELP)


def show_bill(job: AnyJob, *, as_json: bool, planned: Callable[[Console, Plan], None] | None = None) -> int:
    """Check a job and print its plan and its bill.

    Args:
        job: the job.
        as_json: whether stdout is for JSON.
        planned: called with the console and the plan once the plan is made.

    Returns:
        0 where it fits; 2 where it does not.
    """
    from linearize.cli._output import Heartbeat, console, plan_table, print_json
    from linearize.jobs.dry_run import dry_run
    from linearize.jobs.events import Noted, Planned, PositionsExtended, Started

    out = console(to_stderr=as_json)
    plans = []

    def on_event(event: Event) -> None:
        if isinstance(event, Planned):
            plans.append(event.plan)
            out.print(plan_table(event.plan))
            if planned is not None:
                planned(out, event.plan)
        elif isinstance(event, PositionsExtended):
            out.print(f"Inputs: {event.report.note}", markup=False)
        elif isinstance(event, Noted):
            out.print(event.text, markup=False)
        elif isinstance(event, Started):
            beat.what = event.what
            if out.is_terminal:
                out.print(f"... {event.what}", markup=False)

    with Heartbeat(out, "checking") as beat:
        bill = dry_run(job, on_event)
    for line in bill.lines():
        out.print(line, markup=False, soft_wrap=True)
    if as_json:
        print_json((plans[0].to_dict() if plans else {}) | {"bill": bill.to_dict()})
    return 2 if bill.problems else 0
