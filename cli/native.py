"""Compile the native op, linear attention on the CPU in C, and check it; or say whether it is there."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """examples:
  linearize native
  linearize native --build
  linearize native --remove

The native op is optional: it makes converted models and stage one faster on the CPU, and everything works without it.
The first `convert`, `demo` or `bench` compiles it in some seconds, if there is a C compiler (gcc or clang); --build
compiles it now and compares it with the ops in PyTorch. The library is stored in the user's cache folder. It is loaded
from there only if other users cannot write there and if it is the library that was built. LINEARIZE_NATIVE=0, or
--no-native of those verbs, turns off compiling and using it; LINEARIZE_NATIVE=1 uses an existing library and compiles
nothing. If the processor multiplies bf16 numbers directly ("bf16 products"), the kernels of a bf16 model round their
projections to bf16, as the model's other layers do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--build", action="store_true", help="compile it, and compare it with the ops in PyTorch")
    what.add_argument("--remove", action="store_true", help="delete what was compiled")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_native(parser: argparse._ActionsContainer) -> None:
    """Declare `--no-native` of a verb that profits from the native op."""
    parser.add_argument(
        "--no-native",
        action="store_true",
        help="neither compile nor use the native op for the CPU, as LINEARIZE_NATIVE=0 (see `linearize native`)",
    )


def prepare_native(args: argparse.Namespace, device: str, out: Console | None) -> None:
    """Compile the native op if it is wanted and missing, or say in one line why not; never an error.

    Args:
        args: with `no_native`.
        device: where the verb runs.
        out: console for the line; None if nothing is compiled.
    """
    from linearize.attention.native import SWITCH
    from linearize.attention.native.build import obstacle, worth_building
    from linearize.checkpoint.loading import check_device

    if args.no_native:
        # Also for the processes that measure memory.
        os.environ[SWITCH] = "0"
    elif out is None or int(os.environ.get("WORLD_SIZE", "1")) > 1 or check_device(device) != "cpu":
        return
    elif worth_building():
        _build_once(out)
    elif why := obstacle():
        out.print(f"Native op: not compiled, continuing without it ({why}).", soft_wrap=True)


def _build_once(out: Console) -> None:
    from linearize.attention.native.build import agreement, build, check_agreement, note_failure
    from linearize.core.errors import ConfigError

    start = time.perf_counter()
    try:
        with out.status("compiling the native op, once"):
            build()
            check_agreement(agreement())
    except ConfigError as error:
        note_failure(error)
        why = str(error).removeprefix("native op: ")
        out.print(f"Native op: not compiled, continuing without it ({why}).", soft_wrap=True)
        return
    seconds = time.perf_counter() - start
    text = f"Native op: compiled once in {seconds:.0f} s and used on this CPU from now on"
    out.print(f"{text} (--no-native turns it off; linearize native --remove deletes it).", soft_wrap=True)


def run(args: argparse.Namespace) -> int:
    """Build, remove or say what is there."""
    from linearize.attention.native import SWITCH, engine
    from linearize.attention.native.build import agreement, build, check_agreement, compiler, remove
    from linearize.attention.native.locate import cache_folder, compiled, shipped
    from linearize.cli._output import console, print_json, table
    from linearize.core.errors import ConfigError

    out = console(to_stderr=args.json)
    removed = remove() if args.remove else []
    if args.build:
        with out.status("compiling"):
            build()
    library, problem = _library(compiled, shipped)
    if library is None and cache_folder() is None:
        raise ConfigError(
            "native op: got no home folder, expected one for what is compiled; set HOME or XDG_CACHE_HOME"
        )
    loaded = engine()
    rows = agreement() if args.build and loaded is not None else []
    facts = {
        "library": None if library is None else str(library),
        "built": library is not None,
        "used": loaded is not None,
        "threads": "torch's" if loaded is not None and loaded.parallel else "one",
        "bf16_products": loaded is not None and loaded.pairs,
        "compiler": compiler(),
        "problem": problem,
        "removed": [str(file) for file in removed],
        "agreement": [row._asdict() for row in rows],
    }
    if args.json:
        print_json(facts)
        check_agreement(rows)
        return 0
    words = {True: "yes", False: "no", None: "none found"}
    lines = [("removed", file) for file in removed]
    names = ("library", "built", "used", "threads", "bf16_products", "compiler", *(["problem"] if problem else []))
    lines += [(name.replace("_", " "), words.get(facts[name], facts[name])) for name in names]
    for label, text in lines:
        out.print(f"{label:<20}{text}", soft_wrap=True)
    if facts["built"] and not facts["used"]:
        out.print(f"It was built but is not used: {SWITCH}=0, or it does not load here.")
    if loaded is not None and not loaded.parallel:
        text = "It runs in one thread, as its OpenMP is not that of torch; gcc's is (CC=gcc linearize native --build)."
        out.print(text, soft_wrap=True)
    if rows:
        cells = [[row.kernel, row.direction, f"{row.error:.1e}"] for row in rows]
        out.print(table("largest difference to the ops in PyTorch, relative", ["kernel", "", ""], cells, right=(2,)))
    check_agreement(rows)
    return 0


def _library(*finders: Callable[[], Path | None]) -> tuple[Path | None, str]:
    """Return the library that is or would be used, and what is wrong with one that takes precedence over it."""
    problem = ""
    for find in finders:
        try:
            if (path := find()) is not None:
                return path, problem
        except OSError as error:
            problem = problem or " ".join(str(error).split())
    return None, problem
