"""The registry: every kernel by name, with the facts that other code reads instead of comparing names.

A kernel module registers itself on import (`register_kernel`). `linearize/kernels/<name>.py` files are found by their
name or by listing the folder; kernels outside the package come from the entry point group `linearize.kernels` or from
a call of `linearize.register_kernel`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import math
import operator
import pkgutil
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar

from linearize.core.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import Tensor


@dataclass(frozen=True)
class StageOne:
    """A kernel's defaults for stage one.

    Attributes:
        learning_rate: peak learning rate of AdamW.
        weight_decay: AdamW's decay.
        warmup: share of the steps in which the rate rises linearly; it then falls as a cosine.
        loss: "weights" (cross-entropy of the normalised weights) or "output" (squared error of the head outputs).
        negative_penalty: weight of the penalty on negative mass, for maps whose weights can be negative.
        max_grad_norm: gradient clipping, per layer.
    """

    learning_rate: float = 1e-2
    weight_decay: float = 0.0
    warmup: float = 0.05
    loss: str = "weights"
    negative_penalty: float = 0.0
    max_grad_norm: float = 1.0


Values = dict[str, Any]
"""Values by name whose types are known only at run time: JSON, YAML, options, arguments of a function."""
ReadOnlyValues = Mapping[str, Any]
"""The same for a reader, which changes none of them."""
Plain = TypeVar("Plain")
Own = TypeVar("Own", bound="DataclassInstance")
"""A kernel's own class of arguments."""
Count = Callable[[Own, int], int]
"""(config, size) -> a number."""
Flag = bool | Callable[[Own], bool]
"""True or false, or (config) -> bool."""


@dataclass(frozen=True)
class KernelInfo(Generic[Own]):
    """Facts about a kernel.

    Attributes:
        name: the name that users write.
        summary: a summary in a few words.
        formula: the map, exactly as it is computed.
        source: paper, section and equation.
        url: link to the paper.
        config: frozen dataclass of the arguments, declared with `option`.
        build: class of the map or mixer (`linearize.kernels.base`); None for presets.
        feature_dim: (config, head_dim) -> F, None for mixers without a feature map.
        positive: whether weights can never be negative, or (config) -> bool if that depends on the arguments. Read it
            through `is_positive`.
        parameters: (config, head_dim) -> learnable numbers of one map of one head.
        parameters_formula: that number, in words.
        learnable: whether stage one has parameters to train, or (config) -> bool if that depends on the arguments. Read
            it through `is_learnable`.
        normalized: whether weights sum to one.
        random: whether random numbers are drawn at conversion (saved in buffers).
        estimates: for random features, the kernel that phi(x) . phi(y) estimates, as a function of x . y.
        positional: whether features depend on the token's position.
        causal: whether it works in causal models.
        bidirectional: whether it works in bidirectional models.
        streamable: whether decoding needs only constant memory.
        maximum_positions: whether it needs the longest input length at conversion (argument `max_positions`).
        max_head_dim: largest head size; None if any will do.
        shared_parameters: (config, head_dim) -> learnable numbers that all heads of one map share.
        output_parameters: (config, value_dim) -> learnable numbers per query head after the attention (norms, powers).
        preset: (config, layers) -> (kernel, arguments) for each layer; only for a name that means a whole layer plan
            and has no map or mixer.
        choose: when to choose it, in a few words.
        stage_one: defaults of stage one, or (config) -> `StageOne` if they depend on the arguments. Read them through
            `training`.
        needs_window: whether it works only together with a softmax window.
        legacy_defaults: earlier defaults of arguments that older checkpoints do not mention, where the default has
            changed since; newer checkpoints always mention these arguments.
    """

    name: str
    summary: str
    formula: str
    source: str
    url: str
    config: type[Own]
    build: type | None
    feature_dim: Count[Own] | None
    positive: Flag[Own]
    parameters: Count[Own] = lambda config, head_dim: 0
    parameters_formula: str = "0"
    learnable: Flag[Own] = False
    normalized: bool = True
    random: bool = False
    positional: bool = False
    causal: bool = True
    bidirectional: bool = True
    streamable: bool = True
    maximum_positions: bool = False
    max_head_dim: int | None = None
    shared_parameters: Count[Own] = lambda config, head_dim: 0
    output_parameters: Count[Own] = lambda config, value_dim: 0
    estimates: Callable[[Tensor], Tensor] | None = None
    preset: Callable[[Own, int], list[tuple[str, dict[str, object]]]] | None = None
    choose: str = ""
    needs_window: bool = False
    stage_one: StageOne | Callable[[Own], StageOne] = field(default_factory=StageOne)
    legacy_defaults: Mapping[str, object] = field(default_factory=dict)

    @property
    def windowed(self) -> bool:
        """Whether it can be combined with a softmax window: it has a feature map and a denominator."""
        return self.feature_dim is not None and self.normalized

    def is_positive(self, config: Own) -> bool:
        """Tell whether the weights of a kernel with these arguments can never be negative."""
        return self.positive(config) if callable(self.positive) else self.positive

    def is_learnable(self, config: Own) -> bool:
        """Tell whether stage one has parameters to train in a kernel with these arguments."""
        return self.learnable(config) if callable(self.learnable) else self.learnable

    def training(self, config: Own) -> StageOne:
        """Return the defaults of stage one for a kernel with these arguments."""
        return self.stage_one(config) if callable(self.stage_one) else self.stage_one


SCALES = ("none", "linear", "network")
"""Kinds of learned log-scales (`linearize.attention.hybrid`)."""


BLOCK_SIZE = 1
"""Keys of a routed block by default: single keys find more than larger blocks (docs/benchmarks/routed.md)."""


@dataclass(frozen=True)
class Hybrid:
    """Additions to a layer's kernel: softmax for some keys and heads, and learned scales.

    Attributes:
        window: size W of the softmax window (`linearize.ops.window`), or None.
        sinks: number of first tokens that get softmax weights from every query.
        exact_keys: number S of keys per head outside the window that also do (`linearize.ops.window_causal`).
        scale: learned log-scales of queries and keys: "none", "linear" or "network".
        softmax_heads: query heads that keep softmax attention.
        trained_length: longest row, in tokens, that a causal hybrid was trained on. Beyond it the linear part fades
            (`linearize.attention.hybrid.fade`); None: it never fades.
        routed_blocks: blocks of keys outside the window that each query looks up and that get softmax weights
            (`linearize.ops.routed`): "K:B" for blocks of B keys; K becomes "K:`BLOCK_SIZE`".
        routed_heads: the query heads that look blocks up; () for all.
    """

    window: int | None = None
    sinks: int = 0
    exact_keys: int = 0
    scale: str = "none"
    softmax_heads: tuple[int, ...] = ()
    trained_length: int | None = None
    routed_blocks: str | int = ""
    routed_heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Write K as "K:B", so that no file depends on today's default."""
        if str(self.routed_blocks).isdecimal() and int(self.routed_blocks):
            object.__setattr__(self, "routed_blocks", f"{self.routed_blocks}:{BLOCK_SIZE}")

    @classmethod
    def of(cls, arguments: ReadOnlyValues) -> Hybrid:
        """Pick the additions out of a layer's arguments, which may be text (as typed on a command line)."""
        values = {name: value for name, value in arguments.items() if name in HYBRID}
        for name, value in values.items():
            if isinstance(getattr(cls, name), tuple):
                several = map(_number, value.split("+")) if isinstance(value, str) else value
                values[name] = tuple(several) if isinstance(several, Iterable) else (several,)
            elif not isinstance(getattr(cls, name), str):
                values[name] = _number(value)
        return cls(**values)

    @functools.cached_property
    def changed(self) -> Values:
        """The values that differ from the defaults, as plain data."""
        values: Values = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                values[one.name] = list(value) if isinstance(one.default, tuple) else value
        return values

    @property
    def blocks(self) -> tuple[int, int]:
        """The number of routed blocks per query, and the keys per block."""
        count, _, size = str(self.routed_blocks).partition(":")
        return int(count or 0), int(size or BLOCK_SIZE)


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


PLAIN = Hybrid()
"""A kernel without additions."""
HYBRID = tuple(f.name for f in dataclasses.fields(Hybrid))
"""The arguments that every `windowed` kernel accepts in addition to its own."""

_KERNELS: dict[str, KernelInfo] = {}
_LOCK = threading.Lock()
_discovered = False


def register_kernel(info: KernelInfo) -> KernelInfo:
    """Add a kernel; adding it again from the same class (a reloaded module) replaces it.

    Raises:
        ConfigError: if another kernel has the name, or the facts contradict each other.
    """
    known = _KERNELS.get(info.name)
    if known is not None and _origin(known) != _origin(info):
        raise ConfigError(f"kernel {info.name!r} is already registered by {_origin(known)}; choose another name")
    declared = getattr(info.config, "__dataclass_params__", None)
    if declared is None or not declared.frozen:
        raise ConfigError(f"kernel {info.name!r}: got config {info.config!r}, expected a frozen dataclass")
    if taken := {f.name for f in dataclasses.fields(info.config)} & set(HYBRID):
        name = sorted(taken)[0]
        raise ConfigError(f"kernel {info.name!r}: {name!r} is an argument of every kernel; rename its own argument")
    if (info.build is None) == (info.preset is None):
        raise ConfigError(f"kernel {info.name!r}: got both build and preset, or neither; expected exactly one")
    if not (info.causal or info.bidirectional):
        raise ConfigError(f"kernel {info.name!r}: works neither causally nor bidirectionally; set one of the two")
    _KERNELS[info.name] = info
    return info


def _origin(info: KernelInfo) -> str:
    return (info.build or info.config).__qualname__


def kernel_info(name: str) -> KernelInfo:
    """Look a kernel up by name.

    Raises:
        UnknownNameError: if it does not exist; the message suggests the nearest name and lists all.
    """
    if name not in _KERNELS and __name__.startswith("linearize.") and str(name).isidentifier():
        # Its own file, if it has one, spares the import of all others.
        own = f"linearize.kernels.{name}"
        importlib.import_module(own if importlib.util.find_spec(own) else "linearize.kernels")
    if name not in _KERNELS:
        _discover()
    if name not in _KERNELS:
        raise unknown_name("kernel", name, _KERNELS)
    return _KERNELS[name]


def kernel_infos() -> list[KernelInfo]:
    """Return all kernels, sorted by name."""
    _discover()
    return [_KERNELS[name] for name in sorted(_KERNELS)]


def _discover() -> None:
    """Import the package's kernel files and the entry points, once. The code in a checkpoint has neither."""
    global _discovered
    with _LOCK:
        if _discovered:
            return
        _discovered = True
        if not __name__.startswith("linearize."):
            return
        for module in pkgutil.iter_modules(importlib.import_module("linearize.kernels").__path__):
            if not module.name.startswith("_") and module.name != "base":
                importlib.import_module(f"linearize.kernels.{module.name}")
        from importlib.metadata import entry_points

        for entry in entry_points(group="linearize.kernels"):
            try:
                entry.load()
            except Exception as error:
                _discovered = False
                raise ConfigError(
                    f"kernels of the installed package {entry.value!r}: got {type(error).__name__}: {error}; "
                    "repair or uninstall the package"
                ) from error


LIMITS: dict[str, Callable[..., object]] = {
    "low": operator.le,
    "high": operator.ge,
    "above": operator.lt,
    "below": operator.gt,
    "multiple_of": lambda step, value: not value % step,
    "choices": operator.contains,
}
"""The limits of an option, in its metadata, and what tells whether a value keeps them: (limit, value) -> bool."""


def option(
    default: object = dataclasses.MISSING,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    multiple_of: int | None = None,
    choices: Iterable[object] | None = None,
    **more: object,
) -> Any:
    """Declare an argument of a kernel, or a field of another config, with its help text and allowed values.

    Args:
        default: its default; without one it is required.
        help: description, without the default.
        low: smallest number allowed.
        high: largest number allowed.
        above: the number must be larger than this.
        below: the number must be smaller than this.
        multiple_of: the number must be a multiple of this.
        choices: the values allowed.
        **more: for the command line only: `metavar`; `shown`, the default as the help shows it; `group`, the title of
            its group; `name`, if it is not the field's; `parse`, which converts the typed text to the value;
            `positional`; `repeat` for an option that may be given several times; `nargs` and `const` as in argparse;
            `second`, a second field, whose value is typed after a comma; `negatable`, whether --no-NAME exists too.
    """
    metadata: Values = {"help": help}
    values = (low, high, above, below, multiple_of, choices and tuple(choices))
    for name, limit in zip(LIMITS, values, strict=True):
        if limit is not None:
            metadata[name] = limit
    metadata |= more
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def field_types(config: type) -> Values:
    """Return the types of a dataclass's fields, by name."""
    return typing.get_type_hints(config)


def make_config(info: KernelInfo[Own], arguments: Mapping[str, object]) -> Own:
    """Build a kernel's config from arguments, which may be text (as typed on a command line).

    Raises:
        UnknownNameError: for an argument that the kernel does not have.
        ConfigError: for a value of the wrong type or out of range.
    """
    hints = field_types(info.config)
    for name in arguments:
        if name not in hints:
            raise unknown_name(f"argument of kernel {info.name}", name, hints)
    config = info.config(**{name: _from_text(value, hints[name]) for name, value in arguments.items()})
    check(config, f"kernel {info.name}")
    return config


def _from_text(value: object, hint: object) -> object:
    """Convert a text to the annotated type; leave a text that cannot be converted for `check` to refuse."""
    kinds = kinds_of(hint)
    if float in kinds and type(value) is int and fits(value, float):
        return float(value)
    if not isinstance(value, str):
        return value
    words: dict[str, object] = {"true": True, "false": False} if bool in kinds else {}
    if type(None) in typing.get_args(hint):
        words["none"] = None
    for kind in kinds:
        if kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(value)
    return words.get(value.lower(), value)


KINDS: dict[object, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
"""Plain types, and their names in messages."""


def check(config: DataclassInstance, where: str) -> None:
    """Check the fields of a config against their annotations, ranges and choices.

    Args:
        config: a dataclass; fields whose types are not plain are skipped.
        where: name of the config in messages.

    Raises:
        ConfigError: naming the field.
    """
    for name, kinds, optional, limits in _checked_fields(type(config)):
        value = getattr(config, name)
        if value is None and optional:
            continue
        # A subclass or a whole number may fit as well.
        plain = type(value) in kinds and (type(value) is not float or math.isfinite(value))
        fitting = plain or any(map(fits, itertools.repeat(value), kinds))
        for limit, keeps in LIMITS.items() if fitting else ():
            fitting = fitting and (limit not in limits or bool(keeps(limits[limit], value)))
        if not fitting:
            raise ConfigError(f"{where}, {name}: got {value!r}, expected {allowed(kinds, limits)}")


@functools.cache
def _checked_fields(config: type[DataclassInstance]) -> list[tuple[str, tuple[type, ...], bool, ReadOnlyValues]]:
    """Return the fields of plain types: name, types, whether None is allowed, and metadata if it has limits."""
    fields: list[tuple[str, tuple[type, ...], bool, ReadOnlyValues]] = []
    for one in dataclasses.fields(config):
        hint = field_types(config)[one.name]
        limits = {} if one.metadata.keys().isdisjoint(LIMITS) else one.metadata
        if KINDS.keys() >= set(kinds_of(hint)):
            fields.append((one.name, kinds_of(hint), type(None) in typing.get_args(hint), limits))
    return fields


@functools.cache
def kinds_of(hint: object) -> tuple[Any, ...]:
    """Return the types of an annotation, without None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = dict.fromkeys(typing.get_args(hint))
        kinds.pop(type(None), None)
        return tuple(kinds)
    return (hint,)


def fits(value: object, kind: type[Plain]) -> TypeGuard[Plain]:
    """Tell whether a value is of a plain type; numbers must be finite, and true and false are not numbers."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        # False for NaN, infinity, and whole numbers too large for a float.
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(value, kind)


def allowed(kinds: Iterable[type], limits: ReadOnlyValues) -> str:
    """Describe the values that an option of these types takes, for messages."""
    if "choices" in limits:
        return f"one of {', '.join(map(str, limits['choices']))}"
    text = " or ".join(KINDS[kind] for kind in kinds)
    bounds = {name: f"{limits[name]:.10g}" for name in ("low", "high", "above", "below") if name in limits}
    if {"low", "high"} <= set(bounds):
        text = f"{text} from {bounds['low']} to {bounds['high']}"
    else:
        words = {"low": "of at least", "high": "of at most", "above": "above", "below": "below"}
        text = " ".join([text, " and ".join(f"{words[name]} {bound}" for name, bound in bounds.items())]).strip()
    return text if "multiple_of" not in limits else f"{text}, a multiple of {limits['multiple_of']}"
