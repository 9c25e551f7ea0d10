"""A process of its own for the Triton kernels on the CPU: Triton decides on its interpreter when it is imported.

    python -m support.children.fused CASES

prints for every case, in one or both directions, the relative errors of output, state and gradients, as JSON. CASES
is "few" or "more".
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from linearize.attention.backends import fused
from linearize.attention.backends.eager import Eager
from linearize.attention.call import AttentionCall
from linearize.core.registry import kernel_info
from support.kernel_cases import make_mixer


@dataclass(frozen=True)
class Case:
    """One call; DIM and WIDTH are no powers of two, so that there are padded columns."""

    kernel: str
    tokens: int
    arguments: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (2, 2)
    batch: int = 2
    padded: bool = False
    scale: str | None = None
    dtype: torch.dtype = torch.float32

    def name(self) -> str:
        return "-".join(map(str, astuple(self)))


DIM, WIDTH = 20, 6
# The interpreter is slow, so few cases have more tokens than a segment (128).
FEW = [
    Case("hedgehog", 2, heads=(1, 1)),
    Case("hedgehog", 130, {"tied": False}, heads=(2, 1), batch=1, padded=True),
    Case("hedgehog", 20, {"bias": False, "features": 70}, heads=(1, 1), padded=True, dtype=torch.bfloat16),
    Case("t2r", 50, {"features": 19}, heads=(2, 1), padded=True),
    Case("flexformer_n", 33, heads=(1, 1), padded=True),
]
SCALED = Case("hedgehog", 70, heads=(2, 1), padded=True, scale="linear")
"""Only bidirectional: causal calls with scales are declined."""
MORE = [
    Case("hedgehog", 63, heads=(4, 2), padded=True),
    Case("hedgehog", 130, {"tied": False}, heads=(2, 1), padded=True),
    Case("hedgehog", 140, {"tied": False}, heads=(2, 1)),
    Case("hedgehog", 70, {"bias": False, "features": 70}, padded=True, dtype=torch.bfloat16),
    Case("flexformer_n", 33, heads=(2, 1), padded=True),
    Case("flexformer_n", 130, heads=(2, 1), padded=True),
    Case("flexformer_n", 33, {"magnitude": False, "tied": False}, heads=(2, 1)),
]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / max(wanted.norm(), 1e-3 * wanted.numel() ** 0.5))


def inputs(case: Case, generator: torch.Generator) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """q, k, v as views of tokens-first memory, and the mask; padding is NaN."""
    sizes = (case.heads[0], DIM), (case.heads[1], DIM), (case.heads[1], WIDTH)
    drawn = [
        torch.randn(case.batch, case.tokens, *size, generator=generator).to(case.dtype).transpose(1, 2)
        for size in sizes
    ]
    if not case.padded:
        return drawn, None
    mask = torch.ones(case.batch, case.tokens, dtype=torch.bool)
    mask[0, -case.tokens // 3 :] = mask[-1, :2] = False
    return [x.masked_fill(~mask[:, None, :, None], float("nan")) for x in drawn], mask


def errors(case: Case, *, causal: bool) -> dict[str, float]:
    """Compare with the eager backend."""
    heads, key_heads = case.heads
    sizes = {"heads": heads, "key_heads": key_heads, "dim": DIM, "width": WIDTH}
    more = {} if case.scale is None else {"scale": case.scale}
    mixer = make_mixer(kernel_info(case.kernel), case.arguments, causal=causal, **sizes, **more)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    (q, k, v), mask = inputs(case, generator)
    call = AttentionCall(q, k, v, DIM**-0.5, mask, needs_state=True)
    with torch.no_grad():
        assert (why := fused.Fused().why_not(mixer, call)) == "", why
        (out, state), (wanted, after) = (backend.run(mixer, call) for backend in (fused.Fused(), Eager()))
    assert out.dtype == wanted.dtype and out.isfinite().all() and state is not None and after is not None
    found = {"out": error(out, wanted), "kv": error(state["kv"], after["kv"])}
    found["log_scale"] = error(state["log_scale"], after["log_scale"])
    towards = torch.randn(wanted.shape, generator=generator)
    towards = towards if mask is None else towards * mask[:, None, :, None]
    both = []
    for backend in (fused.Fused(), Eager()):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        attended, _ = backend.run(mixer, AttentionCall(*leaves, DIM**-0.5, mask))
        both.append(torch.autograd.grad(attended.float(), [*leaves, *mixer.parameters()], towards))
    names = [*"qkv", *(name for name, _ in mixer.named_parameters())]
    return found | {f"d{name}": error(one, other) for name, one, other in zip(names, *both, strict=True)}


def patch_once() -> None:
    """Let the interpreter patch Triton's language once per module: by default each call of a function does so again."""
    from triton.runtime import interpreter

    real, patched = interpreter._patch_lang, set()

    def patch(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            real(function)
        # What is patched is never restored: nothing else runs in this process.
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch


def main() -> None:
    assert not any("fused_kernels" in name for name in sys.modules), "linearize imports Triton's kernels before use"
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError):  # Other versions of Triton have no such functions.
        patch_once()
    fused.DEVICES = ("cuda", "cpu")
    # The interpreter multiplies bf16 tiles as if their bits were whole numbers, and does not round to TF32. (With exact
    # products, causal calls would be declined.)
    fused.precision_of = lambda v: "tf32"
    causal, bidirectional = (MORE, FEW + MORE) if sys.argv[1] == "more" else (FEW, [FEW[1], FEW[-1], SCALED])
    found = {f"causal {case.name()}": errors(case, causal=True) for case in causal}
    found |= {case.name(): errors(case, causal=False) for case in bidirectional}
    print(json.dumps(found))


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    main()
