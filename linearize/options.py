"""Options as fields of dataclasses: default, help, range and choices are written once.

The checks on construction, the command line and files of options all read them from there. A config of a whole job has
sections: other configs whose fields become options beside its own, under one flat list of names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from linearize.errors import ConfigError, unknown_name

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
        default: its default; left out, the option is required.
        help: what it is, without the default.
        low: smallest number allowed.
        high: largest number allowed.
        above: number that it has to be larger than.
        below: number that it has to be smaller than.
        choices: the words allowed.
        **more: what only the command line asks for: `metavar`; `shown`, what the help says of the default; `group`, the
            title it stands under; `name`, where the option's name is not the field's; `parse`, which makes the value of
            what was typed; `positional`; `repeat` for an option that may be given several times; `nargs` and `const` as
            argparse has them; `second`, a further field that is made of what was typed, behind a comma.
    """
    limits = {"low": low, "high": high, "above": above, "below": below}
    metadata = {"help": help, **{key: value for key, value in limits.items() if value is not None}, **more}
    if choices is not None:
        metadata["choices"] = tuple(choices)
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Section:
    """How the fields of an inner config become options of the job around it.

    Attributes:
        config: the inner config.
        title: what its options stand under; None: among the job's own.
        prefix: put before every name, and an underscore: "align" makes `align_steps` of `steps`.
        shared: fields without the prefix: one option sets them in every section that has them.
        names: options whose name is another one.
        only: the fields that are options; None: all that have a help text.
        leave_out: fields that are not.
        shown: what the help says of their defaults, by field.
    """

    config: type
    title: str | None = None
    prefix: str = ""
    shared: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] | None = None
    leave_out: tuple[str, ...] = ()
    shown: Mapping[str, str] = field(default_factory=dict)

    def options(self) -> dict[str, dataclasses.Field[Any]]:
        """Return the fields that are options, by the option's name."""
        found = {}
        for one in dataclasses.fields(self.config):
            wanted = "help" in one.metadata if self.only is None else one.name in self.only
            if wanted and one.name not in self.leave_out:
                name = self.names.get(one.name, one.metadata.get("name", one.name))
                plain = not self.prefix or one.name in self.shared
                found[name if plain else f"{self.prefix}_{name}"] = one
        return found


def section(config: type, title: str | None = None, **how: Any) -> Any:
    """Declare a field that holds another config; see `Section`."""
    return field(default_factory=config, metadata={_SECTION: Section(config, title, **how)})


@dataclass(frozen=True)
class Option:
    """One option of a job.

    Attributes:
        name: its name, with underscores.
        kind: type of its values: one of `PLAIN`, or another one that is made by `parse`.
        default: its default, or MISSING where there is none or it is made anew each time.
        required: whether it has to be given.
        metadata: what `option` was given.
        group: the title it stands under, or None.
        places: (section or "", field) of each field that it sets.
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
    """Return the options of a job's config by name, the job's own and those of its sections."""
    return _options_of(config)


@functools.cache
def _options_of(config: type) -> Mapping[str, Option]:
    found: dict[str, Option] = {}
    hints = typing.get_type_hints(config)
    for one in dataclasses.fields(config):
        part: Section | None = one.metadata.get(_SECTION)
        if part is None:
            if "help" in one.metadata:
                name = one.metadata.get("name", one.name)
                _add(found, name, one, hints[one.name], one.metadata.get("group"), ("", one.name))
            continue
        inner = typing.get_type_hints(part.config)
        for name, its in part.options().items():
            _add(found, name, its, inner[its.name], part.title, (one.name, its.name), part.shown.get(its.name))
    return types.MappingProxyType(found)


def _add(
    found: dict[str, Option],
    name: str,
    one: dataclasses.Field[Any],
    hint: object,
    group: str | None,
    place: tuple[str, str],
    shown: str | None = None,
) -> None:
    known = found.get(name)
    if known is not None:
        found[name] = dataclasses.replace(known, places=(*known.places, place))
        return
    metadata = one.metadata if shown is None else {**one.metadata, "shown": shown}
    required = one.default is MISSING and one.default_factory is MISSING
    found[name] = Option(name, _kinds(hint)[0], one.default, metadata, group, (place,), required)


def make(config: type[Config], values: Mapping[str, Any]) -> Config:
    """Build a job's config from options by name; what is not given keeps its default.

    A config may have a static method `derive(values)`, which returns the fields that follow from others, by section (""
    for its own); what is given comes before them.

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
        made = parse(value) if parse is not None and isinstance(value, (str, list)) else value
        for place, inner in known[name].places:
            given.setdefault(place, {})[inner] = made
    missing = [name for name, one in known.items() if one.required and name not in values]
    if missing:
        raise ConfigError(f"{missing[0]}: got nothing, expected a value; give it")
    derived: dict[str, dict[str, object]] = getattr(config, "derive", _nothing)(values)
    own = {**derived.get("", {}), **given.get("", {})}
    for one in dataclasses.fields(config):  # type: ignore[arg-type]
        part: Section | None = one.metadata.get(_SECTION)
        if part is not None:
            inner_config = part.config(**{**derived.get(one.name, {}), **given.get(one.name, {})})
            own[one.name] = getattr(inner_config, "resolve", lambda it=inner_config: it)()
    return config(**own)


def _nothing(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Derive nothing."""
    return {}


def effective(job: object) -> dict[str, object]:
    """Return the options of a job by name, defaults included, as plain data."""
    found = {}
    for name, one in options_of(type(job)).items():
        place, inner = one.places[0]
        owner = getattr(job, place) if place else job
        if hasattr(owner, inner):
            value = value_of(owner, inner, one.metadata)
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def value_of(owner: Any, inner: str, metadata: Mapping[str, Any]) -> Any:
    """Return the value of a field as it is typed; of one that two fields are made of, both with a comma."""
    value = getattr(owner, inner)
    second = getattr(owner, metadata["second"]) if "second" in metadata else None
    return value if second is None else f"{value},{second}"


OF_THE_PLACE = ("output", "overwrite", "resume", "device")
"""Options that say where something is done, not what."""


def recorded(job: object) -> dict[str, Any]:
    """Return the options of a job as its output's record has them: a file of options that does the same again.

    What lies on somebody's disk is named without its folder, and what is not set is left out.
    """
    found = {name: value for name, value in effective(job).items() if name not in OF_THE_PLACE}
    named = {name: without_folder(value) for name, value in found.items() if value not in (None, [], {})}
    return {name: dict(value) if _are_pairs(value) else value for name, value in named.items()}


def _are_pairs(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, tuple) for one in value)


def on_disk(name: str) -> bool:
    """Tell whether something of this name is there; text that is too long for a name is not."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def name_of(source: str) -> str:
    """Return a Hub name as it is, and of a folder its name: where it lies is nobody's business."""
    return Path(source).name if on_disk(source) else source


def without_folder(value: Any) -> Any:
    """Return an option's value with the names of files and folders in place of where they lie (`name_of`)."""
    if isinstance(value, str):
        return name_of(value)
    return type(value)(map(without_folder, value)) if isinstance(value, list | tuple) else value


def check(config: DataclassInstance, where: str) -> None:
    """Hold the fields of a config against their annotations, ranges and choices.

    Args:
        config: a dataclass; fields of types that are not plain are passed over.
        where: what it is, for messages.

    Raises:
        ConfigError: naming the field.
    """
    kind: Any = type(config)
    hints = _hints(kind)
    for one in dataclasses.fields(config):
        kinds = _kinds(hints[one.name])
        value = getattr(config, one.name)
        optional = value is None and _optional(hints[one.name])
        if optional or not all(kind in PLAIN for kind in kinds):
            continue
        if not any(_fits(value, kind) for kind in kinds) or not _inside(value, one.metadata):
            raise ConfigError(f"{where}, {one.name}: got {value!r}, expected {_expected(kinds, one.metadata)}")


@functools.cache
def _hints(config: type) -> dict[str, object]:
    return typing.get_type_hints(config)


def _kinds(hint: object) -> tuple[Any, ...]:
    """Return the types of an annotation, without None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return tuple(kind for kind in typing.get_args(hint) if kind is not type(None))
    return (hint,)


def _optional(hint: object) -> bool:
    return type(None) in typing.get_args(hint)


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
    said = " and ".join(f"{words[name]} {bound}" for name, bound in bounds.items())
    return f"{what} {said}".strip()


def parse_pairs(pairs: list[str], place: str = "--kernel-arg") -> dict[str, str]:
    """Read repeated K=V options.

    Args:
        pairs: one text each.
        place: where they stand, for the errors.

    Raises:
        ConfigError: if one has no equals sign, or a name comes twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"{place}: got {pair!r}, expected NAME=VALUE such as activation=exp")
        if name in found:
            raise ConfigError(f"{place}: {name} is given twice; give it once")
        found[name] = value
    return found


def parse_names(text: str) -> tuple[str, ...]:
    """Read names with commas between them."""
    return tuple(text.split(",")) if text else ()


def parse_lengths(text: str) -> tuple[int, ...]:
    """Read numbers of tokens with commas between them, or `none`.

    Raises:
        ConfigError: if it is no list of whole numbers.
    """
    return _parse_numbers("--lengths", text, "128,512,2048")


def parse_image_sizes(text: str) -> tuple[int, ...]:
    """Read numbers of pixels with commas between them, or `none`.

    Raises:
        ConfigError: if it is no list of whole numbers.
    """
    return _parse_numbers("--image-size", text, "224,384,512")


def _parse_numbers(option: str, text: str, example: str) -> tuple[int, ...]:
    if text.strip().lower() == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option}: got {text!r}, expected numbers such as {example}, or none") from None
