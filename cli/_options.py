"""Options of the command line that are made from a config dataclass: names, types, defaults and help stand there."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any


def add_config(parser: Any, config: type, *, prefix: str = "", leave_out: Iterable[str] = ()) -> None:
    """Declare one option per field of a dataclass whose fields have a help text.

    What is not given stays out of the parsed values, so that the dataclass's default holds.

    Args:
        parser: a parser or an argument group.
        config: the dataclass.
        prefix: put before every name: "align" makes `--align-steps` of `steps`.
        leave_out: fields that are not options.
    """
    hints = typing.get_type_hints(config)
    left_out = set(leave_out)
    for field in dataclasses.fields(config):
        if field.name in left_out:
            continue
        kind = _kind(hints[field.name])
        flag = f"--{prefix}-{field.name}" if prefix else f"--{field.name}"
        default = "" if field.default in (None, False) else f" ({_shown(field.default)})"
        options: dict[str, Any] = {
            "dest": _dest(prefix, field.name),
            "default": argparse.SUPPRESS,
            "help": (field.metadata["help"] + default).replace("%", "%%"),
        }
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        else:
            options |= {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "NAME")}
        parser.add_argument(flag.replace("_", "-"), **options)


def take_config(values: dict[str, Any], config: type, *, prefix: str = "") -> dict[str, Any]:
    """Take the options of a dataclass out of parsed values, and return those that were given, by field."""
    names = {_dest(prefix, field.name): field.name for field in dataclasses.fields(config)}
    return {names[name]: values.pop(name) for name in [*values] if name in names}


def _dest(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if prefix else name


def _kind(hint: Any) -> Any:
    """Return the type of an optional field's values."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in hint.__args__ if kind is not type(None))
    return hint


def _shown(default: Any) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)
