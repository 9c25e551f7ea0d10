"""The binary interface of the compiled op: its library, the structures of its C code, and packing tensors into them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from linearize.attention.native.options import AttendOptions
from linearize.kernels.base import MAP_WEIGHTS, MapSpec, weights_of

KINDS = ("given", "relu", "softmax_both", "exp_both", "waves", "wave_pairs", "damped_waves", "bank", "positive_waves")
"""The maps of maps.h by number; compared with the list in C when the library is loaded."""

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Numbers of the tensor types; also compared."""

DONE, NO_MEMORY, STEEP = 0, 1, 2
"""Results of a call; also compared."""

NAMES = ";".join(" ".join((*names, "")) for names in (KINDS, ("float32", "bfloat16"), ("done", "no_memory", "steep")))
"""The names of maps, types and results, as the library returns them."""

_KIND_NUMBERS = {name: number for number, name in enumerate(KINDS)}

HEAD = struct.Struct("@18q4P2i3P")
"""`call_t` of call.h up to its maps."""
MAP = struct.Struct("@2i4q6P2f2i5P")
"""`map_t` of maps.h."""
TAIL = struct.Struct("@4Pf2i0q")
"""`call_t` after its maps."""

CALL_SIZE = HEAD.size + 2 * MAP.size + TAIL.size

_Strides = ctypes.c_int64 * 3


class Back(ctypes.Structure):
    """`back_t` of gradient.h."""

    _fields_ = [
        *product(("out", "grad"), [ctypes.c_void_p]),
        *product(("grad_stride", "dq_stride", "dk_stride", "dv_stride"), [_Strides]),
        *product(("dq", "dk", "dv", "dlog_scale", *MAP_WEIGHTS, "kv", "log_scale"), [ctypes.c_void_p]),
        *product([f"q_{name}" for name in MAP_WEIGHTS], [ctypes.c_void_p]),
    ]


class WindowBuffers(ctypes.Structure):
    """`window_t` of window_step.h; the tensors of the state are null for a whole sequence."""

    _fields_ = [
        *product(("size", "sinks", "exact_keys"), [ctypes.c_int64]),
        *product(("ring_k", "ring_v", "ring_mask", "sink_k", "sink_v", "tokens"), [ctypes.c_void_p]),
        *product(("kept_k", "kept_v", "kept_scale", "kept_mask"), [ctypes.c_void_p]),
        ("scaling", ctypes.c_float),
        ("causal", ctypes.c_int32),
        *product(("tops", "row_sums", "priority", "until"), [ctypes.c_void_p]),
        # Its `memory_t` of look_up.h.
        *product(("blocks", "block", "keys"), [ctypes.c_int64]),
        *product(("all_k", "all_v", "channels", "looks"), [ctypes.c_void_p]),
    ]


class WindowBack(ctypes.Structure):
    """`window_back_t` of window_gradient.h."""

    _fields_ = [
        *product(("batch", "heads", "key_heads", "tokens"), [ctypes.c_int64]),
        *product(("size", "features", "value_size", "window", "sinks", "exact_keys"), [ctypes.c_int64]),
        *product(("q", "k", "v", "phi_q", "phi_k", "grad", "slope", "top"), [ctypes.c_void_p]),
        *product(("dq", "dk", "dv", "dphi_q", "dphi_k", "real", "until"), [ctypes.c_void_p]),
        *product(("causal", "threads"), [ctypes.c_int32]),
    ]


class Routed(ctypes.Structure):
    """`routed_t` of routed.h."""

    _fields_ = [
        *product(("batch", "heads", "key_heads", "tokens", "keys"), [ctypes.c_int64]),
        *product(("size", "features", "value_size", "block", "blocks", "slots", "window", "sinks"), [ctypes.c_int64]),
        *product(("q", "k", "v", "phi_q", "phi_k", "query_scale", "key_scale"), [ctypes.c_void_p]),
        *product(("chosen", "real", "out", "sums", "tops", "inexact", "grad", "slope"), [ctypes.c_void_p]),
        *product(("dq", "dk", "dv", "dphi_q", "dphi_k"), [ctypes.c_void_p]),
        ("eps", ctypes.c_float),
        *product(("causal", "threads"), [ctypes.c_int32]),
    ]


class Choice(ctypes.Structure):
    """`choice_t` of choice.h."""

    _fields_ = [
        *product(("batch", "heads", "key_heads", "rows", "blocks", "slots", "block"), [ctypes.c_int64]),
        *product(("window", "sinks", "size", "keys"), [ctypes.c_int64]),
        *product(("q", "channels", "places", "count", "chosen"), [ctypes.c_void_p]),
        *product(("causal", "threads", "type"), [ctypes.c_int32]),
    ]


class Maps(NamedTuple):
    """The maps of keys and queries, in the form that the op reads.

    Attributes:
        features: number of features F.
        data: both maps, with the addresses of their weights.
        held: those weights, or copies of them; they must stay alive as long as `data` is used.
    """

    features: int
    data: bytes
    held: tuple[Tensor, ...]


def given(features: int) -> Maps:
    """Return the maps for q and k that are already features."""
    empty = MAP.pack(_KIND_NUMBERS["given"], 1, *[0] * 10, 1.0, 1.0, *[0] * 7)
    return Maps(features, empty + empty, ())


Learned = Sequence[Tensor | None]
"""The tensors of a learned log-scale (`linearize.attention.hybrid`): weight, bias, hidden, hidden_bias and out."""


def packed(maps: Sequence[MapSpec], scale: float, learned: Sequence[Learned] = ()) -> Maps:
    """Pack the maps of keys and queries, or the single map they share; inputs are multiplied by `scale` before them.

    `learned` are the learned log-scales of keys and queries; a decoding step adds them to the log-scales of the maps.
    """
    held: list[Tensor] = []
    data = b""
    for map, more in zip((maps[0], maps[-1]), (*learned, (), ()), strict=False):
        pointers = []
        for weight in (*weights_of(map), *(more or [None] * 5)):
            held += [] if weight is None else [weight.float().contiguous()]
            pointers.append(0 if weight is None else held[-1].data_ptr())
        hidden = more[2] if more else None
        heads, rows, size = map.first.shape
        channels, width = (0, 0) if map.bank is None else (map.bank.shape[1], (map.bank.shape[2] - 1) // 3)
        sizes = (_KIND_NUMBERS[map.kind], heads, rows, size, channels, width)
        numbers, units = (scale, map.amplitude, map.scaled), 0 if hidden is None else hidden.shape[1]
        data += MAP.pack(*sizes, *pointers[: len(MAP_WEIGHTS)], *numbers, units, *pointers[len(MAP_WEIGHTS) :])
    first = maps[0]
    per_row = first.bank.shape[1] if first.bank is not None else 1 if first.kind == "relu" else 2
    return Maps(first.first.shape[1] * per_row, data, tuple(held))


NO_STATES = (None, None, None, None)
"""The last four tensors of `call` if there is no state."""


def call(
    maps: Maps,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    extra: Sequence[Tensor | None],
    numbers: tuple[float, int, bool],
) -> bytes:
    """Pack a call: shapes, strides and addresses of its tensors, which must stay alive until the call is over.

    Args:
        maps: the maps of keys and queries.
        q: queries [B, H, T, D].
        k: keys [B, K, T, D].
        v: values [B, K, T, V].
        out: memory of the output, [B, H, T, V].
        extra: mask [B, T] in bool, log-scales to add to the keys' [B, K, T] and to the queries' [B, H, T], kv and
            log-scale of the state before, kv and log-scale of the state after. Each may be None; all are contiguous and
            fp32, except the mask.
        numbers: eps, threads, and whether weights are left exact.
    """
    batch, heads, tokens, _ = q.shape
    # Use plain tuples and no helper functions, because this runs at every decoding step.
    addresses = [0 if x is None else x.data_ptr() for x in extra]
    head = HEAD.pack(
        *(batch, heads, k.shape[1], tokens, maps.features, v.shape[3]),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
        *(TYPES[q.dtype], TYPES[v.dtype], *addresses[:3]),
    )
    return head + maps.data + TAIL.pack(*addresses[3:], *numbers)


def masks(q: Tensor, k: Tensor, options: AttendOptions) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the mask [B, T] and the log-scales of k [B, K, T, D] and q [B, H, T, D] in the form that the op reads."""
    mask, key, query = options.mask, options.log_scale, options.query_scale
    return (
        None if mask is None else mask.to(torch.bool).contiguous(),
        None if key is None else key.float().expand(k.shape[:3]).contiguous(),
        None if query is None else query.float().expand(q.shape[:3]).contiguous(),
    )


OMP_PAUSE_HARD = 2
"""A value of OpenMP's `omp_pause_resource_t`."""


def open_library(path: Path) -> tuple[ctypes.CDLL, bool]:
    """Load a library; also return whether it shares torch's threads.

    Raises:
        OSError: if it cannot be loaded or was built from other code.
    """
    shared = _share_threads()
    library = ctypes.CDLL(str(path))
    kinds = {"back": Back, "window": WindowBuffers, "window_back": WindowBack, "routed": Routed, "choice": Choice}
    sizes = {"call": CALL_SIZE} | {name: ctypes.sizeof(kind) for name, kind in kinds.items()}
    same = {name: getattr(library, f"linearize_{name}_size")() for name in sizes} == sizes
    library.linearize_names.restype = ctypes.c_char_p
    if not same or library.linearize_names().decode() != NAMES:
        raise OSError(f"{path} was built from other code")
    return library, bool(shared and library.linearize_parallel())


@functools.lru_cache(maxsize=1)
def _share_threads() -> bool:
    """Make torch's OpenMP library visible to the op, so that both use the same threads; tell whether that worked."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_end_threads)
    for file in _openmp_files():
        try:
            if hasattr(ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL), "GOMP_parallel"):
                return True
        except OSError:
            continue
    return False


def _openmp_files() -> list[str]:
    """Find the OpenMP libraries of this process, torch's first: other packages (scikit-learn) have their own."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    files = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libomp" in line}
    return sorted(files, key=lambda file: ("torch" not in file, file))


def _end_threads() -> None:
    """End the idle threads of every OpenMP library before a fork; parent and child start new threads when needed.

    A child inherits OpenMP's list of threads but not the threads themselves, so it would wait for them forever, even in
    torch's own operations.
    """
    for file in _openmp_files():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(file).omp_pause_resource_all(OMP_PAUSE_HARD)
