"""A process of its own that compiles the Triton kernels of windows and decoding for an H100, without one.

    python -m support.children.compiled

calls the backends on the CPU; instead of running a kernel, its call is compiled for the same arguments. Prints for
every call the kernels' shared memory in bytes, as JSON.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from linearize.attention.backends import fused_step, fused_window
from linearize.attention.backends.eager import Eager, Windowed
from linearize.attention.call import AttentionCall
from linearize.core.registry import kernel_info
from support.kernel_cases import make_mixer

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
shared: dict[str, int] = {}


def launch(kernel: str, grid: tuple[int, ...], args: Any, **options: Any) -> None:
    """Compile a kernel instead of running it."""
    module, _, name = kernel.partition(".")
    function = getattr(importlib.import_module(f"linearize.attention.backends.{module}"), name)
    chosen = {key: options.pop(key) for key in ("num_warps", "num_stages") if key in options}
    values = dict(zip(function.arg_names, args, strict=False)) | options
    signature, constants = {}, {}
    for parameter in function.params:
        value = values[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    built = triton.compile(ASTSource(function, signature, constants), target=HOPPER, options=chosen)
    shared[name] = max(shared.get(name, 0), built.metadata.shared)


@torch.no_grad()
def call(kernel: str, dtype: torch.dtype, *, causal: bool, step: bool = False, **hybrid: Any) -> None:
    mixer = make_mixer(kernel_info(kernel), {}, causal=causal, heads=9, key_heads=3, dim=64, width=64, **hybrid).to(
        dtype
    )
    q, k, v = (torch.randn(1, 300, heads, 64).to(dtype).transpose(1, 2) for heads in (9, 3, 3))
    whole = AttentionCall(q, k, v, 0.125, torch.ones(1, 300, dtype=torch.bool))
    if not step:
        fused_window.FusedWindow().run(mixer, whole)
        return
    whole.needs_state = True
    state = (Eager() if mixer.window is None else Windowed()).run(mixer, whole)[1]
    fused_step.FusedStep().run(
        mixer, AttentionCall(*(x[:, :, :1] for x in (q, k, v)), 0.125, None, torch.zeros(1, 1), state)
    )


def main() -> None:
    fused_window.launch = fused_step.launch = launch
    whole = {"window": 128, "scale": "linear", "exact_keys": 32, "sinks": 4}
    for dtype in (torch.bfloat16, torch.float32):
        call("hedgehog", dtype, causal=False, **whole)
        call("t2r", dtype, causal=True, window=64, sinks=4, scale="network")
        call("flexformer_n", dtype, causal=True, window=64)
    call("hedgehog", torch.bfloat16, causal=True, **whole)
    call("hedgehog", torch.bfloat16, causal=True, step=True, trained_length=512, **whole)
    call("flexformer_n", torch.bfloat16, causal=True, step=True)
    print(json.dumps(shared))


if __name__ == "__main__":
    main()
