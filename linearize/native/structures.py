"""What the compiled op is called with: the structures of its C code, and how tensors fill them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from linearize.native import WEIGHTS, NativeMap

KINDS = {
    "given": 0,
    "relu": 1,
    "softmax_both": 2,
    "exp_both": 3,
    "waves": 4,
    "wave_pairs": 5,
    "damped_waves": 6,
    "bank": 7,
}
"""What maps.h has, by name."""

TYPES = {torch.float32: 0, torch.bfloat16: 1}

_Steps = ctypes.c_int64 * 3


class Map(ctypes.Structure):
    """`map_t` of maps.h."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("tau", ctypes.c_void_p),
        ("bank", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("amplitude", ctypes.c_float),
        ("scaled", ctypes.c_int32),
    ]


class Call(ctypes.Structure):
    """`call_t` of call.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "tokens", "features", "value_size")),
        *((name, _Steps) for name in ("q_step", "k_step", "v_step", "out_step")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        ("type", ctypes.c_int32),
        ("value_type", ctypes.c_int32),
        ("mask", ctypes.c_void_p),
        ("given", ctypes.c_void_p),
        ("keys", Map),
        ("queries", Map),
        *((name, ctypes.c_void_p) for name in ("start", "start_scale", "kv", "log_scale")),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("exact", ctypes.c_int32),
    ]


class Back(ctypes.Structure):
    """`back_t` of gradient.h."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        *((name, _Steps) for name in ("grad_step", "dq_step", "dk_step", "dv_step")),
        *((name, ctypes.c_void_p) for name in ("dq", "dk", "dv", "given", *WEIGHTS)),
        *((name, ctypes.c_void_p) for name in ("kv", "log_scale")),
    ]


def feature_dim(map: NativeMap) -> int:
    """Return how many features F a map gives."""
    if map.bank is not None:
        return map.first.shape[1] * map.bank.shape[1]
    return map.first.shape[1] * (1 if map.kind == "relu" else 2)


def filled_map(map: NativeMap, scale: float, held: list[Any]) -> Map:
    """Describe a map; what was copied for that goes into `held`, and has to live until the call is over."""
    pointers: list[int | None] = []
    for tensor in (getattr(map, name) for name in WEIGHTS):
        if tensor is not None and not (tensor.dtype == torch.float32 and tensor.is_contiguous()):
            tensor = tensor.float().contiguous()
            held.append(tensor)
        pointers.append(None if tensor is None else tensor.data_ptr())
    heads, rows, size = map.first.shape
    channels, hidden = (0, 0) if map.bank is None else (map.bank.shape[1], (map.bank.shape[2] - 1) // 3)
    options = (scale, map.amplitude, map.scaled)
    return Map(KINDS[map.kind], heads, rows, size, channels, hidden, *pointers, *options)
