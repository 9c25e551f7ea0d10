"""Which layer gets which kernel: the small language of `--layers` and `--keep-softmax`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from linearize.errors import ConfigError
from linearize.modeling.plan import SOFTMAX
from linearize.registry import kernel_info, make_config

_LARGEST = 99_999
"""No model has as many layers; a range beyond it is a slip, and too long a list to make."""


def parse_indices(text: str, where: str) -> list[int]:
    """Read "0-2,5" as [0, 1, 2, 5].

    Raises:
        ConfigError: if it is written in another way.
    """
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or part.strip().endswith("-"):
            raise ConfigError(f"{where}: got {text!r}, expected layer numbers such as 0-5 or 0,11")
        start, stop = int(first), int(last or first)
        if stop < start:
            raise ConfigError(f"{where}: got the range {part.strip()!r}, expected the smaller number first")
        if stop > _LARGEST:
            raise ConfigError(f"{where}: got layer {stop}, expected at most {_LARGEST}")
        found.extend(range(start, stop + 1))
    return found


def kept_layers(keep: Iterable[int] | str, count: int) -> list[int]:
    """Return the numbers of the layers that stay softmax.

    Args:
        keep: their numbers, or a text: "0,11" and the like, or the share "1/N" for the last layer of every N.
        count: number of attentions that can be converted.

    Raises:
        ConfigError: for another text.
    """
    if not isinstance(keep, str):
        return list(keep)
    every = parse_share(keep)
    return parse_indices(keep, "keep_softmax") if every is None else list(range(every - 1, count, every))


def parse_share(text: str) -> int | None:
    """Read "1/N" as N; None: it is no share.

    Raises:
        ConfigError: if it is another share than one of two or more.
    """
    first, slash, last = text.partition("/")
    if not slash:
        return None
    if first.strip() != "1" or not last.strip().isdecimal() or not 2 <= int(last) <= _LARGEST:
        raise ConfigError(f"keep_softmax: got {text!r}, expected one layer of so many, such as 1/4")
    return int(last)


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
        ConfigError: if it is written in another way, or a head is named twice.
    """
    heads: dict[int, list[int]] = {}
    for part in text.split(","):
        layer, colon, head = (x.strip() for x in part.partition(":"))
        if not colon or not layer.isdecimal() or not head.isdecimal() or max(int(layer), int(head)) > _LARGEST:
            raise ConfigError(f"softmax-heads: got {text!r}, expected LAYER:HEAD pairs such as 4:0,11:7")
        if int(head) in heads.setdefault(int(layer), []):
            raise ConfigError(f"softmax-heads: head {part.strip()} is named twice in {text!r}; name it once")
        heads[int(layer)].append(int(head))
    return heads


def assign(
    count: int,
    kernel: str | None,
    arguments: Mapping[str, object],
    layers: Mapping[int, str | tuple[str, Mapping[str, object]]] | str | None,
    keep_softmax: Iterable[int] | str,
) -> list[tuple[str, dict[str, object]]]:
    """Return kernel and arguments for each of `count` layers.

    Args:
        count: number of attentions that can be converted.
        kernel: for all layers that `layers` does not name, a preset too; None only if it names all.
        arguments: of `kernel`.
        layers: kernel, or (kernel, arguments), per layer number; or the text form.
        keep_softmax: layers to leave as they are, see `kept_layers`.

    Raises:
        ConfigError: if a layer is missing, named twice or beyond the last one, or a single layer is to be a preset.
    """
    named = parse_layers(layers) if isinstance(layers, str) else dict(layers or {})
    kept = kept_layers(keep_softmax, count)
    for index in [*named, *kept]:
        if not 0 <= index < count:
            raise ConfigError(
                f"layer {index} does not exist: this model has {count} that can be converted, 0 to {count - 1}"
            )
    both = sorted(set(named) & set(kept))
    if both:
        raise ConfigError(f"layer {both[0]} is in layers and in keep_softmax; name it in one of them")
    rest = [] if kernel is None else expand(count, kernel, arguments)
    chosen: list[tuple[str, dict[str, object]]] = []
    for index in range(count):
        if index in kept:
            chosen.append((SOFTMAX, {}))
        elif index in named:
            chosen.append(_entry(index, named[index]))
        elif rest:
            chosen.append(rest[index])
        else:
            raise ConfigError(
                f"layer {index} has no kernel: name it in layers or keep_softmax, or give a kernel for the rest"
            )
    return chosen


def expand(count: int, kernel: str, arguments: Mapping[str, object]) -> list[tuple[str, dict[str, object]]]:
    """Return kernel and arguments for each of `count` layers of one kernel, or of one preset.

    Raises:
        ConfigError: for an unknown kernel, or a wrong argument of a preset.
    """
    info = kernel_info(kernel)
    if info.preset is not None:
        return [(name, dict(values)) for name, values in info.preset(make_config(info, arguments), count)]
    return [(kernel, dict(arguments)) for _ in range(count)]


def _entry(index: int, entry: Any) -> tuple[str, dict[str, object]]:
    """Read what was given for one layer: a name, or a name and arguments."""
    if isinstance(entry, str):
        name, arguments = entry, {}
    else:
        try:
            name, arguments = entry[0], dict(entry[1])
        except (TypeError, ValueError, IndexError, KeyError):
            raise ConfigError(f"layer {index}: got {entry!r}, expected a kernel or (kernel, arguments)") from None
    if name != SOFTMAX and kernel_info(name).preset is not None:
        raise ConfigError(
            f"layer {index}: {name!r} is a plan for all layers of a model, not a kernel of one; name its parts here, "
            "or give it as the model's kernel"
        )
    return name, arguments
