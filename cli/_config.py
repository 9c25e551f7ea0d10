"""`--config FILE`: options from a YAML file, over which the command line has the last word."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path

from linearize.errors import ConfigError
from linearize.from_yaml import convert, kind_of
from linearize.parsing import parse_yaml, read_text

FLAG = "--config"
NEVER = ("help", "json", "config")
"""What is typed, and not an option of the work itself."""


EXAMPLES = (
    *("distill_steps: 500", "epochs: 3", "steps: 500", "lengths: [512, 4096]", "device: cpu", "output: made"),
    *("private: true", "build: true", "model: gpt2", "format: csv", "new: mine.yaml"),
)
"""Lines for the help: a verb shows the first whose option it has."""


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """Declare `--config`, if the verb has options that a file could hold."""
    names = {action.dest for action in parser._actions if action.option_strings} - set(NEVER)
    if names:
        example = example_for(names)
        said = f", such as the line `{example}`" if example else ""
        parser.add_argument(
            FLAG, metavar="FILE", help=f"options from a YAML file{said}; those of the command line come first"
        )


def example_for(names: Collection[str]) -> str | None:
    """Return a line for a file, of one of these options."""
    return next((line for line in EXAMPLES if line.partition(":")[0] in names), None)


def config_file(words: list[str]) -> str | None:
    """Return the file that a line names with `--config`, before the line is parsed."""
    before = words[: words.index("--")] if "--" in words else words
    for place, word in enumerate(before):
        name, equals, value = word.partition("=")
        if name == FLAG and equals:
            return value
        if name == FLAG:
            return before[place + 1] if place + 1 < len(before) else None
    return None


def read_options(file: str, parser: argparse.ArgumentParser) -> dict[str, object]:
    """Read options for a verb, as its parser would give them.

    Keys are the names of options and of what stands without a name (model ...), with dashes or underscores. A list
    stands for words with commas between them, a mapping for NAME=VALUE; null for the default.

    Raises:
        ConfigError: if the file cannot be read, or for an unknown key or a value of the wrong type; names the key.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{FLAG}: got {file!r}, expected a YAML file of options")
    try:
        values = parse_yaml(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG}: {file!r} cannot be read as YAML ({error}); correct the file") from error
    if not isinstance(values, Mapping | None):
        raise ConfigError(f"{FLAG}: {file!r} holds {kind_of(values)}, expected options such as kernel: elu")
    known = {action.dest: action for action in parser._actions if action.dest not in NEVER}
    found = {}
    for key, value in (values or {}).items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{FLAG} {file}: unknown option {str(key)!r}.{hint} See: {parser.prog} --help")
        if name in found:
            raise ConfigError(f"{FLAG} {file}: {name} is given twice; give it once")
        if value is not None:
            found[name] = _value(known[name], value, f"{FLAG} {file}, {name}")
    return found


def _value(action: argparse.Action, value: object, where: str) -> object:
    """Return a value as the line would have given it."""
    if action.nargs == 0:
        return convert(bool, value, where)
    if value is True and action.const is not None:
        return action.const
    if isinstance(action, argparse._AppendAction) or action.nargs in ("+", "*"):
        return [_one(action, part, where) for part in _parts(value)]
    return _one(action, value, where)


def _one(action: argparse.Action, value: object, where: str) -> object:
    if action.type in (int, float):
        return convert(action.type, value, where)
    if isinstance(value, list | Mapping):
        return ",".join(str(_one(action, part, where)) for part in _parts(value))
    if isinstance(value, bool):
        # YAML reads no and yes so.
        return "yes" if value else "no"
    return str(value) if isinstance(value, int | float) else convert(str, value, where)


def _parts(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [f"{key}={_scalar(one)}" for key, one in value.items()]
    return value if isinstance(value, list) else [value]


def _scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_with_file(
    parser: argparse.ArgumentParser, words: list[str], values: Mapping[str, object]
) -> argparse.Namespace:
    """Parse a line whose options come before those of a file, and those before the defaults.

    Args:
        parser: a verb's parser; it serves for this line only.
        words: the line.
        values: what the file says, see `read_options`.
    """
    defaults = {action.dest: action.default for action in parser._actions}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        if action.dest in values:
            action.required = False
            if not action.option_strings:
                action.nargs = "*" if action.nargs in ("+", "*") else "?"
    parsed = parser.parse_intermixed_args(words)
    for name, value in {**defaults, **values}.items():
        if value is not argparse.SUPPRESS and not hasattr(parsed, name):
            setattr(parsed, name, value)
    return parsed
