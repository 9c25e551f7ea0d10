"""Compile the native op, linear attention on the CPU in C, and check it; or say whether it is there."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

EPILOG = """examples:
  linearize native
  linearize native --build
  linearize native --remove

The native op is optional: it makes converted models and stage one faster on the CPU, and everything works without it.
The first `convert`, `demo` or `bench` compiles it, in some seconds, where there is a C compiler (gcc or clang); --build
does it now and compares it with the ops in PyTorch. The library goes into the user's cache folder, from where it is
loaded only if nobody else can write there and it is the one that was built. LINEARIZE_NATIVE=0, or --no-native of those
verbs, says no to both compiling and using it; LINEARIZE_NATIVE=1 uses what is there and compiles nothing unasked. Where
the processor multiplies bf16 numbers as they are ("bf16 products"), a bf16 model's kernels round their projections to
bf16, as its other layers have theirs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--build", action="store_true", help="compile it, and compare it with the ops in PyTorch")
    what.add_argument("--remove", action="store_true", help="delete what was compiled")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Build, remove or say what is there."""
    from linearize.attention.backends.self_test import agreement, check_agreement
    from linearize.cli._output import console, print_json, table
    from linearize.errors import ConfigError
    from linearize.native import SWITCH, engine
    from linearize.native.build import build, compiler, remove
    from linearize.native.locate import cache_folder, compiled, shipped

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
    found = engine()
    rows = agreement() if args.build and found is not None else []
    facts = {
        "library": None if library is None else str(library),
        "built": library is not None,
        "used": found is not None,
        "threads": "torch's" if found is not None and found.parallel else "one",
        "bf16_products": found is not None and found.pairs,
        "compiler": compiler(),
        "problem": problem,
        "removed": [str(file) for file in removed],
        "agreement": [row._asdict() for row in rows],
    }
    if args.json:
        print_json(facts)
    else:
        for file in removed:
            out.print(f"removed             {file}", markup=False, soft_wrap=True)
        for name in ("library", "built", "used", "threads", "bf16_products", "compiler"):
            out.print(f"{name.replace('_', ' '):<20}{_said(facts[name])}", markup=False, soft_wrap=True)
        if facts["problem"]:
            out.print(f"{'problem':<20}{facts['problem']}", markup=False, soft_wrap=True)
        if facts["built"] and not facts["used"]:
            out.print(f"It was built and is not used: {SWITCH}=0, or it does not load here.", markup=False)
        if found is not None and not found.parallel:
            out.print(
                "It runs in one thread: its OpenMP is not that of torch. gcc's is (CC=gcc linearize native --build).",
                markup=False, soft_wrap=True,
            )  # fmt: skip
        if rows:
            cells = [[row.kernel, row.direction, f"{row.error:.1e}"] for row in rows]
            out.print(
                table("largest difference to the ops in PyTorch, relative", ["kernel", "", ""], cells, right=(2,))
            )
    check_agreement(rows)
    return 0


def _library(*finders: Callable[[], Path | None]) -> tuple[Path | None, str]:
    """Return the library that is or would be used, and what is wrong with one that comes before it."""
    problem = ""
    for find in finders:
        try:
            if (path := find()) is not None:
                return path, problem
        except OSError as error:
            problem = problem or " ".join(str(error).split())
    return None, problem


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none found" if value is None else str(value)
