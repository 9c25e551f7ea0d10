"""A process of its own for the Triton kernels on the CPU: Triton decides on its interpreter when it is imported.

    python -m support.children.fused CASES

prints for every case, in one or both directions, the relative errors of output, state and gradients, as JSON. CASES
is "few" or "more". Calls with a window and decoding steps have no gradients.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from linearize.attention.backends import fused, fused_window, triton_calls
from linearize.attention.backends.choose import kind_of
from linearize.attention.backends.eager import Eager, OneStep, Windowed
from linearize.attention.backends.fused_step import FusedStep
from linearize.attention.call import AttentionCall, running_count
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
    hybrid: dict[str, Any] = field(default_factory=dict)

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

NEAR = {"window": 5, "sinks": 2, "scale": "linear", "exact_keys": 4}
WINDOWS = [
    Case("hedgehog", 67, heads=(2, 1), hybrid={"window": 12, "sinks": 3, "scale": "linear"}),
    Case("hedgehog", 66, heads=(2, 1), padded=True, hybrid=NEAR | {"window": 7}),
    Case("t2r", 40, heads=(2, 1), batch=1, hybrid={"window": 9, "exact_keys": 3}),
    Case("hedgehog", 40, heads=(1, 1), padded=True, hybrid={"scale": "linear"}),
    Case("none", 40, heads=(1, 1), hybrid={"window": 8, "sinks": 1}),
    Case("hedgehog", 34, heads=(1, 1), batch=1, dtype=torch.float16, hybrid=NEAR | {"exact_keys": 0}),
]
"""Segments have 32 tokens in these tests."""
MORE_WINDOWS = [
    Case("hedgehog", 130, hybrid={"window": 12, "sinks": 3, "scale": "linear"}),
    Case("hedgehog", 100, heads=(4, 2), padded=True, hybrid=NEAR | {"window": 7}),
    Case("hedgehog", 50, heads=(2, 1), hybrid={"window": 8}),
    Case("hedgehog", 130, heads=(2, 1), hybrid={"window": 12, "sinks": 3, "scale": "linear", "exact_keys": 5}),
    Case("hedgehog", 100, heads=(2, 1), hybrid={"window": 40, "exact_keys": 3}),
    Case("t2r", 90, heads=(2, 1), padded=True, hybrid={"window": 9, "sinks": 1, "scale": "network", "exact_keys": 3}),
    Case("flexformer_n", 70, heads=(2, 1), padded=True, hybrid={"window": 9, "sinks": 1, "scale": "linear"}),
    Case("hedgehog", 40, {"tied": False}, hybrid={"window": 64, "sinks": 4, "scale": "linear", "exact_keys": 50}),
    Case("t2r", 70, padded=True, hybrid={"window": 8, "scale": "linear", "trained_length": 30}),
    Case("hedgehog", 3, hybrid={"window": 4, "sinks": 4, "scale": "linear", "exact_keys": 2}),
]
STEPS = [
    Case("hedgehog", 16, heads=(2, 1), padded=True, hybrid=NEAR),
    Case("flexformer_n", 8, heads=(3, 1), padded=True),
]
MORE_STEPS = [
    Case("hedgehog", 24, heads=(4, 2), padded=True, hybrid=NEAR | {"sinks": 3}),
    Case("flexformer_n", 10, heads=(6, 2), padded=True),
    Case("hedgehog", 16, heads=(3, 1), hybrid={"window": 4}),
    Case("hedgehog", 12, {"tied": False}, heads=(2, 1)),
    Case("hedgehog", 20, heads=(6, 2), hybrid={"window": 5, "sinks": 3, "scale": "network", "trained_length": 9}),
    Case("t2r", 24, heads=(4, 2), hybrid={"window": 40, "sinks": 1, "scale": "linear", "exact_keys": 4}),
    Case("flexformer_n", 24, heads=(4, 2), hybrid={"window": 4, "scale": "linear", "exact_keys": 3}),
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


def drawn(case: Case, *, causal: bool) -> tuple[Any, torch.Generator]:
    """A mixer with random parameters, and the generator for what else is drawn."""
    heads, key_heads = case.heads
    sizes = {"heads": heads, "key_heads": key_heads, "dim": DIM, "width": WIDTH}
    more = case.hybrid if case.scale is None else {"scale": case.scale}
    mixer = make_mixer(kernel_info(case.kernel), case.arguments, causal=causal, **sizes, **more)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    # Kernels of a model in half precision have weights of that type.
    return mixer.to(torch.float16) if case.dtype == torch.float16 else mixer, generator


def state_errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Compare two states: the sums in true size, and of the sinks and exact keys those that exist."""
    assert found.keys() == wanted.keys()
    sums = [state["kv"] * state["log_scale"].clamp(min=-80.0).exp()[..., None, None] for state in (found, wanted)]
    errors = {"kv": error(*sums)}
    for name in wanted:
        if name not in ("kv", "log_scale"):
            there = torch.ones(())
            if name.startswith("sink"):
                there = torch.arange(wanted[name].shape[2])[None, :] < wanted["tokens"][:, None]
            elif name.startswith("kept") and name != "kept_mask":
                there = wanted["kept_mask"]
            if there.ndim:
                there = there[:, None].expand(wanted[name].shape[:3])
                there = there[..., None] if wanted[name].ndim == 4 else there
            errors[name] = error(*(torch.where(there != 0, x[name].float(), 0.0) for x in (found, wanted)))
    return errors


@torch.no_grad()
def window_errors(case: Case, *, causal: bool) -> dict[str, float]:
    """Compare a whole call with a window with the backend in PyTorch."""
    mixer, generator = drawn(case, causal=causal)
    (q, k, v), mask = inputs(case, generator)
    places = (running_count(k, mask, None) - 1.0).clamp(min=0.0)
    call = AttentionCall(q, k, v, DIM**-0.5, mask, places, needs_state=causal)
    ours, theirs = fused_window.FusedWindow(), Eager() if mixer.window is None else Windowed()
    assert (why := ours.why_not(mixer, kind_of(mixer, call))) == "", why
    (out, state), (wanted, after) = ours.run(mixer, call), theirs.run(mixer, call)
    real = torch.ones(()) if mask is None else mask[:, None, :, None]
    found = {"out": error(*(torch.where(real != 0, x, 0.0) for x in (out, wanted)))}
    return found if state is None or after is None else found | state_errors(state, after)


@torch.no_grad()
def step_errors(case: Case) -> dict[str, float]:
    """Decode all tokens but the first three, and compare every step with the backend in PyTorch."""
    mixer, generator = drawn(case, causal=True)
    (q, k, v), mask = inputs(case, generator)

    def call(start: int, end: int, state: Any) -> AttentionCall:
        tokens = slice(start, end)
        place = torch.arange(start, end).expand(case.batch, -1).float().contiguous()
        part = None if mask is None else mask[:, tokens]
        return AttentionCall(*(x[:, :, tokens] for x in (q, k, v)), DIM**-0.5, part, place, state, needs_state=True)

    first, other = (Eager(), OneStep()) if mixer.window is None else (Windowed(), Windowed())
    _, theirs = first.run(mixer, call(0, 3, None))
    ours, found = {name: x.clone().contiguous() for name, x in theirs.items()}, {}
    for place in range(3, case.tokens):
        now = call(place, place + 1, ours)
        assert (why := FusedStep().why_not(mixer, kind_of(mixer, now))) == "", why
        (out, ours), (wanted, theirs) = FusedStep().run(mixer, now), other.run(mixer, call(place, place + 1, theirs))
        if mask is not None:
            # Padding changes nothing; its output is zero here.
            wanted = torch.where(mask[:, None, place, None, None], wanted, 0.0)
        errors = {"out": error(out, wanted)} | state_errors(ours, theirs)
        found = {name: max(value, found.get(name, 0.0)) for name, value in errors.items()}
    return found


def errors(case: Case, *, causal: bool) -> dict[str, float]:
    """Compare with the eager backend."""
    mixer, generator = drawn(case, causal=causal)
    (q, k, v), mask = inputs(case, generator)
    call = AttentionCall(q, k, v, DIM**-0.5, mask, needs_state=True)
    with torch.no_grad():
        assert (why := fused.Fused().why_not(mixer, kind_of(mixer, call))) == "", why
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
    assert not any("_kernels" in name for name in sys.modules), "linearize imports Triton's kernels before use"
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError):  # Other versions of Triton have no such functions.
        patch_once()
    triton_calls.DEVICES = ("cuda", "cpu")
    # The interpreter multiplies bf16 tiles as if their bits were whole numbers, and does not round to TF32. (With exact
    # products, causal calls would be declined.)
    fused.precision_of = fused_window.precision_of = triton_calls.precision_of = lambda v: "tf32"
    fused_window.CHUNK, fused_window.TUNING["tf32"] = 32, (16, 16, 4, 16, 4)
    more = sys.argv[1] == "more"
    causal, bidirectional = (MORE, FEW + MORE) if more else (FEW, [FEW[1], FEW[-1], SCALED])
    found = {f"causal {case.name()}": errors(case, causal=True) for case in causal}
    found |= {case.name(): errors(case, causal=False) for case in bidirectional}
    windows, steps = (MORE_WINDOWS, MORE_STEPS) if more else (WINDOWS, STEPS)
    found |= {f"causal {case.name()}": window_errors(case, causal=True) for case in windows}
    # Only causal layers can be without a window, or fade.
    both = [case for case in windows if "window" in case.hybrid and "trained_length" not in case.hybrid]
    both = both if more else both[:2]
    found |= {case.name(): window_errors(case, causal=False) for case in both}
    found |= {f"step {case.name()}": step_errors(case) for case in steps}
    print(json.dumps(found))


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    main()
