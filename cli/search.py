"""Choose the kernel of every layer by how close each candidate comes and what it costs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from linearize.cli._options import add_json, add_options, take_options
from linearize.cli.native import add_native, prepare_native
from linearize.jobs.config import SearchJob

if TYPE_CHECKING:
    from linearize.jobs.events import Event

EPILOG = """examples:
  linearize search roberta-base --plan-out plan.yaml              # as fast as hedgehog everywhere, and closer
  linearize search roberta-base --budget cost=0.25 --length 8192  # a quarter of softmax's time at 8,192 tokens
  linearize search roberta-base --budget softmax=1,time=30m       # one layer may stay softmax; half an hour
  linearize search gpt2 --candidates hedgehog,hedgehog:window=32,flexformer_n:frequencies=32 --plot points.png
  linearize convert roberta-base --plan plan.yaml                 # carry a plan out, perhaps edited
  linearize convert roberta-base --kernel auto                    # search and convert in one

Candidates of all layers learn in one pass of the frozen model: all of them some steps, the better half of each layer
twice as many, and so on. Costs are measured here, next to softmax, and remembered in the cache folder. Then the best
plans within the budget, and each kernel in every layer, are tried on the whole model on held-out data, as errors of
single layers misrank. A window among the candidates is tried without its kernel too. Ctrl-C keeps the best plan so far;
--save-every N keeps states for --resume."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, SearchJob)
    add_native(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Search and print."""
    from linearize.cli._output import Heartbeat, StepProgress, console, on_interrupt, print_json
    from linearize.cli._progress import kept_states, show_training
    from linearize.jobs import events
    from linearize.jobs.search import search_checkpoint

    job = take_options(args, SearchJob)
    out = console(to_stderr=args.json)
    prepare_native(args, job.device, out)
    progress, beat = StepProgress(out), Heartbeat(out, "loading the model")

    def on_event(event: Event) -> None:
        if isinstance(event, events.DataOpened):
            out.print(f"The search learns from: {event.description}", markup=False)
        else:
            show_training(event, out, progress, beat)

    try:
        with beat, on_interrupt(lambda: kept_states(job.target(), "search")):
            result = search_checkpoint(job, on_event)
    finally:
        progress.stop()
    if job.plan_out:
        out.print(
            f"Plan: {job.plan_out}; carry it out: linearize convert {job.model} --plan {job.plan_out}", markup=False
        )
    if job.plot:
        out.print(f"Picture: {job.plot}", markup=False)
    if args.json:
        print_json({"plan": result.plan.to_dict(), **result.to_dict()})
    return 0
