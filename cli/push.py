"""Upload a converted checkpoint to the Hub, with its model card."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

EPILOG = """examples:
  linearize push ./roberta-base-hedgehog alice/roberta-base-hedgehog
  linearize push ./roberta-base-hedgehog alice/roberta-base-hedgehog --private --dry-run

Only the files of a checkpoint are sent: weights, config, tokenizer, card, code, log. The list is printed first.

Log in first: hf auth login (or set HF_TOKEN). The token is neither printed nor stored by linearize."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", metavar="DIR", help="folder that `linearize convert` made")
    parser.add_argument("repo", metavar="USER/NAME", help="repository on the Hub; created if missing")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument(
        "--include", metavar="PATTERN", action="append", default=[], help="also send these files (onnx/*)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Upload."""
    from linearize.cli._output import print_json

    if args.dry_run:
        from linearize.checkpoint.push import check_repo, files_to_push

        check_repo(args.repo)
        if args.json:
            sent, left = files_to_push(args.folder, args.include)
            print_json({"url": None, "files": sent, "left_out": left})
        else:
            _print_files(args.folder, args.repo, args.include, to_stderr=False)
        return 0
    url = upload(args.folder, args.repo, private=args.private, include=args.include, to_stderr=args.json)
    if args.json:
        print_json({"url": url})
    return 0


def upload(folder: str, repo: str, *, private: bool, include: Sequence[str] = (), to_stderr: bool) -> str:
    """Print the files, upload them, and print and return the address."""
    from linearize.checkpoint.push import push
    from linearize.cli._output import console, on_interrupt

    again = f"the checkpoint is in {folder}, the upload is not complete; continue with: linearize push {folder} {repo}"
    with on_interrupt(lambda: again):
        _print_files(folder, repo, include, to_stderr=to_stderr)
        url = push(folder, repo, private, include=include)
    console(to_stderr=to_stderr).print(f"Uploaded {folder} to {url}")
    return url


def _print_files(folder: str, repo: str, include: Sequence[str], *, to_stderr: bool) -> None:
    from linearize.checkpoint.push import files_to_push
    from linearize.cli._output import console

    sent, left = files_to_push(folder, include)
    out = console(to_stderr=to_stderr)
    out.print(f"Files for {repo}: {', '.join(sent)}")
    if left:
        more = f" and {len(left) - 10} more" if len(left) > 10 else ""
        out.print(f"Not sent (--include PATTERN sends them): {', '.join(left[:10])}{more}")
