"""Turn plain data (YAML) into dataclasses: an unknown key or a wrong type is an error that names the key."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from linearize.errors import ConfigError, LinearizeError, unknown_name
from linearize.registry import KINDS

Built = TypeVar("Built")


def build(cls: type[Built], values: object, where: str) -> Built:
    """Build a dataclass from a mapping.

    Args:
        cls: the dataclass; its annotations are what is checked.
        values: a mapping as `yaml.safe_load` gives it.
        where: the key it stands under, for messages.

    Raises:
        ConfigError: for an unknown key, a wrong type or a missing value; names the key.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: got {kind_of(values)}, expected keys with values")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    made = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{where}: {unknown_name('key', str(key), fields)}")
        made[key] = convert(hints[key], value, f"{where}.{key}")
    for name, field in fields.items():
        empty = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if name not in made and empty:
            raise ConfigError(f"{where}: the key {name!r} is missing; add it")
    try:
        return cls(**made)
    except LinearizeError as error:
        raise ConfigError(f"{where}: {error}") from error


def convert(hint: Any, value: object, where: str) -> Any:
    """Check a value against an annotation and return it as that type.

    Raises:
        ConfigError: if it is of another type.
    """
    if hint is object or hint is Any:
        return value
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _any_of(inner, value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else build(hint, value, where)
    if origin is tuple:
        return _tuple(inner, value, where)
    if origin in (dict, Mapping):
        return _mapping(inner, value, where)
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        number = _number(value)
        if number is not None:
            return number
    elif hint is dict and isinstance(value, Mapping):
        return dict(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{where}: got {kind_of(value)}, expected {_called(hint)}")


def _any_of(kinds: tuple[object, ...], value: object, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    wanted = [kind for kind in kinds if kind is not type(None)]
    if len(wanted) == 1:
        return convert(wanted[0], value, where)
    # Of a name or a section, a section is told by its form, so that its own keys are named in errors.
    for kind in wanted:
        if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            return convert(kind, value, where)
    for kind in wanted:
        try:
            return convert(kind, value, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where}: got {kind_of(value)}, expected {' or '.join(_called(kind) for kind in wanted)}")


def _tuple(inner: tuple[object, ...], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: got {kind_of(value)}, expected a list")
    if len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(convert(inner[0], one, f"{where}[{place}]") for place, one in enumerate(value))
    if len(value) != len(inner):
        raise ConfigError(f"{where}: got {len(value)} values, expected {len(inner)}")
    return tuple(
        convert(kind, one, f"{where}[{place}]") for place, (kind, one) in enumerate(zip(inner, value, strict=True))
    )


def _mapping(inner: tuple[object, ...], value: object, where: str) -> dict[object, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: got {kind_of(value)}, expected keys with values")
    return {key: convert(inner[1], one, f"{where}.{key}") for key, one in value.items()}


def _number(value: int | float | str) -> float | None:
    """YAML 1.1 reads 1e-5 (without a dot) as text: it is a number nevertheless."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def kind_of(value: object) -> str:
    """Say what a value of a YAML file is, in words of YAML."""
    if isinstance(value, Mapping):
        return "a section of keys"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    # Dates and the like, which YAML makes of text without quotes, as they were written.
    return (
        repr(value) if isinstance(value, str | int | float) else f"{str(value)!r} (put it in quotes, if text is meant)"
    )


def _called(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return "a section of keys"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_called(kind) for kind in inner if kind is not type(None))
    if origin is tuple:
        kinds = {str: "of texts", int: "of whole numbers", float: "of numbers"}
        return f"a list {kinds[inner[0]]}" if inner[0] in kinds else "a list"
    return KINDS.get(hint, "keys with values" if dict in (hint, origin) or origin is Mapping else "another value")


__all__ = ["build", "convert", "kind_of"]
