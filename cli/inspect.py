"""Show the attentions of a model, or what a converted checkpoint is and how it was made."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from linearize.modeling.plan import Plan

EPILOG = """examples:
  linearize inspect roberta-base
  linearize inspect ./roberta-base-hedgehog
  linearize inspect ./roberta-base-hedgehog --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("model", metavar="MODEL_OR_DIR", help="Hub name, folder or GGUF file, converted or not")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    from linearize.checkpoint.inspect import inspect_checkpoint
    from linearize.cli._output import console, plan_table, print_json

    info = inspect_checkpoint(args.model)
    plan = info.plan
    if not info.converted:
        plan = _plan_of_original(args.model)
    if args.json:
        data = dataclasses.asdict(info)
        data["plan"] = None if plan is None else plan.to_dict()
        data["provenance"] = info.provenance.to_dict()
        print_json(data)
        return 0
    out = console()
    for label, value in info.rows():
        out.print(f"{label:<20}{value}")
    if plan is not None:
        out.print(plan_table(plan))
    return 0


def _plan_of_original(name: str) -> Plan | None:
    """Plan a conversion that is not carried out: it lists every attention and whether it can be converted."""
    from linearize.checkpoint.loading import load_model
    from linearize.conversion.plan import plan
    from linearize.core.errors import UnsupportedModelError

    try:
        return plan(load_model(name).model, "hedgehog")
    except UnsupportedModelError:
        return None
