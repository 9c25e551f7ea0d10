"""Options of the command line: generated from the jobs' configs, and read from a file with `--config`.

Names, types, defaults and help texts are defined only in the configs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from linearize.core.errors import ConfigError, suggestion, unknown_name
from linearize.core.options import Config, convert, make, options_of, parse_pairs, read_values
from linearize.core.parsing import at_home, user_path
from linearize.core.registry import Values

METAVARS: dict[object, str] = {int: "N", float: "X"}
LAST = "output"
"""Title of the option group that --help shows last."""
FLAG = "--config"
NEVER = ("help", "json", "config")
"""Options that a config file cannot contain."""


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """Declare the options of a config.

    Options that are not given are missing from the parsed values, so that the config's defaults apply.
    """
    options = options_of(config).values()
    groups: dict[str | None, argparse._ActionsContainer] = {None: parser}
    for title in sorted({option.group: None for option in options if option.group}, key=lambda title: title == LAST):
        groups[title] = parser.add_argument_group(title)
    for option in options:
        group, metadata = groups[option.group], option.metadata
        how: dict[str, Any] = {"default": argparse.SUPPRESS, "help": option.help.replace("%", "%%")}
        for key in metadata.keys() & {"nargs", "const", "metavar"}:
            how[key] = metadata[key]
        if metadata.get("positional"):
            group.add_argument(option.name, **({} if option.required else {"nargs": "?"}) | how)
            continue
        if option.kind is bool:
            switch = option.default or metadata.get("negatable")
            how["action"] = argparse.BooleanOptionalAction if switch else "store_true"
        else:
            how = {"metavar": METAVARS.get(option.kind, "NAME"), "required": option.required} | how
            if option.kind in METAVARS:
                how["type"] = option.kind
            if metadata.get("repeat"):
                how["action"] = "append"
        group.add_argument(f"--{option.name.replace('_', '-')}", dest=option.name, **how)


def take_options(args: argparse.Namespace, config: type[Config]) -> Config:
    """Build a config from parsed values.

    Raises:
        ConfigError: for a value that is not allowed.
    """
    values = vars(args)
    return make(config, {name: values[name] for name in options_of(config) if name in values})


def config_file(words: list[str], prog: str | None = None) -> str | None:
    """Return the file that a command line names with `--config`, before the line is parsed."""
    parser = Parser(prog=prog, add_help=False)
    parser.add_argument(FLAG)
    file: str | None = parser.parse_known_args(words)[0].config
    return file


def read_options(file: str, parser: argparse.ArgumentParser) -> dict[str, object]:
    """Read a verb's options from a file, as its parser would return them.

    Keys are the names of options and of positional arguments (model ...), with dashes or underscores. A list stands for
    comma-separated words, a mapping for NAME=VALUE, and null for the default.

    Raises:
        ConfigError: if the file cannot be read, or for an unknown key or a value of the wrong type, which it names.
    """
    values = read_values(user_path(file), f"{FLAG}: {file!r}", "a YAML file of options such as kernel: elu")
    known = {action.dest: action for action in parser._actions if action.dest not in NEVER}
    options: dict[str, object] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            hint = suggestion(name, known)
            raise ConfigError(f"{FLAG} {file}: unknown option {str(key)!r}.{hint} See: {parser.prog} --help")
        if name in options:
            raise ConfigError(f"{FLAG} {file}: {name} is given twice; give it once")
        if value is None:
            continue
        # As argparse would return it.
        action, where = known[name], f"{FLAG} {file}, {name}"
        if action.nargs == 0:
            options[name] = convert(bool, value, where)
        elif value is True and action.const is not None:
            options[name] = action.const
        elif isinstance(action, argparse._AppendAction) or action.nargs in ("+", "*"):
            options[name] = [_word(action, part, where) for part in _parts(value)]
        else:
            options[name] = _word(action, value, where)
            if action.choices is not None and options[name] not in action.choices:
                raise ConfigError(f"{where}: {unknown_name('value', str(options[name]), action.choices)}")
    return options


def _word(action: argparse.Action, value: object, where: str) -> object:
    if action.type in (int, float):
        return convert(action.type, value, where)
    if isinstance(value, list | Mapping):
        return ",".join(str(_word(action, part, where)) for part in _parts(value))
    if isinstance(value, bool):
        # YAML reads the words no and yes as booleans.
        return "yes" if value else "no"
    return str(value) if isinstance(value, int | float) else convert(str, value, where)


def _parts(value: object) -> list[object]:
    if isinstance(value, Mapping):
        items = {key: str(item).lower() if isinstance(item, bool) else item for key, item in value.items()}
        return [f"{key}={item}" for key, item in items.items()]
    return value if isinstance(value, list) else [value]


def parse_with_file(
    parser: argparse.ArgumentParser, words: list[str], values: Mapping[str, object]
) -> argparse.Namespace:
    """Parse a command line; its options take precedence over those of a file, which override the defaults.

    Args:
        parser: a verb's parser; it can be used only once.
        words: the command line.
        values: options from the file.
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


class Parser(argparse.ArgumentParser):
    """Parser that suggests a correction for a mistyped option instead of printing the whole usage; no abbreviations."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def parse_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:  # type: ignore[override]
        """Report an unknown option first; argparse would report the missing required one that was mistyped.

        Raises:
            ConfigError: for an unknown option or a wrong value, on the command line or in the file of `--config`.
        """
        words: list[str] = [at_home(word) if "~/" in word else word for word in args]
        options = [option for action in self._actions for option in action.option_strings]
        for word in itertools.takewhile("--".__ne__, words):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in options:
                hint = suggestion(name, options, "{}")
                raise ConfigError(f"unknown option {name!r}.{hint} See: {self.prog} --help")
        file = config_file(words, self.prog)
        if file is not None:
            return parse_with_file(self, words, read_options(file, self))
        # Options may come before and between positional arguments, as in `run RECIPE --output DIR key=value`.
        return super().parse_intermixed_args(words, namespace)

    def add_config_file(self) -> None:
        """Declare `--config`, if the verb has options that a file can contain."""
        if {action.dest for action in self._actions if action.option_strings} - set(NEVER):
            text = "options from a YAML file, one `option: value` per line; options on the command line take precedence"
            self.add_argument(FLAG, metavar="FILE", help=text)

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of printing it and exiting."""
        raise ConfigError(f"{message}; see: {self.prog} --help")


class NamedFolders(argparse.Action):
    """Reads NAME=DIR words of a script into a mapping; a name may have equals signs."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Set the mapping.

        Raises:
            SystemExit: for a word without a name, or a name that is given twice.
        """
        try:
            setattr(namespace, self.dest, parse_pairs(values, self.dest, "NAME=DIR", last=True))
        except ConfigError as error:
            parser.error(str(error))


Argument = tuple[str, Values]
"""An option: its name, and the keyword arguments of `add_argument`."""


def argument(name: str, **how: object) -> Argument:
    """Return an option or a positional argument; `how` are keyword arguments of `add_argument`."""
    return name, how


def switch(name: str, help: str) -> Argument:
    """Return an option without a value."""
    return argument(name, action="store_true", help=help)


def repeated(name: str, help: str) -> Argument:
    """Return an option with a pattern that may be given several times."""
    return argument(name, action="append", default=[], metavar="PATTERN", help=help)


class Verb:
    """A verb. The docstring of a subclass is its help: a sentence, then examples and notes.

    Attributes:
        summary: its line in the overview.
        module: the module of `linearize.cli` with a function of the verb's name, which takes the job (if there is one),
            the parsed arguments and the console for people, runs the verb, and returns an exit code or the data that
            --json prints; by default the module with the verb's name.
        job: the config whose fields are its options.
        flags: the members of `FLAGS` that it has.
        arguments: its options that are not in the config.
    """

    summary: ClassVar[str]
    module: ClassVar[str] = ""
    job: ClassVar[type | None] = None
    flags: ClassVar[tuple[str, ...]] = ("--json",)
    arguments: ClassVar[tuple[Argument, ...]] = ()
