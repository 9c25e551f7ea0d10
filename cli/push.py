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
    from linearize.checkpoint.push import push
    from linearize.cli._output import console, print_json

    url = push(args.folder, args.repo, args.private)
    if args.json:
        print_json({"url": url})
    else:
        console().print(f"Uploaded {args.folder} to {url}", markup=False)
    return 0
