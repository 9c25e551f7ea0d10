"""The additions to a layer's kernel, one class each: what it takes from the kernel, and where it cannot be.

Additions are closed by default. Each backend, and everything else that reads a layer's additions, names the parts that
it handles: as one of the sets below, or one by one. A layer with another part is refused in one line (`check_parts`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from linearize.attention.shape import HeadShape
from linearize.core.errors import ConfigError, LinearizeError
from linearize.core.registry import PLAIN, SCALES, Hybrid, KernelInfo


class Part:
    """One addition to a layer's kernel: a field of `Hybrid`, which config.json, plan files and recipes have as well.

    Attributes:
        name: the field; the layer has the part if its value is not the default.
        words: what messages call it.
        since: the first format version of config.json in which its value means what it means today.
    """

    name = ""
    words = ""
    since = 1

    @property
    def option(self) -> str:
        """Its name on the command line and in messages."""
        return self.name.replace("_", "-")

    def wrong(self, hybrid: Hybrid) -> str:
        """Return what is wrong with the value itself, whatever the kernel is; empty if it is right."""
        return ""

    def limits(self, info: KernelInfo, config: object, hybrid: Hybrid, shape: HeadShape) -> str:
        """Return why a layer of this kernel and shape cannot have this value, and what to do; empty if it can."""
        return ""

    def limits_of_new(self, info: KernelInfo, config: object, hybrid: Hybrid, longest: int | None) -> str:
        """Return why a new layer cannot have it in a model of `longest` tokens; empty if it can."""
        return ""


class Window(Part):
    """Softmax inside a window of W tokens (`linearize.ops.window`)."""

    name, words = "window", "a softmax window"

    def wrong(self, hybrid: Hybrid) -> str:
        """Refuse anything but a size."""
        window = hybrid.window
        if window is None or (type(window) is int and window > 0):
            return ""
        return f"window: got {window!r}, expected a number of tokens, 1 or more; leave it out for none"


class Sinks(Part):
    """Softmax for the first tokens as well."""

    name, words = "sinks", "sinks"

    def wrong(self, hybrid: Hybrid) -> str:
        """Refuse anything but a count, or a count without a window."""
        count = getattr(hybrid, self.name)
        if type(count) is not int or count < 0:
            return f"{self.option}: got {count!r}, expected a number of tokens, 0 or more"
        if count and hybrid.window is None:
            return f"{self.option}: got {count} without a window, expected both; add one, such as window=64"
        return ""


class ExactKeys(Sinks):
    """Softmax for the keys outside the window with the largest learned scales (`linearize.ops.window_causal`)."""

    name, words = "exact_keys", "exact keys"

    def limits(self, info: KernelInfo, config: object, hybrid: Hybrid, shape: HeadShape) -> str:
        """Refuse a kernel without features, unless it has scales by which to choose."""
        if not hybrid.exact_keys or hybrid.scale != SCALES[0] or not info.needs_window:
            return ""
        return (
            f"exact-keys: got {hybrid.exact_keys}, but kernel {info.name!r} has no scale by which to choose keys; "
            "choose another kernel, or use sinks"
        )

    def limits_of_new(self, info: KernelInfo, config: object, hybrid: Hybrid, longest: int | None) -> str:
        """Refuse more keys than there are, and a layer without learned scales."""
        count = hybrid.exact_keys
        if isinstance(count, int) and longest is not None and count > longest:
            return f"exact-keys: got {count}, but the model takes {longest} tokens; choose fewer"
        if not count or hybrid.window is None or hybrid.scale != SCALES[0]:
            return ""
        usual = default_scale(info, config, hybrid.window)
        other = "choose another kernel" if usual == SCALES[0] else f"use scale={usual}"
        return (
            f"exact-keys: got {count} for kernel {info.name!r} without learned scales, by which the keys are chosen; "
            f"{other}, or use sinks"
        )


class RoutedBlocks(Part):
    """Softmax for the blocks of keys outside the window that each query looks up (`linearize.ops.routed`)."""

    name, words = "routed_blocks", "routed blocks"
    since = 2
    """Before, blocks were chosen by their mean key, and K without B meant blocks of 8."""

    def wrong(self, hybrid: Hybrid) -> str:
        """Refuse anything but K or "K:B", and blocks without a window or larger than it."""
        given = hybrid.routed_blocks
        if given == "":
            return ""
        written = type(given) in (int, str) and re.fullmatch(r"[1-9]\d{0,8}(:[1-9]\d{0,8})?", str(given), re.ASCII)
        if not written:
            return f"routed-blocks: got {given!r}, expected a number of blocks, 1 or more, or blocks:keys such as 16:8"
        if hybrid.window is None:
            return f"routed-blocks: got {given} without a window, expected both; add one, such as window=64"
        if hybrid.blocks[1] > hybrid.window:
            return (
                f"routed-blocks: got blocks of {hybrid.blocks[1]} keys with a window of {hybrid.window}, expected at "
                "most as many keys as the window has; choose smaller blocks or a wider window"
            )
        if hybrid.exact_keys:
            return f"routed-blocks: got {given} together with exact keys, expected one of the two; leave one out"
        return ""


class RoutedHeads(Part):
    """The query heads that look blocks up, if not all do; only the keys of these stay in memory."""

    name, words = "routed_heads", "routed heads"

    def wrong(self, hybrid: Hybrid) -> str:
        """Refuse heads without blocks, and heads that keep softmax."""
        if hybrid.routed_heads and not hybrid.routed_blocks:
            return f"routed-heads: got {list(hybrid.routed_heads)} without routed blocks, expected both; add some"
        if both := sorted(set(hybrid.routed_heads) & set(hybrid.softmax_heads)):
            return f"routed-heads: got head {both[0]}, which keeps softmax; leave it out of one of the two"
        return ""

    def limits(self, info: KernelInfo, config: object, hybrid: Hybrid, shape: HeadShape) -> str:
        """Refuse heads that do not exist, are named twice or out of order."""
        return _wrong_heads(self.option, hybrid.routed_heads, shape)


class LogScales(Part):
    """Learned log-scales of queries and keys (`linearize.attention.hybrid`)."""

    name, words = "scale", "learned log-scales"

    def limits(self, info: KernelInfo, config: object, hybrid: Hybrid, shape: HeadShape) -> str:
        """Refuse an unknown kind, and a kernel without features or with negative weights."""
        if hybrid.scale not in SCALES:
            return f"scale: got {hybrid.scale!r}, expected one of {', '.join(SCALES)}"
        if hybrid.scale == SCALES[0] or not (info.needs_window or not info.is_positive(config)):
            return ""
        reason = "has no features to scale" if info.needs_window else "can have negative weights"
        return f"scale: got {hybrid.scale!r}, but kernel {info.name!r} {reason}; leave the scale out"


class SoftmaxHeads(Part):
    """Query heads that keep softmax (`linearize.attention.hybrid`)."""

    name, words = "softmax_heads", "softmax heads"

    def limits(self, info: KernelInfo, config: object, hybrid: Hybrid, shape: HeadShape) -> str:
        """Refuse heads that do not exist, are named twice or out of order."""
        return _wrong_heads(self.option, hybrid.softmax_heads, shape)


def _wrong_heads(option: str, heads: tuple[int, ...], shape: HeadShape) -> str:
    if all(type(h) is int and 0 <= h < shape.heads for h in heads) and sorted(set(heads)) == list(heads):
        return ""
    return f"{option}: got {list(heads)}, expected numbers of heads from 0 to {shape.heads - 1}, each once and in order"


class Fading(Part):
    """A linear part that fades beyond the trained length (`linearize.attention.hybrid.fade`)."""

    name, words = "trained_length", "a trained length"

    def limits(self, info: KernelInfo, config: object, hybrid: Hybrid, shape: HeadShape) -> str:
        """Refuse anything but a length, and layers that cannot fade."""
        length = hybrid.trained_length
        if length is None or (can_fade(hybrid, shape.causal) and type(length) is int and length > 0):
            return ""
        return (
            f"trained-length: got {length!r}, expected a number of tokens, 1 or more, for a causal layer with a window "
            "and scales; leave it out"
        )


PARTS: tuple[Part, ...] = (
    *(Window(), Sinks(), ExactKeys(), LogScales(), SoftmaxHeads(), Fading(), RoutedBlocks()),
    RoutedHeads(),
)
"""All parts, in the order of the fields of `Hybrid`."""

NEAR = frozenset({"window", "sinks", "exact_keys"})
"""The window and the parts that need one: they take keys from the kernel and give them softmax weights."""
ROUTED = frozenset({"routed_blocks", "routed_heads"})
"""Need a window as well, and take keys from the kernel that depend on the query; their state grows with the text."""
SCALED = frozenset({"scale", "trained_length"})
"""The parts that only multiply the kernel's weights."""
HEADS = frozenset({"softmax_heads"})
"""The parts that take whole query heads from the kernel."""


def check_parts(hybrid: Hybrid, handled: frozenset[str], where: str, error: type[LinearizeError] = ConfigError) -> None:
    """Refuse a layer with a part that a consumer of its additions does not handle.

    Args:
        hybrid: the layer's additions.
        handled: names of the parts that the consumer handles.
        where: what the message calls the consumer.
        error: class of the error.

    Raises:
        LinearizeError: for the first part that it does not handle.
    """
    check_values(hybrid.changed, handled, where, error)


def check_values(
    given: Mapping[str, object], handled: frozenset[str], where: str, error: type[LinearizeError] = ConfigError
) -> None:
    """Do what `check_parts` does, for the parts and their values that a user gives for all layers."""
    for name, value in given.items():
        if name not in handled:
            known = ", ".join(part.words for part in PARTS if part.name in handled) or "no additions"
            option = name.replace("_", "-")
            raise error(f"{where}: got a layer with {option}={value}, expected at most {known}; leave it out")


def newest_part(hybrids: Iterable[Hybrid]) -> Part:
    """Return the part of some layers whose values in config.json need the newest format version (`Part.since`)."""
    used = {name for hybrid in hybrids for name in hybrid.changed}
    return max((part for part in PARTS if part.name in used), key=lambda part: part.since, default=PARTS[0])


@functools.cache
def not_supported(missing: frozenset[str]) -> str:
    """Return why a backend declines a layer whose `missing` parts it does not compute; empty if none is."""
    words = {part.name: part.words for part in PARTS}
    names = [*(name for name in words if name in missing), *sorted(missing - set(words))]
    return f"it does not support {words.get(names[0], names[0])}" if names else ""


def _parts_of(hybrid: Hybrid) -> list[Part]:
    return [part for part in PARTS if part.name in hybrid.changed]


def check_hybrid(info: KernelInfo, config: object, hybrid: Hybrid, shape: HeadShape) -> None:
    """Check the values of a layer's additions, and that the kernel can have them.

    Raises:
        ConfigError: if a value is wrong or a part is not possible here; the message says what to choose instead.
    """
    parts = _parts_of(hybrid)
    if len(parts) < len(hybrid.changed):
        check_parts(hybrid, frozenset(part.name for part in parts), f"kernel {info.name!r}")
    for part in parts:
        if problem := part.wrong(hybrid):
            raise ConfigError(problem)
    if hybrid != PLAIN and not info.windowed:
        addition = next(iter(hybrid.changed)).replace("_", "-")
        raise ConfigError(
            f"kernel {info.name!r} takes no {addition}: it has no feature map with a denominator that softmax could "
            "share; choose another kernel or leave it out"
        )
    if info.needs_window and hybrid.window is None:
        raise ConfigError(f"kernel {info.name!r}: got no window, so no key would have any weight; add window=64")
    for part in parts:
        if problem := part.limits(info, config, hybrid, shape):
            raise ConfigError(problem)


def check_new(info: KernelInfo, config: object, hybrid: Hybrid, longest: int | None = None) -> None:
    """Check what only new layers must keep; layers of older checkpoints may not.

    Args:
        info: the kernel.
        config: its arguments.
        hybrid: the additions.
        longest: tokens of the longest input of the model; None if it is not limited or not known.

    Raises:
        ConfigError: if a part is not possible in a new layer; the message says what to choose instead.
    """
    for part in _parts_of(hybrid):
        if problem := part.limits_of_new(info, config, hybrid, longest):
            raise ConfigError(problem)


def default_scale(info: KernelInfo, config: object, window: object) -> str:
    """Return the default kind of a new layer's learned log-scales: linear with a window."""
    takes = info.windowed and not info.needs_window and info.is_positive(config)
    return "linear" if takes and window is not None else "none"


def exact_tokens(hybrid: Hybrid, causal: bool) -> int:
    """Return how many tokens the longest row has in which every key gets its softmax weight."""
    check_parts(hybrid, NEAR | ROUTED | SCALED | HEADS, "exact rows")
    width, chosen, (blocks, size) = hybrid.window or 0, hybrid.sinks + hybrid.exact_keys, hybrid.blocks
    # If only some heads look blocks up, the others have none.
    if blocks and not hybrid.routed_heads:
        # Blocks of sinks alone are never chosen.
        chosen = max(chosen, (blocks + hybrid.sinks // size) * size)
    # In causal layers, exact keys are chosen among the keys that left the window. In other layers, they are chosen
    # among all keys, and only half of the window lies ahead of a query.
    return width + chosen if causal else max(width // 2 + 1, chosen)


def can_fade(hybrid: Hybrid, causal: bool) -> bool:
    """Tell whether a layer of this direction can have a trained length."""
    return causal and hybrid.window is not None and hybrid.scale != SCALES[0]


def without(hybrid: Hybrid, names: Iterable[str]) -> Hybrid:
    """Return additions without some parts."""
    return replace(hybrid, **{name: getattr(type(hybrid), name) for name in names})


def taken_heads(hybrid: Hybrid) -> set[int]:
    """Return the query heads that the kernel does not compute."""
    return {head for name in HEADS for head in getattr(hybrid, name)}
