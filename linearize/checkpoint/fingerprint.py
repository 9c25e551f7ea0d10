"""Fingerprint of what a run depends on: stored with every state, and compared when the run is resumed.

One rule for every stage: a run is resumed only with the same model weights, kernels, data and options.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from itertools import chain, islice, repeat
from pathlib import Path
from typing import cast

import numpy as np
import torch
import xxhash
from huggingface_hub import try_to_load_from_cache
from torch import nn

from linearize.attention.interface import linear_attentions
from linearize.attention.parts import newest_part
from linearize.core.errors import ConfigError
from linearize.core.heads import RowSet
from linearize.core.parsing import user_path
from linearize.modeling.weights import is_offloaded, stored

ROWS = 65_536
"""Most rows that are hashed, evenly spread; the number of rows is always hashed."""
BATCHES = 8
"""Number of training batches that are hashed from a source without a method `digest`."""
TRAINED = "trained_length"
"""The addition that a run sets from its data, which a fingerprint already holds."""
MODEL_WEIGHTS = "model weights"
MODEL = "model contents"
"""Name of a `model_digest` in a record."""
UNKNOWN_INPUTS = (
    "An earlier version started this run and did not record the contents of its model and data, so a change in them is "
    "not noticed."
)
BLOCK = 2**24
"""Bytes of a file that are read at a time."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
KERNEL = ".linear_attention."
"""Part of every name of a kernel's weights."""


def fingerprint(
    *, model: nn.Module | None = None, data: object = None, options: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return what a run depends on as JSON-like data: options by their names, then data, kernels and weights.

    Args:
        model: the model before its first step, softmax or converted. Every weight is read (some GB per second).
        data: something with a method `digest() -> str`; batches as stage one takes them (`holdout_batches` and
            `train_batches`: the held-out ones and the first `BATCHES` others are hashed); or nested tensors, arrays,
            rows, mappings and plain values.
        options: other values that must stay the same: plain values, and mappings and dataclasses of them.

    Returns:
        The fingerprint; `check_same` compares two.
    """
    values = cast(dict[str, object], plain(dict(options or {})))
    if data is not None:
        values["data contents"] = data_digest(data)
    if model is not None:
        values["kernels"] = kernels_of(model)
        for name, kernel in ((MODEL_WEIGHTS, False), ("kernel weights", True)):
            values[name] = weights_digest(model, kernel)
    return values


def model_digest(name: str) -> str | None:
    """Return the hash of a local model's config and weights; a Hub model's commit in the cache; None if unknown."""
    path = user_path(name)
    if not path.exists():
        cached = try_to_load_from_cache(name, "config.json") if HUB_NAME.fullmatch(name) else None
        return Path(cached).parent.name if isinstance(cached, str) else None
    # With the modules of a sentence embedder.
    files = [*path.glob("*"), *path.glob("[0-9]_*/*")] if path.is_dir() else [path]
    weights = ".safetensors" if any(file.suffix == ".safetensors" for file in files) else ".bin"
    return files_digest([file for file in files if file.suffix in (".json", ".gguf", weights)])


def files_digest(files: Iterable[Path]) -> str:
    """Return the hash of files' contents and names, with the folder's, which may be a class of images."""
    hashed = xxhash.xxh3_128()
    for file in sorted(files):
        _feed(hashed, [[file.parent.name, file.name, file.stat().st_size]])
        with file.open("rb") as content:
            while block := content.read(BLOCK):
                hashed.update(block)
    return hashed.hexdigest()


def check_same(saved: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuse to resume a run with a fingerprint other than the one it was started with.

    Args:
        saved: the fingerprint that was stored with the state.
        now: the fingerprint of the resumed run.

    Raises:
        ConfigError: naming the first value that differs, and some of the others.
    """
    saved = {name: _without_trained_length(value) if name == "kernels" else value for name, value in saved.items()}
    # An option that only an earlier version had may be ignored if it was off.
    names = [*now, *(name for name in saved if name not in now and saved[name] not in (None, False))]
    # A side that lacks a key differs from one that has None there.
    missing = object()
    differ = [name for name in names if saved.get(name, missing) != now.get(name, missing)]
    if not differ:
        return
    name = differ[0]
    more = f" (and {', '.join(differ[1:4])}{' ...' if len(differ) > 4 else ''})" if len(differ) > 1 else ""
    if name not in saved:
        raise ConfigError(
            f"resume: the state does not record the {name} that its run was started with{more}, as another version "
            "of linearize wrote it; start again without --resume"
        )
    change = f"{saved[name]!r}, which is missing now"
    if name in now:
        before, after = saved[name], now[name]
        long = max(len(repr(before)), len(repr(after))) > 120
        if long and isinstance(before, Mapping) and isinstance(after, Mapping):
            # Of two long mappings, only the first entry that differs is shown.
            key = next(key for key in [*after, *before] if before.get(key, missing) != after.get(key, missing))
            before, after = ({key: side[key]} if key in side else {} for side in (before, after))
        change, new = (text if len(text) <= 200 else f"{text[:197]}..." for text in (repr(before), repr(after)))
        change += f", now it is {new}"
    advice = "use the same, or start again without --resume"
    raise ConfigError(f"resume: the run was started with {name}={change}{more}; {advice}")


def _without_trained_length(values: object) -> object:
    """Return the kernels of a fingerprint without trained lengths, which earlier versions recorded."""
    if isinstance(values, Mapping):
        return {key: _without_trained_length(value) for key, value in values.items() if key != TRAINED}
    return [_without_trained_length(value) for value in values] if isinstance(values, list) else values


def plain(value: object) -> object:
    """Return a value as JSON restores it: tuples become lists, dataclasses mappings, other objects their text."""

    def other(item: object) -> object:
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return dataclasses.asdict(item)
        return str(item)

    return json.loads(json.dumps(value, default=other))


def kernels_of(model: nn.Module) -> dict[str, object]:
    """Return the kernel of every converted attention with all its arguments, window and sinks, by host module."""
    kernels: dict[str, object] = {}
    for name, layer in linear_attentions(model).items():
        hybrid = layer.hybrid
        # A layer without newer additions keeps the format of earlier versions, so that their runs can be resumed.
        newer = {name: x for name, x in hybrid.changed.items() if name not in ("window", "sinks", TRAINED)}
        if (since := newest_part([hybrid]).since) > 1:
            newer["format_version"] = since
        additions = [addition for addition in (hybrid.sinks, newer) if addition]
        kernels[name] = plain([layer.kernel, layer.mixer.config, hybrid.window, *additions])
    return kernels


def weights_digest(model: nn.Module, kernel: bool | None = None) -> str:
    """Return the hash of a model's weights and their names, sizes and types.

    Args:
        model: the model, on one device.
        kernel: True for the weights of kernels only, False for all others, None for all.
    """
    weights = sorted(model.state_dict().items())
    chosen = {name: tensor for name, tensor in weights if kernel is None or (KERNEL in f".{name}.") is kernel}
    contents = map(stored, repeat(model), chosen, chosen.values()) if is_offloaded(model) else chosen.values()
    return _hash(chain.from_iterable(zip(chosen, contents, strict=True)))


def data_digest(data: object) -> str:
    """Return the hash of data of any kind that `fingerprint` takes."""
    own = getattr(data, "digest", None)
    if callable(own):
        return str(own())
    if hasattr(data, "holdout_batches") and hasattr(data, "train_batches"):
        return _hash(chain([data.holdout_batches()], islice(data.train_batches(), BATCHES)))
    return _hash([data])


def rows_digest(rows: RowSet) -> str:
    """Return the hash of a sequence of rows and their number; at most `ROWS` of them are read."""
    if callable(getattr(rows, "digest", None)):
        return data_digest(rows)
    return _hash(chain([len(rows)], (rows[place] for place in spread(len(rows), ROWS))))


def spread(count: int, most: int) -> list[int]:
    """Return the numbers of up to `most` of `count` rows, evenly spread, including the first and the last."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64).tolist()


def _hash(values: Iterable[object]) -> str:
    hashed = xxhash.xxh3_128()
    _feed(hashed, values)
    return hashed.hexdigest()


def _feed(hashed: xxhash.xxh3_128, values: Iterable[object]) -> None:
    """Hash nested values; the kind and length of each come first, so that no two feed the same bytes."""
    for outer in values:
        # The next value is the last. Rows are many, and a call for each would take longer than hashing them.
        left: list[object] = [outer]
        while left:
            value = left.pop()
            if isinstance(value, (list, tuple)) and set(map(type, value)) == {int} and max(map(abs, value)) < 2**63:
                value = np.array(value, dtype=np.int64)
            if isinstance(value, torch.Tensor):
                value = value.detach().to("cpu").contiguous()
                header = f"{value.dtype} {list(value.shape)}".encode()
                hashed.update(b"s%d:" % len(header) + header)
                hashed.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
            elif isinstance(value, np.ndarray) and value.dtype != object:
                hashed.update(f"a{value.dtype.str}{value.shape}".encode())
                hashed.update(np.ascontiguousarray(value).data)
            elif isinstance(value, Mapping):
                hashed.update(b"m%d" % len(value))
                left += [part for key in sorted(value, key=str)[::-1] for part in (value[key], str(key))]
            elif isinstance(value, (str, bytes)):
                content = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
                hashed.update(b"%s%d:" % (b"b" if isinstance(value, bytes) else b"s", len(content)) + content)
            elif isinstance(value, (list, tuple)):
                hashed.update(b"l%d" % len(value))
                left += reversed(value)
            elif value is None or isinstance(value, (bool, int, float, np.generic)):
                hashed.update(f"v{type(value).__name__} {value!r};".encode())
            else:
                left += _opened(value)


def _opened(value: object) -> list[object]:
    """Return what an object is hashed as, the last part first."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [{field.name: getattr(value, field.name) for field in dataclasses.fields(value)}]
    if hasattr(value, "tobytes"):  # an image
        return [value.tobytes(), f"{getattr(value, 'mode', '')} {getattr(value, 'size', '')}"]
    # The text of an unknown object may hold its address, which differs in every run.
    raise TypeError(f"got {type(value).__name__} in the data of a fingerprint, expected tensors, text and numbers")
