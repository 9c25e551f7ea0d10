"""Lines of the shell: the one that is running, a variation of it, and those that are proposed."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from linearize.core.options import effective, name_of, on_disk, options_of

SWITCHES = ("--resume", "--overwrite", "--json")
"""Options without a value that concern one run, not the job."""
PLACES = ("--output", "--device", "--report-to")
"""Options with a value that say where a job runs."""


def typed() -> list[str]:
    """Return the words of the running command line, without the program's name; none for callers from Python."""
    return sys.argv[1:] if Path(sys.argv[0]).stem == "linearize" else []


def without(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the words of a command line without some options and their values."""
    kept, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in names:
            skip = not equals and name not in SWITCHES
        else:
            kept.append(word)
    return kept


def again(verb: str, changes: Mapping[str, object]) -> str | None:
    """Return the line that is running with other options; None if it is not a line of this verb."""
    words = typed()
    if words[:1] != [verb]:
        return None
    names = ["--resume", "--json", *map(_flag, changes)]
    return shlex.join(["linearize", *without(words, names), *_words(changes)])


def add_command(provenance: dict[str, Any]) -> dict[str, list[str]]:
    """Return the commands that made a checkpoint, including the one that is running.

    Others read it: folders are left out of the names of local files, and so are the options in `PLACES`.
    """
    earlier = provenance.get("commands")
    commands = list(earlier) if isinstance(earlier, list) else []
    words = without(typed(), (*SWITCHES, *PLACES))
    command = shlex.join(["linearize", *map(_without_folders, words)])
    # The stages of one `longdoc` have the same line.
    return {"commands": commands if not words or commands[-1:] == [command] else [*commands, command]}


def _without_folders(word: str) -> str:
    return name_of(word) if on_disk(word) else "".join(name_of(part) for part in re.split("([,=])", word))


def line(verb: str, model: str, options: Mapping[str, object]) -> str:
    """Return a command line; values of None and False are left out."""
    return shlex.join(["linearize", verb, model, *_words(options)])


def data_options(job: object) -> dict[str, object]:
    """Return the options about data, device and seed that differ from their defaults."""
    known = options_of(type(job))
    return {
        name: value
        for name, value in effective(job).items()
        if (known[name].places[0][0] == "data" or name in ("device", "seed"))
        and value not in (known[name].default, None, [])
    }


def _words(options: Mapping[str, object]) -> list[str]:
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words += [_flag(name), *([] if value is True else [_text(value)])]
    return words


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(value: object) -> str:
    """Write a value as it is typed; parts such as (name, weight) become name=weight."""
    if not isinstance(value, list | tuple):
        return str(value)
    return ",".join("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value)
