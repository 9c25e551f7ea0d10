"""What the compiled op is called with: the structures of its C code, and how tensors fill them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linearize.kernels.base import MAP_WEIGHTS, MapSpec

KINDS = {
    "given": 0,
    "relu": 1,
    "softmax_both": 2,
    "exp_both": 3,
    "waves": 4,
    "wave_pairs": 5,
    "damped_waves": 6,
    "bank": 7,
    "positive_waves": 8,
}
"""What maps.h has, by name."""

TYPES = {torch.float32: 0, torch.bfloat16: 1}

HEAD = struct.Struct("@18q4P2i2P")
"""`call_t` of call.h up to its maps."""
MAP = struct.Struct("@2i4q6P2fi0q")
"""`map_t` of maps.h."""
TAIL = struct.Struct("@4Pf2i0q")
"""`call_t` behind its maps."""

CALL_SIZE = HEAD.size + 2 * MAP.size + TAIL.size

_Strides = ctypes.c_int64 * 3


class Back(ctypes.Structure):
    """`back_t` of gradient.h."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        *((name, _Strides) for name in ("grad_stride", "dq_stride", "dk_stride", "dv_stride")),
        *((name, ctypes.c_void_p) for name in ("dq", "dk", "dv", "dlog_scale", *MAP_WEIGHTS)),
        *((name, ctypes.c_void_p) for name in ("kv", "log_scale", *(f"q_{name}" for name in MAP_WEIGHTS))),
    ]


class Maps(NamedTuple):
    """The maps of keys and queries, as the op reads them.

    Attributes:
        features: how many features F they give.
        data: both, with the addresses of their weights.
        held: those weights, or copies of them; they have to live as long as `data` is used.
    """

    features: int
    data: bytes
    held: tuple[Tensor, ...]


def given(features: int, *, scaled: bool) -> Maps:
    """Stand for maps where q and k are features already; `scaled` says whether keys come with log-scales."""
    empty = MAP.pack(KINDS["given"], 1, *[0] * 10, 1.0, 1.0, scaled)
    return Maps(features, empty + empty, ())


def packed(maps: Sequence[MapSpec], scale: float) -> Maps:
    """Describe the maps of keys and queries, or the one they share; inputs are multiplied by `scale` before them."""
    held: list[Tensor] = []
    data = [_packed(map, scale, held) for map in maps]
    map = maps[0]
    per_row = map.bank.shape[1] if map.bank is not None else 1 if map.kind == "relu" else 2
    return Maps(map.first.shape[1] * per_row, data[0] + data[-1], tuple(held))


def _packed(map: MapSpec, scale: float, held: list[Tensor]) -> bytes:
    pointers: list[int] = []
    for tensor in (getattr(map, name) for name in MAP_WEIGHTS):
        if tensor is not None and not (tensor.dtype == torch.float32 and tensor.is_contiguous()):
            tensor = tensor.float().contiguous()
        if tensor is not None:
            held.append(tensor)
        pointers.append(_address(tensor))
    heads, rows, size = map.first.shape
    channels, hidden = (0, 0) if map.bank is None else (map.bank.shape[1], (map.bank.shape[2] - 1) // 3)
    sizes = (KINDS[map.kind], heads, rows, size, channels, hidden)
    return MAP.pack(*sizes, *pointers, scale, map.amplitude, map.scaled)


def call(
    maps: Maps,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    eps: float,
    threads: int,
    exact: bool = True,
    mask: Tensor | None = None,
    given: Tensor | None = None,
    start: Sequence[Tensor | None] = (None, None),
    state: Sequence[Tensor | None] = (None, None),
) -> bytes:
    """Write down a call: tensors' shapes, strides and addresses, so that all of them have to live until it is over.

    Every tensor is as the op reads it: `mask` bool, log-scales `given`, `start` and `state` fp32, all in one piece.
    """
    batch, heads, tokens, _ = q.shape
    # Written out, without a function for it: this is run at every decoding step.
    mask_at = 0 if mask is None else mask.data_ptr()
    given_at = 0 if given is None else given.data_ptr()
    head = HEAD.pack(
        *(batch, heads, k.shape[1], tokens, maps.features, v.shape[3]),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
        *(TYPES[q.dtype], TYPES[v.dtype], mask_at, given_at),
    )
    (start_kv, start_scale), (kv, log_scale) = start, state
    tail = TAIL.pack(
        0 if start_kv is None else start_kv.data_ptr(),
        0 if start_scale is None else start_scale.data_ptr(),
        0 if kv is None else kv.data_ptr(),
        0 if log_scale is None else log_scale.data_ptr(),
        *(eps, threads, exact),
    )
    return head + maps.data + tail


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
