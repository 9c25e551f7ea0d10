"""Read text, JSON and YAML of unknown origin, with limits on size, depth and aliases; write single files.

A few hundred bytes of YAML aliases can expand to billions of values, and nested brackets can overflow Python's stack.
Every problem with a text raises `ValueError`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

import yaml

from linearize.core.errors import ConfigError, first_line

MOST_BYTES = 16 * 2**20
"""Longest JSON text: enough for a config with a label for every entry of a large vocabulary."""
MOST_TEXT = 2**30
"""Longest text file: enough for the log of a long run."""
MOST_YAML_BYTES = 2**20
MOST_DEPTH = 64
_TOO_DEEP = f"nested too deeply, expected at most {MOST_DEPTH} levels"
MOST_ALIASES = 100
MOST_VALUES = 200_000
"""Most values that a YAML text may have after its aliases are expanded."""
_FAST: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader in C, which is ten times as fast, if PyYAML was built with it."""


def user_path(name: str | os.PathLike[str]) -> Path:
    """Return a path with the user's home folder in place of `~`; `~name` of an unknown user is kept."""
    # `Path.expanduser` raises an error for an unknown user.
    return Path(os.path.expanduser(name))


def at_home(value: object) -> Any:
    """Return plain data with the home folder in place of `~` in each text that is `~/...` or `NAME=~/...`.

    transformers does not know `~`, and a shell leaves it in `--output=~/...`.
    """
    if isinstance(value, dict):
        return {key: at_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [at_home(inner) for inner in value]
    if not isinstance(value, str):
        return value
    found = re.match("([^=~]*=)?(?=~/)", value)
    return value if found is None else found[0] + os.path.expanduser(value[found.end() :])


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a text file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not UTF-8, or too long; the message is one line.
    """
    facts = os.stat(path)
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError("it is a folder, a pipe or a device, expected a file")
    if facts.st_size > MOST_TEXT:
        raise ValueError(f"got {facts.st_size:,} bytes, expected at most {MOST_TEXT:,}")
    return Path(path).read_text(encoding="utf-8")


def read_json(path: str | os.PathLike[str], most: int = MOST_BYTES) -> Any:
    """Read a JSON file of at most `most` characters; records of long runs have up to `MOST_TEXT`.

    Raises:
        OSError: if it cannot be read.
        ValueError: as in `read_text` and `parse_json`.
    """
    return parse_json(read_text(path), most)


def parse_json(text: str | bytes, most: int = MOST_BYTES) -> Any:
    """Parse JSON, given as text or bytes.

    Raises:
        ValueError: if it is not JSON, too long or nested too deeply; the message is one line.
    """
    if len(text) > most:
        raise ValueError(f"got {len(text):,} characters, expected at most {most:,}")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        lists = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [inner for one in lists if isinstance(one, list) for inner in one]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def parse_yaml(text: str) -> Any:
    """Parse YAML with plain values only.

    Raises:
        ValueError: if it is not YAML, too long, nested too deeply, or has too many values; the message is one line.
    """
    if len(text) > MOST_YAML_BYTES:
        raise ValueError(f"got {len(text):,} characters, expected at most {MOST_YAML_BYTES:,}")
    try:
        with contextlib.suppress(yaml.YAMLError):
            return _checked(text, _FAST)
        # The messages of PyYAML's Python loader say more.
        return _checked(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        # PyYAML's own message mentions "<unicode string>" and quotes the line, which may be long.
        mark, problem = error.problem_mark, str(error.problem).replace("'<stream end>'", "the end")
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{place}{problem}") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def _checked(text: str, loader: type[yaml.SafeLoader]) -> object:
    """Load YAML after a scan that builds nothing: it counts levels, aliases, and the values that they expand to."""
    sizes: dict[str, int] = {}
    # The number of values so far in each open collection, and its anchor; the first entry is the text itself.
    counts: list[int] = [0]
    anchors: list[str | None] = [None]
    aliases = 0
    for event in yaml.parse(text, Loader=loader):
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
                raise ValueError(f"the alias {event.anchor!r} refers to itself")
            counts[-1] += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            counts[-1] += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        if len(counts) > MOST_DEPTH + 1:
            raise ValueError(_TOO_DEEP)
        if aliases > MOST_ALIASES or sum(counts) > MOST_VALUES:
            raise ValueError(f"expected at most {MOST_ALIASES} aliases and {MOST_VALUES:,} values with them expanded")
    return yaml.load(text, Loader=_strict(loader))


def _strict(loader: Any) -> type[yaml.SafeLoader]:
    """Return a loader that refuses a key given twice, of which YAML loaders take the last value.

    It reads 4:10 (a layer and a head) as text, where YAML 1.1 has the number 250 in base 60.
    """

    class Strict(loader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> object:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if (name := (key.tag, key.value)) in seen:
                        raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                    seen.add(name)
            return super().construct_mapping(node, deep)

        def construct_whole(self, node: yaml.ScalarNode) -> object:
            return node.value if ":" in node.value else super().construct_yaml_int(node)

    Strict.add_constructor("tag:yaml.org,2002:int", Strict.construct_whole)
    return Strict


def finite(data: object) -> object:
    """Replace NaN and infinities, which JSON lacks, by null."""
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def spare_name(path: Path) -> Path:
    """Return a temporary name in the folder of a path; later runs delete the files that a killed process leaves."""
    return path.with_name(f".new-{path.name}-{secrets.token_hex(4)}")


def check_file(path: str, option: str, endings: tuple[str, ...], *, overwrite: bool) -> None:
    """Check, before any work, that a file can be written.

    Args:
        path: the file.
        option: the option that names it, for messages.
        endings: the allowed file endings, with their dots.
        overwrite: whether an existing file may be replaced.

    Raises:
        ConfigError: if it has another ending, its folder does not exist, or it exists and `overwrite` is false.
    """
    if not path.lower().endswith(endings):
        raise ConfigError(f"{option}: got {path!r}, expected the name of a {' or '.join(endings)} file")
    file = Path(path)
    try:
        if not file.absolute().parent.is_dir() or file.is_dir():
            raise ConfigError(f"{option}: got {path!r}, expected a file in an existing folder; make the folder first")
        exists = os.path.lexists(file)
        beside = spare_name(file)
        beside.touch(exist_ok=False)
        beside.unlink()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: cannot use {path[:80]!r} ({first_line(error)}); choose another file") from None
    if exists and not overwrite:
        raise ConfigError(f"{option}: {path!r} exists; choose another file, or pass --overwrite")


def write_file(path: str | os.PathLike[str], option: str, content: bytes) -> None:
    """Write a file completely, or not at all.

    Raises:
        ConfigError: if it cannot be written.
    """
    beside = spare_name(Path(path))
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {str(path)!r} ({error.strerror}); choose another file") from error
    finally:
        beside.unlink(missing_ok=True)
