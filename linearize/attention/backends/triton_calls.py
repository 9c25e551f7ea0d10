"""What the backends in Triton share: which calls their kernels can read, and how the kernels are launched."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linearize.attention.backends.native import maps_of, unknown_maps
from linearize.attention.call import Kind
from linearize.attention.feature_map import FeatureMapMixer
from linearize.kernels.base import MapSpec

SWITCH = "LINEARIZE_TRITON"
"""Environment variable: with 0 the Triton kernels are not used."""

DEVICES = ("cuda",)
"""Types of devices that it runs on. Tests add the CPU, with Triton's interpreter (TRITON_INTERPRET=1)."""

HALVES = {"relu": 1, "softmax_both": 2, "positive_waves": 2}
"""The maps that it knows, by kind, and their features per row of the weights."""

WEIGHTS = ("first", "second", "bias", "magnitude")
"""The tensors of a `MapSpec` that these maps have."""

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 128
"""Largest head and value size and number of rows of a map."""

USUAL = 64
"""Above this size only products of bf16 numbers fit."""

EXACT = "tf32x3"
"""Precision of products for fp32, unless PyTorch's own may be TF32: three TF32 products, nearly as exact as fp32.
"ieee" takes far too many registers."""

NEEDED = {
    ("bf16", False): (64, 81),
    ("bf16", True): (164, 204),
    ("tf32", False): (144, 168),
    (EXACT, False): (144, 208),
}
"""KiB of shared memory per block, without and with gradients, by precision and whether a size is above `USUAL`.

The most that any kernel needs when compiled for compute capability 8.6 or 9.0.
"""

SHARED = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227}
"""KiB of shared memory per block that a GPU has, by compute capability (CUDA C++ Programming Guide)."""

KEPT = 4096
"""Most compiled kernels that are kept by the kinds of their arguments."""


def switches(values: torch.dtype) -> tuple[str | None, ...]:
    """Return the settings that decide whether and how the kernels run for such values."""
    return os.environ.get(SWITCH), precision_of(values)


def elsewhere(kind: Kind) -> str:
    """Return why the kernels cannot run on the device of such calls; empty if they can."""
    return "" if kind.device is not None and kind.device.type in DEVICES else "it runs only on CUDA"


def not_whole(kind: Kind) -> str:
    """Return why kernels for whole rows of tokens do not suit such calls; empty if they do."""
    if kind.tracing:
        return "a graph is being traced"
    if why := elsewhere(kind):
        return why
    if kind.tokens < 2 or not kind.rows:
        return "it needs several tokens to be fast"
    return "it cannot start from a state" if kind.has_state else ""


@functools.cache
def shared_memory(device: torch.device | None) -> int:
    """Return the KiB of shared memory per block of a device; 0 if it has no tensor cores for bf16 or TF32."""
    if device is None or device.type != "cuda":
        return max(SHARED.values())
    capability = torch.cuda.get_device_capability(device)
    return SHARED.get(capability, min(SHARED.values())) if capability >= (8, 0) and torch.version.hip is None else 0


def precision_of(values: torch.dtype) -> str:
    """Return the precision of products for such values: bf16 for bf16, as in SDPA, or as in `triton.language.dot`."""
    if values == torch.bfloat16:
        return "bf16"
    return "tf32" if values == torch.float16 or torch.backends.cuda.matmul.fp32_precision == "tf32" else EXACT


@functools.lru_cache
def kernels(name: str = "fused_kernels") -> ModuleType | None:
    """Return a module of kernels; None if it or Triton is missing."""
    # Import by name: Triton must not be imported with linearize, and the code in a checkpoint lacks these modules.
    try:
        return importlib.import_module(f"linearize.attention.backends.{name}")
    except ImportError:
        return None


def unusable(mixer: FeatureMapMixer, kind: Kind, most: int = LARGEST) -> str:
    """Return why the kernels cannot compute such calls on a GPU; empty if they can.

    Args:
        mixer: the mixer of the calls.
        kind: their kind.
        most: largest size that a GPU has run. The kernels of windows and decoding compile for heads of 128 numbers too,
            but use many registers there.
    """
    shape = mixer.shape
    if not kind.plain or not set(kind.types) <= set(TYPES):
        return "it only reads plain tensors in fp32, bf16 or fp16"
    if max(shape.head_dim, shape.value_dim) > LARGEST:
        return "it only supports heads of at most 128 numbers"
    if why := unknown_maps(mixer, kind):
        return why
    # A separate map of the queries has the same kind and size.
    map = maps_of(mixer)[0]
    rows = map.first.shape[1]
    # Of amplitude 0 are maps without features, whose weights are zero too.
    if map.kind not in HALVES or map.amplitude not in (0.0, 1.0) or map.scaled or rows > LARGEST:
        return "it does not support this kernel's feature map"
    # A block must fit into shared memory.
    precision, largest = precision_of(kind.types[2]), max(rows, shape.head_dim, shape.value_dim)
    if largest > USUAL and precision != "bf16":
        return "except in bf16, it only supports heads of at most 64 numbers and maps of at most 64 rows"
    if largest > most:
        return f"no GPU has run it with heads or maps of more than {most} numbers"
    if NEEDED[precision, largest > USUAL][kind.gradient] > shared_memory(kind.device):
        return "this GPU has too little shared memory"
    tight = largest > USUAL or precision == EXACT
    if tight and map.kind == "positive_waves" and kind.gradient:
        return "the gradient of this map needs too much shared memory, except for small heads with TF32 products"
    return absence()


def absence() -> str:
    """Return why the kernels cannot be used at all; empty if they can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    return "" if kernels() is not None else "Triton is not installed"


_compiled: dict[object, tuple[Any, list[object]]] = {}


def launch(kernel: str, grid: tuple[int, ...], args: Sequence[Any], **options: object) -> None:
    """Run a kernel, named as module.function, for a grid of programs; its first argument is a tensor on its device.

    Triton takes several times as long to find a compiled kernel as to launch it, so kernels are kept here, by all that
    Triton's choice depends on: types and alignment of tensors, and values of numbers.
    """
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, args, **options)
    kinds = [(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in args]
    key = (kernel, device.index, *kinds, *options.values())
    found = _compiled.get(key)
    if found is not None:
        compiled, constants = found
        compiled[(*grid, 1, 1)[:3]](*args, *constants)
        return None
    module, _, name = kernel.partition(".")
    function = getattr(kernels(module), name)
    compiled = function[grid](*args, **options)
    # Triton's interpreter returns nothing.
    if compiled is not None:
        if len(_compiled) >= KEPT:
            _compiled.clear()
        _compiled[key] = compiled, [options[constant] for constant in function.arg_names[len(args) :]]
    return None


def padded(number: int, least: int = 2) -> int:
    """Return the smallest power of two that is at least `number`, and at least `least`."""
    return max(least, 1 << max(0, number - 1).bit_length())


def padded_sizes(numbers: Sequence[int]) -> dict[str, int]:
    """Return the sizes of tiles for rows of the map, head size and value size: powers of two, 16 or more."""
    return dict(zip(("N_", "D_", "V_"), (padded(x, 16) for x in numbers), strict=True))


def weights_of(map: MapSpec, device: torch.device) -> list[Tensor | None]:
    """Return the tensors of a map on a device, for kernels without gradients."""

    # A map without parameters describes itself on the CPU. Decoding asks at every step, so nothing else is called.
    def ready(w: Tensor | None) -> Tensor | None:
        return w if w is None or (w.device == device and w.is_contiguous()) else w.to(device).contiguous()

    return [ready(getattr(map, name)) for name in WEIGHTS]


def strides(*tensors: Tensor) -> list[int]:
    """Return the strides of tensors [B, heads, T, size] without their last axes, which are contiguous."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def readable(x: Tensor) -> Tensor:
    """Return x with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()
