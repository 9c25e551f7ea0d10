"""Options as fields of dataclasses: each field defines its default, help, range and choices once.

The checks on construction, the command line and option files all read them. A job's config has sections: other configs,
whose fields become options of the job in one flat list of names. `build` turns plain data, such as parsed YAML, into
nested dataclasses; its errors name the key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from linearize.core.errors import ConfigError, LinearizeError, first_line, unknown_name
from linearize.core.parsing import at_home, parse_json, parse_yaml, read_text
from linearize.core.registry import KINDS, ReadOnlyValues, Values, field_types, fits, kinds_of
from linearize.core.registry import check as check
from linearize.core.registry import option as option

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
_SECTION = "section"
MOST_SEED = 2**32 - 1
"""Largest seed that numpy takes."""


@dataclass(frozen=True)
class Section:
    """How the fields of an inner config become options of the job around it.

    Attributes:
        config: the inner config.
        title: title of their group; None puts them among the job's own options.
        prefix: prefix of every name: "align" turns `steps` into `align_steps`.
        shared: fields without the prefix; one option sets them in every section that has them.
        names: names of options that differ from the fields'.
        only: the fields that are options; None: all with a help text.
        leave_out: fields that are not options.
        shown: defaults as the help shows them, by field.
    """

    config: type
    title: str | None = None
    prefix: str = ""
    shared: tuple[str, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    only: tuple[str, ...] | None = None
    leave_out: tuple[str, ...] = ()
    shown: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def options(self) -> dict[str, dataclasses.Field[object]]:
        """Return the fields that are options, by the option's name."""
        options = {}
        # Fields that several configs inherit come last.
        inherited = {name for base in self.config.__mro__[1:] for name in getattr(base, "__annotations__", {})}
        fields = dataclasses.fields(self.config)
        for field in [f for f in fields if f.name not in inherited] + [f for f in fields if f.name in inherited]:
            wanted = "help" in field.metadata if self.only is None else field.name in self.only
            if wanted and field.name not in self.leave_out:
                name = self.names.get(field.name, field.metadata.get("name", field.name))
                plain = not self.prefix or field.name in self.shared
                options[name if plain else f"{self.prefix}_{name}"] = field
        return options


def section(config: type, title: str | None = None, **how: Any) -> Any:
    """Declare a field that holds another config; `how` are fields of `Section`."""
    return dataclasses.field(default_factory=config, metadata={_SECTION: Section(config, title, **how)})


@dataclass(frozen=True)
class Option:
    """One option of a job.

    Attributes:
        name: its name, with underscores.
        hint: type of the field.
        kind: type of its values: one of `KINDS`, or a type that `parse` returns.
        default: its default; MISSING if it has none, or if a factory makes it.
        metadata: the arguments of `linearize.core.registry.option`.
        help: the help text with the default.
        group: the title of its group, or None.
        places: (section or "", field) of each field that it sets.
        required: whether it must be given.
    """

    name: str
    hint: Any
    kind: object
    default: object
    metadata: ReadOnlyValues
    help: str
    group: str | None
    places: tuple[tuple[str, str], ...]
    required: bool


def options_of(config: type) -> Mapping[str, Option]:
    """Return the options of a job's config by name, its own and those of its sections."""
    return _options_of(config)


@functools.cache  # Only `options_of` calls this, because type checkers consider some classes unhashable.
def _options_of(config: type) -> Mapping[str, Option]:
    options: dict[str, Option] = {}
    for outer in dataclasses.fields(config):
        own = _SECTION not in outer.metadata
        if own and "help" not in outer.metadata:
            continue
        section: Section = Section(config, outer.metadata.get("group")) if own else outer.metadata[_SECTION]
        fields = {outer.metadata.get("name", outer.name): outer} if own else section.options()
        for name, field in fields.items():
            place = ("" if own else outer.name, field.name)
            if name in options:
                # One more field that the option sets.
                options[name] = dataclasses.replace(options[name], places=(*options[name].places, place))
                continue
            hint, default = field_types(section.config)[field.name], field.default
            metadata: ReadOnlyValues = field.metadata
            if field.name in section.shown:
                metadata = {**metadata, "shown": section.shown[field.name]}
            needed, shown = default is MISSING and field.default_factory is MISSING, metadata.get("shown")
            if shown is None and not (default is None or default is False or default is MISSING or default == ()):
                shown = f"{default:g}" if isinstance(default, float) else str(default)
            help = f"{metadata['help']} ({shown})" if shown else str(metadata["help"])
            kind = kinds_of(hint)[0]
            options[name] = Option(name, hint, kind, default, metadata, help, section.title, (place,), needed)
    return types.MappingProxyType(options)


def make(config: type[Config], values: Mapping[str, object]) -> Config:
    """Build a job's config from options by name; those left out keep their defaults.

    A config may have a class method `derive(values)`, which returns the defaults that depend on other options: by
    section and field, or, under "", by option. Names of other jobs' options are ignored there, and options given
    explicitly take precedence.

    Raises:
        UnknownNameError: for a name that is not an option.
        ConfigError: for a missing option, or a value that is not allowed.
    """
    known = options_of(config)
    for name in values:
        if name not in known:
            raise unknown_name("option", name, known)
    missing = [name for name, option in known.items() if option.required and name not in values]
    if missing:
        raise ConfigError(f"{missing[0]}: got nothing, expected a value; give it")
    derive: Callable[..., dict[str, dict[str, object]]] | None = getattr(config, "derive", None)
    derived = {} if derive is None else derive(values)
    given: dict[str, dict[str, object]] = {}
    defaults = {name: value for name, value in derived.get("", {}).items() if name in known}
    for name, value in {**defaults, **values}.items():
        metadata = known[name].metadata
        parse: Callable[[object], object] | None = metadata.get("parse")
        # Of an option that may be repeated, one text is a list of one.
        value = [value] if "repeat" in metadata and isinstance(value, str) else value
        parsed = value
        if parse is not None and isinstance(value, (str, list)):
            # Only the texts of an option that may be repeated are a list; any other list is the value itself.
            typed = isinstance(value, str) or "repeat" in metadata
            parsed = parse(value) if typed else tuple(value)
        for section_name, inner in known[name].places:
            given.setdefault(section_name, {})[inner] = parsed
    fields = given.get("", {})
    for field in dataclasses.fields(config):
        section: Section | None = field.metadata.get(_SECTION)
        if section is not None:
            inner_config = section.config(**{**derived.get(field.name, {}), **given.get(field.name, {})})
            fields[field.name] = inner_config.resolve() if hasattr(inner_config, "resolve") else inner_config
    return config(**fields)


def effective(job: object) -> dict[str, object]:
    """Return the options of a job by name, defaults included, as plain data; values are as typed on a command line."""
    values = {}
    for name, declared in options_of(type(job)).items():
        section_name, inner = declared.places[0]
        owner = getattr(job, section_name) if section_name else job
        if hasattr(owner, inner):
            value = getattr(owner, inner)
            second = getattr(owner, declared.metadata["second"]) if "second" in declared.metadata else None
            value = value if second is None else f"{value},{second}"
            values[name] = list(value) if isinstance(value, tuple) else value
    return values


OF_THE_PLACE = ("output", "overwrite", "resume", "device")
"""Options that say where a job runs, not what it does."""


def recorded(job: object) -> Values:
    """Return the options of a job as recorded with its output: an option file with them repeats the job.

    Local files and folders are named without their folder, and options without a value are left out.
    """
    record = {}
    for name, value in effective(job).items():
        if name not in OF_THE_PLACE and value not in (None, [], {}):
            record[name] = name_of(value) if isinstance(value, str) else value
            if isinstance(value, list):
                plain = without_folder(value)
                # Files of the same name in different folders stay pairs.
                pairs = all(isinstance(part, tuple) for part in plain) and len(dict(plain)) == len(plain)
                record[name] = dict(plain) if pairs else plain
    return record


def name_of(source: str) -> str:
    """Return a Hub name unchanged; strip the private path from a local file or folder."""
    return os.path.basename(os.path.abspath(source)) if os.path.exists(source) else source


def without_folder(value: object) -> Any:
    """Return an option's value with `name_of` applied to each text in it."""
    if isinstance(value, str):
        return name_of(value)
    return type(value)(map(without_folder, value)) if isinstance(value, list | tuple) else value


def parse_pairs(
    pairs: list[str],
    place: str = "--kernel-arg",
    form: str = "NAME=VALUE such as activation=exp",
    *,
    last: bool = False,
) -> dict[str, str]:
    """Read repeated K=V options.

    Args:
        pairs: the texts "K=V".
        place: name of the option in messages.
        form: what they look like, for messages.
        last: whether names, rather than values, may have an equals sign.

    Raises:
        ConfigError: if a text has no equals sign, or a name is given twice.
    """
    arguments: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.rpartition("=") if last else pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"{place}: got {pair!r}, expected {form}")
        if name in arguments:
            raise ConfigError(f"{place}: {name} is given twice; give it once")
        arguments[name] = value
    return arguments


def parse_names(text: str) -> tuple[str, ...]:
    """Read comma-separated names."""
    return tuple(text.split(",")) if text else ()


def parse_lengths(text: str, option: str = "--lengths", example: str = "128,512,2048") -> tuple[int, ...]:
    """Read comma-separated whole numbers, or `none`.

    Raises:
        ConfigError: if it is anything else.
    """
    if text.strip().lower() == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option}: got {text!r}, expected numbers such as {example}, or none") from None


parse_image_sizes = functools.partial(parse_lengths, option="--image-size", example="224,384,512")
"""Read numbers of pixels, as `parse_lengths` does."""


def build(cls: type[Config], values: object, where: str, kind: str = "key") -> Config:
    """Build a dataclass from a mapping.

    Args:
        cls: the dataclass; values are checked against its annotations.
        values: a mapping as `yaml.safe_load` returns it.
        where: the key of this mapping, for messages.
        kind: the word for one of its keys in messages.

    Raises:
        UnknownNameError: for an unknown key.
        ConfigError: for a wrong type or a missing value, or if the dataclass rejects the values.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: got {kind_of(values)}, expected keys with values; known: {', '.join(fields)}")
    hints = field_types(cls)
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{where}: {unknown_name(kind, str(key), fields)}")
        if value is False and "no" in fields[key].metadata.get("choices", ()):
            value = "no"  # which YAML 1.1 reads as false
        arguments[key] = convert(hints[key], value, f"{where}.{key}")
    for name in _required(cls):
        if name not in arguments:
            raise ConfigError(f"{where}: the key {name!r} is missing; add it")
    try:
        return cls(**arguments)
    except LinearizeError as error:
        raise ConfigError(f"{where}: {error}") from error


def read_values(path: Path, what: str, expected: str) -> Values:
    """Return the values in a YAML file (JSON if the name ends in .json), with `~` expanded; an empty file has none.

    Raises:
        ConfigError: if the file cannot be read or holds something else; the message begins with `what`.
    """
    try:
        text = read_text(path)
        values = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise ConfigError(f"{what} cannot be read ({reason}); expected {expected}") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{what} holds {kind_of(values)}, expected {expected}")
    return dict(at_home(values or {}))


def convert(hint: object, value: object, where: str) -> Any:
    """Check a value against an annotation and return it as that type.

    For a section whose only required key is `name`, a text is accepted as that name.

    Raises:
        ConfigError: if it is of another type.
    """
    if hint is object or hint is Any:
        return value
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(inner, value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, str) and _required(hint) == ["name"]:
            value = {"name": value}
        return value if isinstance(value, hint) else build(hint, value, where)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if inner[1:] == (Ellipsis,) else inner
        if len(value) != len(kinds):
            raise ConfigError(f"{where}: got {len(value)} values, expected {len(kinds)}")
        return tuple(convert(kinds[n], part, f"{where}[{n}]") for n, part in enumerate(value))
    if (hint is dict or origin in (dict, Mapping)) and isinstance(value, Mapping):
        return {key: convert(inner[1] if inner else object, part, f"{where}.{key}") for key, part in value.items()}
    plain = value
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 1e-5 (without a dot) as text; it is a number nevertheless.
        with contextlib.suppress(ValueError):
            plain = float(value)
    if isinstance(hint, type) and fits(plain, hint):
        return float(plain) if hint is float else plain
    raise ConfigError(f"{where}: got {kind_of(value)}, expected {_described(hint)}")


def _convert_union(kinds: tuple[object, ...], value: object, where: str) -> object:
    if value is None and type(None) in kinds:
        return None
    wanted = [kind for kind in kinds if kind is not type(None)]
    # A mapping can only be meant as the section or the mapping, and a list as the list: errors should name their parts.
    sections = [kind for kind in wanted if dataclasses.is_dataclass(kind) or typing.get_origin(kind) in (dict, Mapping)]
    meant = sections if isinstance(value, Mapping) else []
    meant += [kind for kind in wanted if typing.get_origin(kind) is tuple and isinstance(value, list)]
    if len(wanted) == 1 or meant:
        return convert((meant or wanted)[0], value, where)
    for kind in wanted:
        with contextlib.suppress(ConfigError):
            return convert(kind, value, where)
    raise ConfigError(f"{where}: got {kind_of(value)}, expected {' or '.join(map(_described, wanted))}")


def _required(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls) if f.default is MISSING and f.default_factory is MISSING]


def kind_of(value: object) -> str:
    """Describe a value of a YAML file in YAML's own words."""
    if isinstance(value, Mapping):
        return "a section of keys"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, str | int | float):
        return repr(value)
    # YAML turns unquoted text such as 2024-01-01 into a date.
    return f"{str(value)!r} (put it in quotes if it is meant as text)"


def _described(hint: object) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return "a section of keys"
    if origin is tuple:
        kinds = {str: "a list of texts", int: "a list of whole numbers", float: "a list of numbers"}
        return kinds.get(inner[0], "a list")
    if dict in (hint, origin) or origin is Mapping:
        return "keys with values"
    return KINDS.get(hint, "another value")
