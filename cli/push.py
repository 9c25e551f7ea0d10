"""Upload a converted checkpoint to the Hub, with its model card."""

from __future__ import annotations

import argparse

EPILOG = """examples:
  linearize push ./roberta-base-hedgehog alice/roberta-base-hedgehog
  linearize push ./roberta-base-hedgehog alice/roberta-base-hedgehog --private

Log in first: hf auth login (or set HF_TOKEN). The token is neither printed nor stored by linearize."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", metavar="DIR", help="folder that `linearize convert` made")
    parser.add_argument("repo", metavar="USER/NAME", help="repository on the Hub; made if it is not there")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Upload."""
    from linearize.cli._output import print_json

    url = upload(args.folder, args.repo, private=args.private, to_stderr=args.json)
    if args.json:
        print_json({"url": url})
    return 0


def upload(folder: str, repo: str, *, private: bool, to_stderr: bool) -> str:
    """Upload a folder, say where to, and return the address."""
    from linearize.checkpoint.push import push
    from linearize.cli._output import console, on_interrupt

    again = f"the checkpoint lies in {folder}, the upload is not complete; go on: linearize push {folder} {repo}"
    with on_interrupt(lambda: again):
        url = push(folder, repo, private)
    console(to_stderr=to_stderr).print(f"Uploaded {folder} to {url}", markup=False)
    return url
