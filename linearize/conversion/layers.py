"""Options of a conversion, and which layer gets which kernel: the syntax of `--layers` and `--keep-softmax`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.parts import check_hybrid, check_new, default_scale
from linearize.attention.shape import HeadShape
from linearize.conversion.positions import current_length
from linearize.core.errors import ConfigError, UnsupportedModelError
from linearize.core.kernel_options import Additions
from linearize.core.registry import HYBRID, Hybrid, check, kernel_info, make_config, option
from linearize.modeling.plan import SOFTMAX

Choice = tuple[str, Mapping[str, object]]
"""The kernel of one layer, and its arguments."""
_LARGEST = 99_999
"""Largest layer number: anything larger is a mistake, and its range would be a huge list."""


@dataclass(frozen=True)
class ConversionConfig(Additions):
    """Options of `linearize.convert` and `linearize.plan`.

    Attributes:
        kernel: name of the kernel for all layers that `layers` does not name; None if it names every layer.
        kernel_args: arguments of that kernel.
        layers: kernels by layer number, `{0: "hedgehog", 1: ("luna", {...})}` or "0-5=hedgehog,6-11=elu".
        keep_softmax: numbers of layers that stay softmax; or "1/4" for the last layer of every four.
        softmax_heads: query heads that stay softmax, by layer number: `{4: [0]}` or "4:0,11:7". Their keys are cached.
        max_length: longest input that the model should take, in tokens; None keeps its current limit.
        image_size: side of the largest square image that the model should take, in pixels; in place of `max_length`.
        positions: how learned positions are extended, "tile" or "interpolate".
        seed: seed of the kernels' starting values.
        example_inputs: inputs for the trial run, if they cannot be made up from the config.
        local_as_full: whether layers with a sliding window or chunks are converted too, as full attention: they then
            see all tokens, and match the original only up to the window's length.

    Raises:
        ConfigError: on construction, for a value of another type.
    """

    kernel: str | None = "hedgehog"
    kernel_args: Mapping[str, object] | None = None
    layers: Mapping[int, str | tuple[str, Mapping[str, object]]] | str | None = None
    keep_softmax: Iterable[int] | str = ()
    softmax_heads: Mapping[int, Iterable[int]] | str | None = None
    max_length: int | None = None
    image_size: int | None = option(None, low=1)
    positions: str = "tile"
    seed: int = option(0, low=-(2**63), high=2**63 - 1)
    example_inputs: Mapping[str, Tensor] | None = None
    local_as_full: bool = False

    def __post_init__(self) -> None:
        check(self, "conversion")
        for name, kind in {"kernel_args": str, "example_inputs": str, "layers": int, "softmax_heads": int}.items():
            value, key = getattr(self, name), "name" if kind is str else "layer number"
            mapped = isinstance(value, Mapping) and all(isinstance(one, kind) for one in value)
            if not (mapped or value is None or (kind is int and isinstance(value, str))):
                raise ConfigError(f"{name}: got {value!r}, expected a mapping by {key}")
        heads = self.softmax_heads
        if isinstance(heads, Mapping) and not all(isinstance(of_layer, Iterable) for of_layer in heads.values()):
            raise ConfigError(f"softmax_heads: got {heads!r}, expected lists of heads by layer number")
        if self.image_size is not None and self.max_length is not None:
            raise ConfigError(
                f"image_size: got {self.image_size} and max_length {self.max_length}, which both set the size; drop one"
            )
        if not isinstance(self.keep_softmax, Iterable):
            raise ConfigError(f"keep_softmax: got {self.keep_softmax!r}, expected a list of layer numbers")


def parse_indices(text: str, where: str) -> list[int]:
    """Read "0-2,5" as [0, 1, 2, 5].

    Raises:
        ConfigError: if it cannot be read.
    """
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,20})(?:-(\d{1,20}))?", part.strip())
        if match is None:
            raise ConfigError(f"{where}: got {text!r}, expected layer numbers such as 0-5 or 0,11")
        start, stop = int(match[1]), int(match[2] or match[1])
        if stop < start:
            raise ConfigError(f"{where}: got the range {part.strip()!r}, expected the smaller number first")
        if stop > _LARGEST:
            raise ConfigError(f"{where}: got layer {stop}, expected at most {_LARGEST}")
        indices.extend(range(start, stop + 1))
    return indices


def kept_layers(keep: Iterable[int] | str, count: int) -> list[int]:
    """Return the numbers of the layers that stay softmax.

    Args:
        keep: their numbers; or text, such as "0,11", or "1/N" for the last layer of every N.
        count: number of attentions that can be converted.

    Raises:
        ConfigError: if the text cannot be read.
    """
    if not isinstance(keep, str):
        return list(keep)
    every = parse_share(keep)
    return parse_indices(keep, "keep_softmax") if every is None else list(range(every - 1, count, every))


def parse_share(text: str) -> int | None:
    """Read "1/N" as N; None if the text is not a share.

    Raises:
        ConfigError: if the text has a slash but is not 1/N with N of at least 2.
    """
    if "/" not in text:
        return None
    share = re.fullmatch(r"\s*1\s*/\s*(\d{1,5})\s*", text)
    if share is None or int(share[1]) < 2:
        raise ConfigError(f"keep_softmax: got {text!r}, expected one layer of every N, such as 1/4")
    return int(share[1])


def parse_layers(text: str) -> dict[int, str]:
    """Read "0-5=diag_softmax,6-11=norm_elu" as a kernel name per layer.

    Raises:
        ConfigError: if a part has no kernel, or a layer is named twice.
    """
    kernels: dict[int, str] = {}
    pending: list[str] = []
    for part in text.split(","):
        numbers, equals, name = part.partition("=")
        pending.append(numbers)
        if not equals:
            continue
        if not name.strip():
            raise ConfigError(f"layers: got {part!r}, expected RANGE=KERNEL such as 0-5=hedgehog")
        for index in parse_indices(",".join(pending), "layers"):
            if index in kernels:
                raise ConfigError(f"layers: layer {index} is named twice in {text!r}; name each layer once")
            kernels[index] = name.strip()
        pending = []
    if pending:
        raise ConfigError(f"layers: {','.join(pending)!r} has no kernel; write RANGE=KERNEL such as 0-5=hedgehog")
    return kernels


def parse_heads(text: str) -> dict[int, list[int]]:
    """Read "4:0,11:7,11:8" as {4: [0], 11: [7, 8]}: query heads by layer.

    Raises:
        ConfigError: if it cannot be read, or a head is named twice.
    """
    heads: dict[int, list[int]] = {}
    for part in text.split(","):
        pair = re.fullmatch(r"\s*(\d{1,5})\s*:\s*(\d{1,5})\s*", part)
        if pair is None:
            raise ConfigError(f"softmax-heads: got {text!r}, expected LAYER:HEAD pairs such as 4:0,11:7")
        layer, head = int(pair[1]), int(pair[2])
        if head in heads.setdefault(layer, []):
            raise ConfigError(f"softmax-heads: head {part.strip()} is named twice in {text!r}; name it once")
        heads[layer].append(head)
    return heads


def choose(model: PreTrainedModel, config: ConversionConfig, count: int) -> list[Choice]:
    """Return kernel and arguments for each of the `count` layers of a model that can be converted.

    Raises:
        ConfigError: if a layer is missing, named twice or beyond the last one, or no layer has a requested addition or
            head.
        UnsupportedModelError: if all layers stay softmax.
    """
    chosen = assign(count, config)
    if all(name == SOFTMAX for name, _ in chosen):
        raise UnsupportedModelError(
            f"all {count} attentions of {type(model).__name__} are kept as softmax, nothing is left to convert; name "
            "fewer layers in keep_softmax"
        )
    kernels = [(kernel_info(name), arguments) for name, arguments in chosen if name != SOFTMAX]
    if config.given and not any(info.windowed for info, _ in kernels):
        # No kernel of this model can have the requested additions; the check of the first one raises the reason.
        info, arguments = kernels[0]
        shape = HeadShape(1, 1, 1, 1, info.causal)
        check_hybrid(info, make_config(info, arguments), Hybrid.of(config.given), shape)
    text = config.softmax_heads
    heads = parse_heads(text) if isinstance(text, str) else {number: list(own) for number, own in (text or {}).items()}
    if not all(type(head) is int for own in heads.values() for head in own):
        raise ConfigError(f"softmax-heads: got {heads!r}, expected lists of numbers of heads by layer number")
    for number in heads:
        if number not in range(count):
            raise _no_layer(number, count, "softmax-heads: ")
        if (kernel := chosen[number][0]) == SOFTMAX:
            raise ConfigError(f"softmax-heads: layer {number} stays softmax as a whole; name heads of other layers")
        if not kernel_info(kernel).windowed:
            raise ConfigError(
                f"softmax-heads: layer {number} has kernel {kernel!r}, whose heads cannot stay softmax; choose "
                "another kernel, or name heads of other layers"
            )
    layers, given, longest = [], config.given, config.max_length or current_length(model)
    for number, choice in enumerate(chosen):
        own = {"softmax_heads": tuple(sorted(heads[number]))} if number in heads else {}
        layers.append(complete(choice, given | own, longest))
    return layers


def _no_layer(number: object, count: int, where: str = "") -> ConfigError:
    return ConfigError(
        f"{where}layer {number!r} does not exist: this model has {count} that can be converted, 0 to {count - 1}"
    )


def assign(count: int, config: ConversionConfig) -> list[Choice]:
    """Return kernel and arguments for each of `count` layers, without additions.

    Raises:
        ConfigError: for a layer that does not exist, has no kernel, or is both named and kept; an unknown kernel; or
            arguments for no layer.
    """
    named = parse_layers(config.layers) if isinstance(config.layers, str) else dict(config.layers or {})
    kept = kept_layers(config.keep_softmax, count)
    for index in [*named, *kept]:
        if index not in range(count):
            raise _no_layer(index, count)
    if both := sorted(set(named) & set(kept)):
        raise ConfigError(f"layer {both[0]} is in layers and in keep_softmax; name it in one of them")
    if config.kernel_args and len({*named, *kept}) == count:
        raise ConfigError(
            f"kernel_args: got {sorted(config.kernel_args)}, but layers and keep_softmax name every layer; give "
            "each layer its own arguments"
        )
    rest = [] if config.kernel is None else expand(count, config.kernel, config.kernel_args or {})
    chosen: list[Choice] = []
    for index in range(count):
        if index in kept:
            chosen.append((SOFTMAX, {}))
        elif index in named:
            entry = named[index]
            try:
                chosen.append((entry, {}) if isinstance(entry, str) else (entry[0], dict(entry[1])))
            except (TypeError, ValueError, IndexError, KeyError):
                expected = "expected a kernel or (kernel, arguments)"
                raise ConfigError(f"layer {index}: got {entry!r}, {expected}") from None
        elif rest:
            chosen.append(rest[index])
        else:
            raise ConfigError(
                f"layer {index} has no kernel: name it in layers or keep_softmax, or give a kernel for the rest"
            )
    return chosen


def complete(choice: Choice, more: Mapping[str, object], longest: int | None) -> Choice:
    """Complete a layer's arguments: with the additions of all layers, and the longest input if the kernel needs it.

    Raises:
        ConfigError: for more exact keys than the model takes tokens, or a wrong argument.
    """
    kernel, arguments = choice[0], dict(choice[1])
    if kernel == SOFTMAX:
        return choice
    info = kernel_info(kernel)
    if info.windowed:
        arguments = {**more, **arguments}
        own = {name: value for name, value in arguments.items() if name not in HYBRID}
        kernel_config = make_config(info, own)
        arguments.setdefault("scale", default_scale(info, kernel_config, arguments.get("window")))
        check_new(info, kernel_config, Hybrid.of(arguments), longest)
    if info.maximum_positions and arguments.get("max_positions") is None:
        arguments = arguments | {"max_positions": longest}
    return kernel, arguments


def expand(count: int, kernel: str, arguments: Mapping[str, object]) -> list[Choice]:
    """Return kernel and arguments for each of `count` layers that all have one kernel, or follow one preset.

    Raises:
        ConfigError: for an unknown kernel, or a wrong argument of a preset.
    """
    info = kernel_info(kernel)
    if info.preset is not None:
        return [(name, dict(values)) for name, values in info.preset(make_config(info, arguments), count)]
    return [(kernel, dict(arguments)) for _ in range(count)]
