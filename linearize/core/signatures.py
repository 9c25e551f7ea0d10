"""Functions that take options by name: of a config, or of a verb's job.

Editors, type checkers and `help` show the options, and an unknown one is refused with the nearest name.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from typing import Concatenate, ParamSpec, TypeVar

from linearize.core.errors import ConfigError, UnknownNameError, missing_package, unknown_name
from linearize.core.options import Config, Option, make, options_of
from linearize.core.registry import kinds_of

Model = TypeVar("Model")
Result = TypeVar("Result")
Fields = ParamSpec("Fields")


def _depends(option: Option) -> bool:
    """Tell whether an option's default depends on other things: the help then describes it."""
    own = option.default is not None and not isinstance(option.default, int | float)
    return option.default is MISSING or ("shown" in option.metadata and type(option.default) is not bool and not own)


def _taken(option: Option) -> object:
    """Return the type of an option's values in Python: any sequence for a tuple, and texts where they are parsed."""
    kinds = [
        types.GenericAlias(Sequence, typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else kind
        for kind in kinds_of(option.hint)
    ]
    texts = [str] if "parse" in option.metadata and str not in kinds else []
    nothing = [None] if type(None) in typing.get_args(option.hint) else []
    return functools.reduce(operator.or_, [*kinds, *texts, *nothing])


def with_options(
    config: Callable[Fields, Config],
) -> Callable[[Callable[[Model, Config], Result]], Callable[Concatenate[Model, Fields], Result]]:
    """Make a function of a model and a config take the config's fields as its own arguments.

    Editors, type checkers and `help` show them with their defaults; the config's class names each once.

    Raises:
        UnknownNameError: by the function, for an argument that is not a field.
    """
    signature = inspect.signature(config)

    def decorate(function: Callable[[Model, Config], Result]) -> Callable[Concatenate[Model, Fields], Result]:
        @functools.wraps(function)
        def call(model: Model, *args: Fields.args, **options: Fields.kwargs) -> Result:
            for name in options:
                if name not in signature.parameters:
                    raise unknown_name("option", name, signature.parameters)
            return function(model, config(*args, **options))

        own = inspect.signature(function)
        parameters = [own.parameters["model"], *signature.parameters.values()]
        vars(call)["__signature__"] = own.replace(parameters=parameters)
        return call

    return decorate


def known_names(config: type | None = None) -> Callable[[Callable[Fields, Result]], Callable[Fields, Result]]:
    """Make a function refuse an argument that it does not have with the nearest name, as the command line does.

    Args:
        config: the class of its argument `config`; the message about a field of it says where the field belongs.

    Raises:
        UnknownNameError: by the function, for an unknown argument.
    """
    fields = inspect.signature(config).parameters if config is not None else {}

    def decorate(function: Callable[Fields, Result]) -> Callable[Fields, Result]:
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: Fields.args, **options: Fields.kwargs) -> Result:
            for name in options:
                if name in fields and name not in known:
                    assert config is not None
                    raise UnknownNameError(f"got option {name!r} by itself, expected {config.__name__}({name}=...)")
                if name not in known:
                    raise unknown_name("option", name, known)
            return function(*args, **options)

        return call

    return decorate


def by_name(config: type) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Make a function of a job take the job's options by name, next to its own other arguments.

    Options that stand without their name on the command line can do so here. `help` and notebooks show all of them with
    their defaults; `...` is a default that depends on other things, or that a factory makes.

    Raises:
        UnknownNameError: by the function, for an argument that is neither.
        MissingPackageError: by the function, if a package is missing that an extra provides.
    """
    known = options_of(config)
    first = [name for name, one in known.items() if one.metadata.get("positional")]

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        own = inspect.signature(function)
        more = {name: one.replace(kind=one.KEYWORD_ONLY) for name, one in [*own.parameters.items()][1:]}

        @functools.wraps(function)
        def call(*given: object, **options: object) -> Result:
            if len(given) > len(first):
                raise ConfigError(f"{function.__name__}: got {len(given)} values without a name, expected {len(first)}")
            for name in first[: len(given)]:
                if name in options:
                    raise ConfigError(f"{name}: got it twice, by its name and without; give it once")
            for name in options:
                if name not in known and name not in more:
                    raise unknown_name("option", name, [*known, *more])
            rest = {name: options.pop(name) for name in more if name in options}
            try:
                return function(make(config, {**dict(zip(first, given, strict=False)), **options}), **rest)
            except ModuleNotFoundError as error:
                raise missing_package(error) or error from error

        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD if name in first else inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if one.required else ... if _depends(one) else one.default,
                annotation=_taken(one),
            )
            for name, one in sorted(known.items(), key=lambda item: item[0] not in first)
        ]
        vars(call)["__signature__"] = own.replace(parameters=[*parameters, *more.values()])
        # Sphinx would look for the defaults of these parameters in the source of the function.
        delattr(call, "__wrapped__")
        return call

    return decorate
