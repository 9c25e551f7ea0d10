"""What a run depends on, as plain data: stored with every state, and held against what a resumed run is given.

One rule for every stage: a run goes on only with the same model weights, kernels, data and options.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash
from torch import nn

from linearize.attention.interface import linear_attentions
from linearize.errors import ConfigError

ROWS = 65_536
"""Of more rows than these as many are read, evenly spread; their number counts in any case."""
BATCHES = 8
"""So many training batches are read of a source that knows no digest of its own."""
KERNEL = ".linear_attention."
"""What the names of the kernels' weights hold."""


def fingerprint(
    *, model: nn.Module | None = None, data: object = None, options: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Describe what a run depends on, as JSON has it: options by their own names, then data, kernels and weights.

    Args:
        model: before its first step, softmax or converted. Every weight is read (some GB per second).
        data: something with a method `digest() -> str`; batches as stage one takes them (`holdout_batches` and
            `train_batches`: the held-out ones and the first `BATCHES` others are read); or nested tensors, arrays,
            rows, mappings and plain values.
        options: what else must stay the same: plain values, mappings and dataclasses of them.

    Returns:
        The fingerprint; `check_same` compares two.
    """
    found = {name: plain(value) for name, value in (options or {}).items()}
    if data is not None:
        found["data contents"] = data_digest(data)
    if model is not None:
        found["kernels"] = kernels_of(model)
        for name, kernel in (("model weights", False), ("kernel weights", True)):
            found[name] = weights_digest(model, kernel)
    return found


def check_same(saved: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuse to go on with anything else than the run was started with.

    Args:
        saved: the fingerprint that lies beside the state.
        now: that of the run which is to go on.

    Raises:
        ConfigError: naming the first thing that differs, and how many more there are.
    """
    names = [*now, *(name for name in saved if name not in now)]
    missing = object()
    differ = [name for name in names if saved.get(name, missing) != now.get(name, missing)]
    if not differ:
        return
    name = differ[0]
    more = f" (and {', '.join(differ[1:4])}{' ...' if len(differ) > 4 else ''})" if len(differ) > 1 else ""
    advice = "use the same, or start again without --resume"
    if name in saved and name in now:
        before, after = _shown(saved[name], now[name])
        raise ConfigError(f"resume: the run was started with {name}={before}, now it is {after}{more}; {advice}")
    if name in now:
        raise ConfigError(
            f"resume: the state does not say with which {name} its run was started{more}, as it is of another version "
            "of linearize; start again without --resume"
        )
    raise ConfigError(
        f"resume: the run was started with {name}={saved[name]!r}, which is not there now{more}; {advice}"
    )


def _shown(before: object, after: object) -> tuple[str, str]:
    """Write two values down; of two long ones the first place where they differ."""
    one, two = repr(before), repr(after)
    if max(len(one), len(two)) <= 120:
        return one, two
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        key = next(key for key in [*after, *before] if before.get(key) != after.get(key))
        one, two = (_short(repr(side.get(key))) for side in (before, after))
        return f"{{{key!r}: {one}}}", f"{{{key!r}: {two}}}"
    return _short(one), _short(two)


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def plain(value: object) -> object:
    """Return a value as JSON gives it back: pairs become lists, dataclasses mappings, all else its text."""

    def other(one: object) -> object:
        if dataclasses.is_dataclass(one) and not isinstance(one, type):
            return dataclasses.asdict(one)
        return str(one)

    return json.loads(json.dumps(value, default=other))


def kernels_of(model: nn.Module) -> dict[str, object]:
    """Return the kernel of every converted attention with all its arguments, window and sinks, by host module."""
    found = {}
    for name, layer in linear_attentions(model).items():
        hybrid = layer.hybrid
        # A layer without the newer additions looks as it did before, so that runs begun then can be resumed.
        sinks = [hybrid.sinks] if hybrid.sinks else []
        newer = {name: x for name, x in hybrid.changed.items() if name not in ("window", "sinks")}
        found[name] = plain([layer.kernel, layer.mixer.config, hybrid.window, *sinks, *([newer] if newer else [])])
    return found


def weights_digest(model: nn.Module, kernel: bool | None = None) -> str:
    """Return the hash of a model's weights and their names, sizes and types.

    Args:
        model: on any device, not spread over several.
        kernel: true: those of the kernels only; false: all others; None: all.
    """
    hashed = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        if kernel is None or (KERNEL in f".{name}.") is kernel:
            _feed(hashed, name)
            _feed(hashed, tensor)
    return hashed.hexdigest()


def data_digest(data: object) -> str:
    """Return the hash of data, see `fingerprint`."""
    own = getattr(data, "digest", None)
    if callable(own):
        return str(own())
    hashed = xxhash.xxh3_128()
    if hasattr(data, "holdout_batches") and hasattr(data, "train_batches"):
        _feed(hashed, data.holdout_batches())
        batches = data.train_batches()
        for _, batch in zip(range(BATCHES), batches, strict=False):
            _feed(hashed, batch)
    else:
        _feed(hashed, data)
    return hashed.hexdigest()


def rows_digest(rows: Sequence[object]) -> str:
    """Return the hash of rows that can be read by number: of all, or of `ROWS` of them and of their number."""
    own = getattr(rows, "digest", None)
    if callable(own):
        return str(own())
    hashed = xxhash.xxh3_128()
    _feed(hashed, len(rows))
    for place in spread(len(rows), ROWS):
        _feed(hashed, rows[place])
    return hashed.hexdigest()


def spread(count: int, most: int) -> list[int]:
    """Return the numbers of up to `most` of `count` rows, evenly spread, the first and the last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64).tolist()


def _feed(hashed: xxhash.xxh3_128, value: object) -> None:
    """Hash a nested value; its kind and length come first, so that no two values write the same bytes."""
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu").contiguous()
        _feed(hashed, f"{value.dtype} {list(value.shape)}")
        hashed.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        hashed.update(f"a{value.dtype.str}{value.shape}".encode())
        hashed.update(np.ascontiguousarray(value).data)
    elif isinstance(value, Mapping):
        hashed.update(b"m%d" % len(value))
        for key in sorted(value, key=str):
            _feed(hashed, str(key))
            _feed(hashed, value[key])
    elif isinstance(value, (str, bytes)):
        content = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        hashed.update(b"%s%d:" % (b"b" if isinstance(value, bytes) else b"s", len(content)) + content)
    elif isinstance(value, (list, tuple)) and value and all(type(one) is int and abs(one) < 2**63 for one in value):
        _feed(hashed, np.array(value, dtype=np.int64))
    elif isinstance(value, (list, tuple)):
        hashed.update(b"l%d" % len(value))
        for item in value:
            _feed(hashed, item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed(hashed, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif value is None or isinstance(value, (bool, int, float, np.generic)):
        hashed.update(f"v{type(value).__name__} {value!r};".encode())
    elif hasattr(value, "tobytes"):  # an image
        _feed(hashed, f"{getattr(value, 'mode', '')} {getattr(value, 'size', '')}")
        _feed(hashed, value.tobytes())
    else:
        # What an unknown object shows of itself may be its address, which no second run has.
        raise TypeError(f"got {type(value).__name__} in the data of a fingerprint, expected tensors, text and numbers")
