"""Options of the command line, made from configs: names, types, defaults and help stand there alone."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, TypeVar

from linearize.options import Option, make, options_of

Config = TypeVar("Config")
METAVARS: dict[object, str] = {int: "N", float: "X"}
LAST = "output"
"""The title of the group that help shows last."""


def add_options(parser: argparse.ArgumentParser, config: type) -> dict[str, argparse._ActionsContainer]:
    """Declare the options of a config, and return the groups that they stand in by title.

    What is not given stays out of the parsed values, so that the config's default holds.
    """
    options = options_of(config).values()
    groups: dict[str | None, argparse._ActionsContainer] = {None: parser}
    for title in sorted({one.group: None for one in options if one.group}, key=lambda title: title == LAST):
        groups[title] = parser.add_argument_group(title)
    for one in options:
        _add(groups[one.group], one)
    return {title: group for title, group in groups.items() if title is not None}


def _add(parser: argparse._ActionsContainer, one: Option) -> None:
    metadata = one.metadata
    how: dict[str, Any] = {"default": argparse.SUPPRESS, "help": one.help.replace("%", "%%")}
    if metadata.get("positional"):
        optional = {} if one.required else {"nargs": "?"}
        how |= optional | {key: metadata[key] for key in ("nargs", "metavar") if key in metadata}
        parser.add_argument(one.name, **how)
        return
    how["dest"] = one.name
    if one.kind is bool:
        how["action"] = argparse.BooleanOptionalAction if one.default else "store_true"
    else:
        how["metavar"] = metadata.get("metavar", METAVARS.get(one.kind, "NAME"))
        how["required"] = one.required
        how |= {key: metadata[key] for key in ("nargs", "const") if key in metadata}
        if one.kind in METAVARS:
            how["type"] = one.kind
        if metadata.get("repeat"):
            how["action"] = "append"
    parser.add_argument(f"--{one.name.replace('_', '-')}", **how)


def add_json(parser: argparse._ActionsContainer, help: str = "print the result as JSON on stdout") -> None:
    """Declare `--json`."""
    parser.add_argument("--json", action="store_true", help=help)


def as_words(options: Mapping[str, object]) -> list[str]:
    """Return options by name as the words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is not False and value is not None:
            words += [flag] if value is True else [flag, str(value)]
    return words


def given_options(values: dict[str, object], config: type) -> dict[str, object]:
    """Return the options of a config that are among parsed values."""
    return {name: values[name] for name in options_of(config) if name in values}


def take_options(args: argparse.Namespace, config: type[Config]) -> Config:
    """Build a config from parsed values.

    Raises:
        ConfigError: for a value that is not allowed.
    """
    return make(config, given_options(vars(args), config))
