"""Read JSON and YAML that somebody else wrote: limits of size, depth and aliases, `ValueError` for all that is wrong;
and what is written as JSON.

A few hundred bytes of YAML aliases stand for billions of values, and brackets in brackets end Python's own stack.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import yaml

MOST_BYTES = 16 * 2**20
"""Longest JSON text: configs with a label for every class of a large vocabulary."""
MOST_YAML_BYTES = 2**20
MOST_DEPTH = 64
MOST_ALIASES = 100
MOST_VALUES = 200_000
"""Values that a YAML text may stand for, aliases written out."""


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: if it is none, too long or nested too deeply; one line.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"got {len(text):,} characters, expected at most {MOST_BYTES:,}")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested too deeply, expected at most {MOST_DEPTH} levels") from None
    check_depth(value)
    return value


def check_depth(value: object) -> None:
    """Refuse lists and mappings in each other to more than `MOST_DEPTH` levels.

    Raises:
        ValueError: if they are.
    """
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return
    raise ValueError(f"nested too deeply, expected at most {MOST_DEPTH} levels")


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def parse_yaml(text: str) -> Any:
    """Parse YAML with plain values only.

    Raises:
        ValueError: if it is none, too long, nested too deeply, or stands for too many values; one line.
    """
    if len(text) > MOST_YAML_BYTES:
        raise ValueError(f"got {len(text):,} characters, expected at most {MOST_YAML_BYTES:,}")
    try:
        _check_events(text)
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        # Its own text speaks of "<unicode string>", and shows the line, which may be long.
        mark, problem = error.problem_mark, str(error.problem).replace("'<stream end>'", "the end")
        raise ValueError(
            problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
        ) from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def _check_events(text: str) -> None:
    """Go through the text without building anything: count levels, aliases, and what they stand for."""
    sizes: dict[str, int] = {}
    # For each open collection its anchor and the values in it so far; the first is the text itself.
    counts: list[int] = [0]
    anchors: list[str | None] = [None]
    aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            counts.append(1)
            anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            count, anchor = counts.pop(), anchors.pop()
            counts[-1] += count
            if anchor is not None:
                sizes[anchor] = count
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            if event.anchor in anchors:
                raise ValueError(f"the alias {event.anchor!r} stands for itself")
            counts[-1] += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            counts[-1] += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        if len(counts) > MOST_DEPTH + 1:
            raise ValueError(f"nested too deeply, expected at most {MOST_DEPTH} levels")
        if aliases > MOST_ALIASES or sum(counts) > MOST_VALUES:
            raise ValueError(
                f"expected at most {MOST_ALIASES} aliases and {MOST_VALUES:,} values in all that they stand for"
            )


def finite(data: object) -> object:
    """Replace what JSON has no number for by null."""
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
