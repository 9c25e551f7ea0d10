"""The native op for the verbs that profit from it: compiled by the first of them, unless somebody said no."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def add_native(parser: argparse._ActionsContainer) -> None:
    """Declare the option that says no."""
    parser.add_argument(
        "--no-native",
        action="store_true",
        help="neither compile nor use the native op for the CPU, as LINEARIZE_NATIVE=0 (see `linearize native`)",
    )


def prepare_native(args: argparse.Namespace, device: str, out: Console | None) -> None:
    """Compile the native op if it is wanted and not there, or say why not: in one line, and never an error.

    Args:
        args: with `no_native`.
        device: where the verb runs.
        out: console for the line; None where nothing is compiled.
    """
    from linearize.native import SWITCH

    if args.no_native:
        # For the processes that measure memory too.
        os.environ[SWITCH] = "0"
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or not _on_cpu(device):
        return
    from linearize.native.build import obstacle, worth_building

    if worth_building():
        assert out is not None
        _build(out)
    elif out is not None and (why := obstacle()):
        out.print(f"Native op: not compiled, going on without it ({why}).", markup=False, soft_wrap=True)


def _on_cpu(device: str) -> bool:
    from linearize.loading import check_device

    return check_device(device) == "cpu"


def _build(out: Console) -> None:
    from linearize.attention.backends.self_test import agreement, check_agreement
    from linearize.errors import ConfigError
    from linearize.native.build import build, note_failure

    start = time.perf_counter()
    try:
        with out.status("compiling the native op, once"):
            build()
            check_agreement(agreement())
    except ConfigError as error:
        note_failure(error)
        why = str(error).removeprefix("native op: ")
        out.print(f"Native op: not compiled, going on without it ({why}).", markup=False, soft_wrap=True)
        return
    seconds = time.perf_counter() - start
    out.print(
        f"Native op: compiled once in {seconds:.0f} s, from now on used on this CPU (--no-native: not; "
        "linearize native --remove deletes it).",
        markup=False,
        soft_wrap=True,
    )
