"""Turn plain data, as YAML has it, into dataclasses and annotated types. Every error names the key."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from linearize.core.errors import ConfigError, LinearizeError, unknown_name
from linearize.core.registry import KINDS

Built = TypeVar("Built")


def build(cls: type[Built], values: object, where: str, kind: str = "key") -> Built:
    """Build a dataclass from a mapping.

    Args:
        cls: the dataclass; values are checked against its annotations.
        values: a mapping as `yaml.safe_load` returns it.
        where: the key of this mapping, for messages.
        kind: what messages call one of its keys.

    Raises:
        UnknownNameError: for an unknown key.
        ConfigError: for a wrong type or a missing value, or if the dataclass refuses the values.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: got {kind_of(values)}, expected keys with values")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{where}: {unknown_name(kind, str(key), fields)}")
        arguments[key] = convert(hints[key], value, f"{where}.{key}")
    for name in _required(cls):
        if name not in arguments:
            raise ConfigError(f"{where}: the key {name!r} is missing; add it")
    try:
        return cls(**arguments)
    except LinearizeError as error:
        raise ConfigError(f"{where}: {error}") from error


def convert(hint: Any, value: object, where: str) -> Any:
    """Check a value against an annotation and return it as that type.

    A text stands for a section whose only required key is `name`.

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
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        number = _number(value)
        if number is not None:
            return number
    elif isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{where}: got {kind_of(value)}, expected {_expected(hint)}")


def _convert_union(kinds: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    wanted = [kind for kind in kinds if kind is not type(None)]
    # A mapping can only be the section, whose own keys errors should name.
    sections = [kind for kind in wanted if dataclasses.is_dataclass(kind) and isinstance(value, Mapping)]
    if len(wanted) == 1 or sections:
        return convert((sections or wanted)[0], value, where)
    for kind in wanted:
        try:
            return convert(kind, value, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where}: got {kind_of(value)}, expected {' or '.join(map(_expected, wanted))}")


def _required(cls: Any) -> list[str]:
    empty = dataclasses.MISSING
    return [one.name for one in dataclasses.fields(cls) if one.default is empty and one.default_factory is empty]


def _number(value: int | float | str) -> float | None:
    """YAML 1.1 reads 1e-5 (without a dot) as text; it is a number nevertheless."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


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
    return f"{str(value)!r} (put it in quotes, if text is meant)"


def _expected(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return "a section of keys"
    if origin is tuple:
        return {str: "a list of texts", int: "a list of whole numbers", float: "a list of numbers"}.get(
            inner[0], "a list"
        )
    if dict in (hint, origin) or origin is Mapping:
        return "keys with values"
    return KINDS.get(hint, "another value")
