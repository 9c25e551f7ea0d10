"""Options as fields of dataclasses: each field defines its default, help, range and choices once.

The checks on construction, the command line and files of options all read them. A job's config has sections: other
configs, whose fields become options of the job under one flat list of names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from linearize.core.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config")
PLAIN = (bool, int, float, str)
_SECTION = "section"


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Iterable[str] | None = None,
    **more: object,
) -> Any:
    """Declare a field of a config.

    Args:
        default: its default; without one the option is required.
        help: description, without the default.
        low: smallest number allowed.
        high: largest number allowed.
        above: the number must be larger than this.
        below: the number must be smaller than this.
        choices: the words allowed.
        **more: for the command line only: `metavar`; `shown`, the default as the help shows it; `group`, the title of
            its group; `name`, if it is not the field's; `parse`, which makes the value from the typed text;
            `positional`; `repeat` for an option that may be given several times; `nargs` and `const` as in argparse;
            `second`, a second field, whose value is typed after a comma.
    """
    limits = {"low": low, "high": high, "above": above, "below": below}
    metadata = {"help": help, **{key: value for key, value in limits.items() if value is not None}, **more}
    if choices is not None:
        metadata["choices"] = tuple(choices)
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Section:
    """How the fields of an inner config become options of the job around it.

    Attributes:
        config: the inner config.
        title: title of their group; None: among the job's own options.
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

    def options(self) -> dict[str, dataclasses.Field[Any]]:
        """Return the fields that are options, by the option's name."""
        options = {}
        for field in dataclasses.fields(self.config):
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
        kind: type of its values: one of `PLAIN`, or another one, which `parse` makes.
        default: its default; MISSING without one, or for a new object each time.
        metadata: the arguments of `option`.
        group: the title of its group, or None.
        places: (section or "", field) of each field that it sets.
        required: whether it must be given.
    """

    name: str
    kind: object
    default: object
    metadata: Mapping[str, Any]
    group: str | None
    places: tuple[tuple[str, str], ...]
    required: bool

    @property
    def help(self) -> str:
        """The help text with the default."""
        text = str(self.metadata["help"])
        shown = self.metadata.get("shown")
        if shown is None and not any(self.default is nothing for nothing in (None, False, MISSING, ())):
            shown = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return f"{text} ({shown})" if shown else text


def options_of(config: type) -> Mapping[str, Option]:
    """Return the options of a job's config by name, its own and those of its sections."""
    return _options_of(config)


@functools.cache
def _options_of(config: type) -> Mapping[str, Option]:
    options: dict[str, Option] = {}
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        section: Section | None = field.metadata.get(_SECTION)
        if section is not None:
            inner_hints = typing.get_type_hints(section.config)
            for name, inner in section.options().items():
                shown = section.shown.get(inner.name)
                place = (field.name, inner.name)
                _add(options, name, inner, inner_hints[inner.name], section.title, place, shown)
        elif "help" in field.metadata:
            name, group = field.metadata.get("name", field.name), field.metadata.get("group")
            _add(options, name, field, hints[field.name], group, ("", field.name))
    return types.MappingProxyType(options)


def _add(
    options: dict[str, Option],
    name: str,
    field: dataclasses.Field[Any],
    hint: object,
    group: str | None,
    place: tuple[str, str],
    shown: str | None = None,
) -> None:
    """Add an option, or one more field that an option sets."""
    known = options.get(name)
    if known is not None:
        options[name] = dataclasses.replace(known, places=(*known.places, place))
        return
    metadata = field.metadata if shown is None else {**field.metadata, "shown": shown}
    required = field.default is MISSING and field.default_factory is MISSING
    options[name] = Option(name, _kinds(hint)[0], field.default, metadata, group, (place,), required)


def make(config: type[Config], values: Mapping[str, Any]) -> Config:
    """Build a job's config from options by name; those left out keep their defaults.

    A config may have a method `derive(values)` of its class, which returns defaults that follow from other options, by
    section ("" for its own); options given explicitly take precedence.

    Raises:
        UnknownNameError: for a name that is no option.
        ConfigError: for a missing option, or a value that is not allowed.
    """
    known = options_of(config)
    given: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        if name not in known:
            raise unknown_name("option", name, known)
        parse: Callable[[object], object] | None = known[name].metadata.get("parse")
        parsed = parse(value) if parse is not None and isinstance(value, (str, list)) else value
        for section_name, inner in known[name].places:
            given.setdefault(section_name, {})[inner] = parsed
    missing = [name for name, option in known.items() if option.required and name not in values]
    if missing:
        raise ConfigError(f"{missing[0]}: got nothing, expected a value; give it")
    derive: Callable[..., dict[str, dict[str, object]]] | None = getattr(config, "derive", None)
    derived = {} if derive is None else derive(values)
    fields = {**derived.get("", {}), **given.get("", {})}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        section: Section | None = field.metadata.get(_SECTION)
        if section is not None:
            inner_config = section.config(**{**derived.get(field.name, {}), **given.get(field.name, {})})
            fields[field.name] = inner_config.resolve() if hasattr(inner_config, "resolve") else inner_config
    return config(**fields)


def effective(job: object) -> dict[str, object]:
    """Return the options of a job by name, defaults included, as plain data; values are as they would be typed."""
    values = {}
    for name, option in options_of(type(job)).items():
        section_name, inner = option.places[0]
        owner = getattr(job, section_name) if section_name else job
        if hasattr(owner, inner):
            value = getattr(owner, inner)
            second = getattr(owner, option.metadata["second"]) if "second" in option.metadata else None
            value = value if second is None else f"{value},{second}"
            values[name] = list(value) if isinstance(value, tuple) else value
    return values


OF_THE_PLACE = ("output", "overwrite", "resume", "device")
"""Options that say where a job runs, not what it does."""


def recorded(job: object) -> dict[str, Any]:
    """Return the options of a job for the record of its output: a file of options that repeats the job.

    Local files and folders are named without their folder, and options without a value are left out.
    """
    record = {}
    for name, value in effective(job).items():
        if name not in OF_THE_PLACE and value not in (None, [], {}):
            pairs = isinstance(value, list) and all(isinstance(part, tuple) for part in value)
            record[name] = dict(without_folder(value)) if pairs else without_folder(value)
    return record


def on_disk(name: str) -> bool:
    """Tell whether a file or folder of this name exists; no name may be too long."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def name_of(source: str) -> str:
    """Return a Hub name as it is, and a local file or folder without the private path to it."""
    return Path(source).name if on_disk(source) else source


def without_folder(value: Any) -> Any:
    """Return an option's value with `name_of` each text in it."""
    if isinstance(value, str):
        return name_of(value)
    return type(value)(map(without_folder, value)) if isinstance(value, list | tuple) else value


def check(config: DataclassInstance, where: str) -> None:
    """Check the fields of a config against their annotations, ranges and choices.

    Args:
        config: a dataclass; fields whose types are not plain are skipped.
        where: what the config is, for messages.

    Raises:
        ConfigError: naming the field.
    """
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        kinds, value = _kinds(hints[field.name]), getattr(config, field.name)
        optional = value is None and type(None) in typing.get_args(hints[field.name])
        if optional or not all(kind in PLAIN for kind in kinds):
            continue
        if not any(_fits(value, kind) for kind in kinds) or not _inside(value, field.metadata):
            raise ConfigError(f"{where}, {field.name}: got {value!r}, expected {_expected(kinds, field.metadata)}")


@functools.cache
def _hints(config: type) -> dict[str, object]:
    return typing.get_type_hints(config)


def _kinds(hint: object) -> tuple[Any, ...]:
    """Return the types of an annotation, without None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return tuple(kind for kind in typing.get_args(hint) if kind is not type(None))
    return (hint,)


def _fits(value: object, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def _inside(value: Any, limits: Mapping[str, Any]) -> bool:
    if "choices" in limits:
        return value in limits["choices"]
    tests = {"low": operator.ge, "high": operator.le, "above": operator.gt, "below": operator.lt}
    return all(test(value, limits[name]) for name, test in tests.items() if name in limits)


def _expected(kinds: tuple[type, ...], limits: Mapping[str, Any]) -> str:
    if "choices" in limits:
        return f"one of {', '.join(limits['choices'])}"
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    what = " or ".join(names[kind] for kind in kinds)
    bounds = {name: f"{limits[name]:g}" for name in ("low", "high", "above", "below") if name in limits}
    if {"low", "high"} <= set(bounds):
        return f"{what} from {bounds['low']} to {bounds['high']}"
    words = {"low": "of at least", "high": "of at most", "above": "above", "below": "below"}
    return " ".join([what, " and ".join(f"{words[name]} {bound}" for name, bound in bounds.items())]).strip()


def parse_pairs(pairs: list[str], place: str = "--kernel-arg") -> dict[str, str]:
    """Read repeated K=V options.

    Args:
        pairs: one text each.
        place: the option, for messages.

    Raises:
        ConfigError: if one has no equals sign, or a name comes twice.
    """
    arguments: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"{place}: got {pair!r}, expected NAME=VALUE such as activation=exp")
        if name in arguments:
            raise ConfigError(f"{place}: {name} is given twice; give it once")
        arguments[name] = value
    return arguments


def parse_names(text: str) -> tuple[str, ...]:
    """Read names with commas between them."""
    return tuple(text.split(",")) if text else ()


def parse_lengths(text: str) -> tuple[int, ...]:
    """Read numbers of tokens with commas between them, or `none`.

    Raises:
        ConfigError: if it is not a list of whole numbers.
    """
    return _parse_numbers("--lengths", text, "128,512,2048")


def parse_image_sizes(text: str) -> tuple[int, ...]:
    """Read numbers of pixels with commas between them, or `none`.

    Raises:
        ConfigError: if it is not a list of whole numbers.
    """
    return _parse_numbers("--image-size", text, "224,384,512")


def _parse_numbers(option: str, text: str, example: str) -> tuple[int, ...]:
    if text.strip().lower() == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option}: got {text!r}, expected numbers such as {example}, or none") from None
