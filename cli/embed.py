"""Run `embed`: vectors of documents and of their spans."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from linearize.cli._output import Screen
from linearize.cli._progress import at_work
from linearize.cli.native import prepare_native
from linearize.jobs.config import EmbedJob
from linearize.jobs.embed import embed_dataset, work_folder


def embed(job: EmbedJob, args: argparse.Namespace, out: Screen) -> object:
    """Embed the documents and print what was written."""
    prepare_native(args, job.device, out)
    work = work_folder(job)

    def kept() -> str:
        if not work.exists():
            return "nothing was written"
        return f"finished parts are in {work}; continue with the same line and --resume"

    with at_work(out, "opening the model", kept) as shown:
        result = embed_dataset(job, shown)
    spans = f" and {result.spans:,} spans of up to {job.spans} tokens" if job.spans else ""
    speed = f"{result.tokens:,} tokens in {result.seconds:.0f} s"
    out.print(f"{result.documents:,} documents{spans}, vectors of {result.size} numbers ({speed}).")
    if result.cut:
        out.print(f"Longer than the model reads, and cut: {result.cut:,} of {result.documents:,} documents.")
    out.print(f"Saved {result.output}.")
    return asdict(result)
