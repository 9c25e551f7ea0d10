"""Run the verbs that make, show, export and upload checkpoints: `init`, `inspect`, `export`, `push`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace

from linearize.checkpoint import push as hub
from linearize.checkpoint.inspect import inspect_checkpoint
from linearize.cli._output import Screen, plan_table
from linearize.cli._progress import as_lines, at_work, on_interrupt
from linearize.core.errors import UnsupportedModelError
from linearize.jobs.config import ExportJob, InitJob


def init(job: InitJob, args: argparse.Namespace, out: Screen) -> object:
    """Make the model and print its plan."""
    from linearize.jobs.init import init_checkpoint

    if job.kernel is None and job.layers is None:
        job = replace(job, kernel="hedgehog")
    plan = init_checkpoint(job)
    assert plan is not None
    out.print(plan_table(plan))
    out.print(f"Saved {job.output}, untrained.")
    return {"output": job.output, "plan": plan.to_dict()}


def inspect(args: argparse.Namespace, out: Screen) -> object:
    """Print the facts."""
    info = inspect_checkpoint(args.model)
    plan = info.plan
    if not info.converted:
        from linearize.checkpoint.loading import load_model
        from linearize.conversion.plan import plan as plan_of

        # A plan that is not carried out: it lists every attention layer and whether it can be converted.
        with contextlib.suppress(UnsupportedModelError):
            plan = plan_of(load_model(args.model).model, "hedgehog")
    if args.json:
        named = {"plan": None if plan is None else plan.to_dict(), "provenance": dict(info.provenance.values)}
        return asdict(info) | named
    for label, value in info.rows():
        out.print(f"{label:<20}{value}")
    if plan is not None:
        out.print(plan_table(plan))
    return None


def export(job: ExportJob, args: argparse.Namespace, out: Screen) -> object:
    """Export and print the difference from PyTorch."""
    from linearize.jobs.export import export_checkpoint

    with at_work(out, "exporting", also=as_lines(out)) as work:
        result = export_checkpoint(job, work)
    out.print(f"Saved {result.output}.")
    return asdict(result)


def push(args: argparse.Namespace, out: Screen) -> object:
    """Upload, or list the files that would be sent."""
    if not args.dry_run:
        return {"url": upload(args.folder, args.repo, out, private=args.private, include=args.include)}
    hub.check_repo(args.repo)
    sent, left = show_files(args.folder, args.repo, out, args.include)
    return {"url": None, "files": sent, "left_out": left}


def upload(folder: str, repo: str, out: Screen, *, private: bool, include: Sequence[str] = ()) -> str:
    """Print the files, upload them, and print and return the address."""
    again = f"the checkpoint is in {folder}; the upload is incomplete; continue with: linearize push {folder} {repo}"
    with on_interrupt(lambda: again):
        show_files(folder, repo, out, include)
        url = hub.push(folder, repo, private, include=include)
    out.print(f"Uploaded {folder} to {url}")
    return url


def show_files(folder: str, repo: str, out: Screen, include: Sequence[str]) -> tuple[list[str], list[str]]:
    """Print and return the files to send and those left out."""
    sent, left = hub.files_to_push(folder, include)
    out.print(f"Files for {repo}: {', '.join(sent)}")
    if not hub.is_converted(folder):
        out.print(f"{folder} is not converted: its attention is still softmax.")
    if left:
        more = f" and {len(left) - 10} more" if len(left) > 10 else ""
        out.print(f"Not sent (--include PATTERN sends them): {', '.join(left[:10])}{more}")
    return sent, left
