"""The causal op on a GPU through the chunk kernels of flash-linear-attention, where that is installed (extra `gpu`).

Every row is kept relative to its own running maximum of log-scales. When that climbs, the state fades by
exp(before - after): a forget gate, which those kernels have. They multiply in TF32 and add in fp32, so fp32 values go
through them only where PyTorch's own products may be TF32 too; values in half precision always do.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from linearize.ops import LinearOptions, State, empty_state
from linearize.ops.state import EPS, FLOOR, divide, masked_log_scale, with_ones, without_padding
from linearize.ops.tracing import is_tracing

SWITCH = "LINEARIZE_FLA"
"""Environment variable: 0 leaves flash-linear-attention alone though it is installed."""

FADED = -60.0
"""Log of the least that a state fades to in one step: e^-60 of it is nothing in fp32, and gates are summed in fp32."""


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
    """Tell whether products in TF32 are what values of this dtype would get from PyTorch, or better."""
    return v.dtype in (torch.bfloat16, torch.float16) or (
        v.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    )


class FlaOp:
    """See `contract.CausalOp`."""

    name = "flash-linear-attention"

    @property
    def through_states(self) -> FlaOp:
        """Its gradient goes through states."""
        return self

    def supports(self, x: Tensor, v: Tensor, *, normalize: bool) -> bool:
        """See `contract.CausalOp`; tracing compilers get the ops in PyTorch."""
        return x.is_cuda and not is_tracing() and chunk_kernel(x.device) is not None and exact_enough(v)

    def attend(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> tuple[Tensor, State]:
        """See `contract.CausalOp`."""
        return fla_attention(phi_q, phi_k, v, **options)

    def output(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        """See `contract.CausalOp`."""
        return fla_attention(phi_q, phi_k, v, **options)[0]


def fla_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    log_scale: Tensor | None = None,
    initial_state: State | None = None,
    normalize: bool = True,
    eps: float = EPS,
) -> tuple[Tensor, State]:
    """Attend as `linearize.ops.causal_attention` does; arguments and results as there."""
    kernel, state = chunk_kernel(v.device), initial_state
    if state is None:
        state = empty_state(phi_k, v, scaled=log_scale is not None, normalize=normalize)
    scale = masked_log_scale(phi_k, log_scale, key_padding_mask)
    groups = phi_q.shape[1] // phi_k.shape[1]

    def laid_out(x: Tensor, repeat: int = groups) -> Tensor:
        """Bring x [B, heads, T, ...] to the kernel's [B, T, H, ...], key heads once for each of their queries."""
        return x.float().repeat_interleave(repeat, dim=1).transpose(1, 2).contiguous()

    values, gate, top = with_ones(v, normalize, key_padding_mask), None, state.log_scale.detach()[..., None]
    if scale is not None:
        start = top
        top = torch.maximum(scale.detach().cummax(dim=-1).values, start)
        before = torch.cat([start, top[..., :-1]], dim=-1)
        # A state that holds nothing has nothing to lose.
        gate = laid_out(torch.where(before > FLOOR / 2, before - top, 0.0).clamp(min=FADED))
        values = values * torch.exp(scale - top)[..., None]
    assert kernel is not None
    mixed, kv = kernel(
        laid_out(phi_q, 1),
        laid_out(without_padding(phi_k, key_padding_mask)),
        laid_out(values),
        g=gate,
        scale=1.0,
        initial_state=state.kv.repeat_interleave(groups, dim=1).contiguous(),
        output_final_state=True,
    )
    mixed = mixed.transpose(1, 2)
    out = divide(mixed, eps) if normalize else mixed
    return out.to(v.dtype), State(kv[:, ::groups], top[..., -1])
