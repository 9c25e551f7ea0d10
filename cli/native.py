"""Run `native`; also the preparation of the native op, and the listing of backends, for other verbs."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Mapping

import torch

from linearize.attention.backends.choose import Explanation, explain
from linearize.attention.factory import build_mixer
from linearize.attention.mixer import Mixer
from linearize.attention.native import SWITCH, engine
from linearize.attention.native import build as building
from linearize.attention.native.locate import cache_folder, compiled, shipped
from linearize.checkpoint.loading import check_device
from linearize.cli._output import Screen, print_json, table
from linearize.core.errors import ConfigError
from linearize.core.registry import Values
from linearize.modeling.plan import Plan


def prepare_native(args: argparse.Namespace, device: str, out: Screen | None) -> None:
    """Compile the native op if it is wanted and missing, or print in one line why not; this never fails.

    Args:
        args: the parsed arguments, with `no_native`.
        device: device that the verb runs on.
        out: console for the line; None: compile nothing.
    """
    if args.no_native:
        # Also for the processes that measure memory.
        os.environ[SWITCH] = "0"
    elif out is None or int(os.environ.get("WORLD_SIZE", "1")) > 1 or check_device(device) != "cpu":
        return
    elif building.worth_building():
        start = time.perf_counter()
        try:
            with out.status("compiling the native op, once"):
                building.build()
                building.check_agreement(building.agreement())
        except ConfigError as error:
            building.note_failure(error)
            why = str(error).removeprefix("native op: ")
            out.print(f"Native op: not compiled, continuing without it ({why}).", soft_wrap=True)
        else:
            seconds = time.perf_counter() - start
            text = f"Native op: compiled once in {seconds:.0f} s and used on this CPU from now on"
            out.print(f"{text} (--no-native turns it off; linearize native --remove deletes it).", soft_wrap=True)
    elif why := building.obstacle():
        out.print(f"Native op: not compiled, continuing without it ({why}).", soft_wrap=True)


def native(args: argparse.Namespace, out: Screen) -> None:
    """Build or remove the library, and print its state.

    Raises:
        ConfigError: for two options that exclude each other, if the library cannot be compiled or gives wrong results,
            or if there is no folder for it.
    """
    if args.build and args.remove:
        raise ConfigError("native: got --build and --remove, expected one of them")
    removed = building.remove() if args.remove else []
    if args.build:
        with out.status("compiling"):
            building.build()
    library, problem = None, ""
    for find in (compiled, shipped):
        try:
            library = library or find()
        except OSError as error:
            # Another library takes precedence over the one that is used, but has a problem.
            problem = problem or " ".join(str(error).split())
    if library is None and cache_folder() is None:
        raise ConfigError("native op: got no home folder for the compiled library; set HOME or XDG_CACHE_HOME")
    loaded = engine()
    rows = building.agreement() if args.build and loaded is not None else []
    facts: Values = {
        "library": None if library is None else str(library),
        "built": library is not None,
        "used": loaded is not None,
        "threads": "torch's" if loaded is not None and loaded.parallel else "one",
        "bf16_products": loaded is not None and loaded.pairs,
        "compiler": building.compiler(),
        "problem": problem,
        "removed": [str(file) for file in removed],
        "agreement": [row._asdict() for row in rows],
    }
    if args.json:
        print_json(facts)
        building.check_agreement(rows)
        return
    words = {True: "yes", False: "no", None: "none found"}
    lines: list[tuple[str, object]] = [("removed", file) for file in removed]
    names = ("library", "built", "used", "threads", "bf16_products", "compiler", *(["problem"] if problem else []))
    lines += [(name.replace("_", " "), words.get(facts[name], facts[name])) for name in names]
    for label, text in lines:
        out.print(f"{label:<20}{text}", soft_wrap=True)
    if facts["built"] and not facts["used"]:
        out.print(f"It was built but is not used: {SWITCH}=0, or it cannot be loaded here.")
    if loaded is not None and not loaded.parallel:
        note = "It runs in one thread: its OpenMP is not torch's, but gcc's is (CC=gcc linearize native --build)."
        out.print(note, soft_wrap=True)
    if rows:
        cells = [[row.kernel, row.direction, f"{row.error:.1e}"] for row in rows]
        out.print(table("largest relative difference from the ops in PyTorch", ["kernel", "", ""], cells, right=(2,)))
    building.check_agreement(rows)


def explain_plan(out: Screen, plan: Plan, tokens: int, device: str) -> None:
    """Print the backends of a plan's layers, with equal layers grouped."""
    device = check_device(device)
    layers: dict[str, Mixer] = {}
    for number, layer in enumerate(plan.layers):
        if layer.converted:
            mixer = build_mixer(*layer.mixer)
            mixer.reset_parameters(torch.Generator().manual_seed(0))
            layers[str(number if layer.index is None else layer.index)] = mixer.to(device)
    explain_layers(out, layers, tokens, device)


def explain_layers(
    out: Screen, layers: Mapping[str, Mixer], tokens: int, device: str, dtype: torch.dtype | None = None
) -> None:
    """Print the backends of layers by name, with equal layers grouped."""
    folded: dict[tuple[str, tuple[Explanation, ...]], list[str]] = {}
    for name, mixer in layers.items():
        explanations = tuple(explain(mixer, tokens, device=device, dtype=dtype or torch.float32))
        folded.setdefault((mixer.info.name, explanations), []).append(name)
    for (kernel, found), names in folded.items():
        called = ", ".join(names)
        if all(name.isdecimal() for name in names):
            # Layer numbers as ranges, such as layers 0-3, 5: consecutive numbers are as far from their places.
            runs = itertools.groupby(enumerate(map(int, names)), key=lambda pair: pair[1] - pair[0])
            numbers = [[number for _, number in run] for _, run in runs]
            ranges = (str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in numbers)
            called = f"layer{'s' if len(names) > 1 else ''} {', '.join(ranges)}"
        out.print(f"Backends of {called}, {kernel}:")
        for call, chosen, declined in found:
            out.print(f"  {call}: {chosen}")
            reasons: dict[str, list[str]] = {}
            for backend, why in declined:
                reasons.setdefault(why, []).append(backend)
            for why, backends in reasons.items():
                out.print(f"    declined, {why}: {'; '.join(backends)}", soft_wrap=True)
