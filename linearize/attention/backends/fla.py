"""The causal op on a GPU with the chunk kernels of flash-linear-attention, if it is installed (extra `gpu`).

Every row is relative to its own running maximum of log-scales. When the maximum rises, the state is multiplied by
exp(before - after), which is a forget gate, and those kernels support one. They multiply in TF32 and add in fp32. So
they are used for fp32 values only if PyTorch's own products may be TF32 too; they are always used for half precision.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from linearize.ops import LinearOptions, State
from linearize.ops.state import FLOOR, Options

SWITCH = "LINEARIZE_FLA"
"""Environment variable: with 0 flash-linear-attention is not used even if it is installed."""

FADED = -60.0
"""Log of the smallest gate: a factor of e^-60 makes a state negligible in fp32, and log-gates are summed in fp32."""


def chunk_kernel(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return flash-linear-attention's `chunk_simple_gla` for tensors on `device`, or None."""
    return None if device.type != "cuda" or os.environ.get(SWITCH) == "0" else _kernel()


@functools.lru_cache(maxsize=1)
def _kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    try:
        return importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    except ImportError:
        return None


def exact_enough(v: Tensor) -> bool:
    """Tell whether PyTorch's own products of values of this dtype would be no more accurate than TF32."""
    return v.dtype in (torch.bfloat16, torch.float16) or (
        v.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    )


def fla_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> tuple[Tensor, State]:
    """Attend; arguments and results as in `linearize.ops.causal_attention`."""
    given, kernel = Options(**options), chunk_kernel(v.device)
    state, scale = given.start(phi_k, v), given.scale(phi_k)
    groups = phi_q.shape[1] // phi_k.shape[1]

    def laid_out(x: Tensor, repeat: int = groups) -> Tensor:
        """Bring x [B, heads, T, ...] to the kernel's layout [B, T, H, ...]; key heads are repeated per query head."""
        return x.float().repeat_interleave(repeat, dim=1).transpose(1, 2).contiguous()

    values, gate, top = given.values(v), None, state.log_scale.detach()[..., None]
    if scale is not None:
        start = top
        top = torch.maximum(scale.detach().cummax(dim=-1).values, start)
        before = torch.cat([start, top[..., :-1]], dim=-1)
        # An empty state needs no gate.
        gate = laid_out(torch.where(before > FLOOR / 2, before - top, 0.0).clamp(min=FADED))
        values = values * torch.exp(scale - top)[..., None]
    assert kernel is not None
    mixed, kv = kernel(
        laid_out(phi_q, 1),
        laid_out(given.keys(phi_k)),
        laid_out(values),
        g=gate,
        scale=1.0,
        initial_state=state.kv.repeat_interleave(groups, dim=1).contiguous(),
        output_final_state=True,
    )
    mixed = mixed.transpose(1, 2)
    return given.divided(mixed).to(v.dtype), State(kv[:, ::groups], top[..., -1])
