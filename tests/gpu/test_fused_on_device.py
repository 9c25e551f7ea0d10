"""The Triton kernels on a GPU equal the ops in PyTorch: outputs, states and gradients, in fp32, bf16 and fp16."""

from __future__ import annotations

import copy

import pytest
import torch
from support.kernel_cases import make_inputs, make_mixer

from linearize.attention.backends import fused, triton_calls
from linearize.attention.backends.choose import choose, kind_of
from linearize.attention.backends.eager import Eager, OneStep, Windowed
from linearize.attention.backends.fused_step import FusedStep
from linearize.attention.backends.fused_window import FusedWindow
from linearize.attention.call import AttentionCall
from linearize.core.registry import kernel_info

SCALING = 0.125
LIMITS = {"exact": (2e-5, 2e-4), "tf32": (3e-3, 1e-2), "bf16": (2e-2, 4e-2), "fp16": (3e-3, 1e-2)}
"""Relative errors allowed in outputs and gradients: TF32 and fp16 have 11 bits, bf16 has 8.

On an H200 with 1,000 tokens, outputs in bf16 were 0.2 % off and gradients up to 0.6 %; those of relu 3.5 %, because it
has a kink. The bounds follow an emulation on the CPU that truncates to bf16 instead of rounding: 1.2, 2.3 and 6.3 %.
"""
DTYPES = {"exact": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def gpu(device) -> torch.device:
    if device.type != "cuda" or triton_calls.kernels() is None:
        pytest.skip("needs a CUDA device and Triton; tests/attention/test_fused.py has the CPU's tests")
    return device


def error(found, wanted):
    wanted = wanted.detach().double()
    return float((found.detach().double() - wanted).norm() / wanted.norm())


def check(mixer, inputs, mask, precision):
    """Compare with the eager backend in exact fp32, on the same device and the same rounded inputs."""
    limit, gradient_limit = LIMITS[precision]
    gradient_limit *= 3 if mixer.info.name == "t2r" else 1
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    call = AttentionCall(*inputs, SCALING, mask)
    assert (why := fused.Fused().why_not(mixer, kind_of(mixer, call))) == "", why
    found, _ = fused.Fused().run(mixer, call)
    real = 1.0 if mask is None else mask[:, None, :, None]
    towards = torch.randn(found.shape, generator=torch.Generator().manual_seed(3)).to(found.device) * real
    ours = torch.autograd.grad((found.float() * towards).sum(), [*inputs, *mixer.parameters()])
    with torch.no_grad():
        stated, state = fused.Fused().run(mixer, AttentionCall(*inputs, SCALING, mask, needs_state=True))
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    leaves = [x.detach().float().requires_grad_() for x in inputs]
    wanted, after = Eager().run(mixer, AttentionCall(*leaves, SCALING, mask, needs_state=True))
    exact = torch.autograd.grad((wanted * towards).sum(), [*leaves, *mixer.parameters()])
    assert found.dtype == inputs[2].dtype and found.device == inputs[2].device
    errors = [error(found * real, wanted * real), error(stated * real, wanted * real), error(state["kv"], after["kv"])]
    assert max(errors) < limit, errors
    more = [error(one, other) for one, other in zip(ours, exact, strict=True)]
    assert max(more) < gradient_limit, more


@pytest.mark.parametrize("way", ["bidirectional", "causal"])
@pytest.mark.parametrize("tokens", [1000, 4097])
@pytest.mark.parametrize("precision", LIMITS)
def test_hedgehog_equals_the_eager_backend(precision, tokens, way, gpu):
    if (precision, way) == ("exact", "causal"):
        pytest.skip("declined")
    mixer = make_mixer(kernel_info("hedgehog"), {}, causal=way == "causal", heads=4, key_heads=2, dim=64, width=64)
    drawn = make_inputs(tokens, heads=4, key_heads=2, dim=64, width=64)
    inputs = [x.to(gpu, DTYPES[precision]).requires_grad_() for x in drawn]
    mask = torch.ones(2, tokens, dtype=torch.bool, device=gpu)
    mask[0, -99:] = False
    check(mixer.to(gpu), inputs, mask, precision)


@pytest.mark.parametrize("way", ["bidirectional", "causal"])
@pytest.mark.parametrize(
    ("name", "arguments", "dim"),
    [("t2r", {}, 32), ("flexformer_n", {}, 64), ("hedgehog", {"tied": False}, 20), ("hedgehog", {}, 128)],
    ids=["relu", "waves", "untied", "large"],
)
def test_other_maps_and_sizes_equal_the_eager_backend(name, arguments, dim, way, gpu):
    mixer = make_mixer(kernel_info(name), arguments, causal=way == "causal", heads=2, key_heads=1, dim=dim, width=dim)
    drawn = make_inputs(500, heads=2, key_heads=1, dim=dim, width=dim)
    check(mixer.to(gpu), [x.to(gpu, torch.bfloat16).requires_grad_() for x in drawn], None, "bf16")


def test_learned_scales_equal_the_eager_backend(gpu):
    mixer = make_mixer(kernel_info("hedgehog"), {}, causal=False, dim=64, width=64, scale="linear")
    with torch.no_grad():
        mixer.key_scale.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
    inputs = [x.to(gpu, torch.bfloat16).requires_grad_() for x in make_inputs(500, dim=64, width=64)]
    check(mixer.to(gpu), inputs, None, "bf16")


HYBRIDS = {
    "window": {"window": 128, "scale": "linear"},
    "sinks": {"window": 100, "sinks": 4, "scale": "linear"},
    "exact keys": {"window": 64, "sinks": 2, "exact_keys": 16, "scale": "linear"},
}


@torch.no_grad()
@pytest.mark.parametrize("way", ["bidirectional", "causal"])
def test_a_window_alone_equals_the_ops_in_pytorch(way, gpu):
    mixer = make_mixer(
        kernel_info("none"), {}, causal=way == "causal", heads=4, key_heads=2, dim=64, width=64, window=64
    )
    inputs = [x.to(gpu) for x in make_inputs(300, heads=4, key_heads=2, dim=64, width=64)]
    call = AttentionCall(*inputs, SCALING)
    assert (why := FusedWindow().why_not(mixer, kind_of(mixer, call))) == "", why
    assert error(FusedWindow().run(mixer, call)[0], Windowed().run(mixer, call)[0]) < LIMITS["exact"][0]


def hybrid(name, gpu, *, causal, kernel="hedgehog"):
    mixer = make_mixer(kernel_info(kernel), {}, causal=causal, heads=4, key_heads=2, dim=64, width=64, **HYBRIDS[name])
    with torch.no_grad():
        for scale in (mixer.key_scale, mixer.query_scale):
            scale.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
    return mixer.to(gpu)


@torch.no_grad()
@pytest.mark.parametrize("way", ["bidirectional", "causal"])
@pytest.mark.parametrize("tokens", [130, 1000, 20000])
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("precision", LIMITS)
def test_windows_equal_the_ops_in_pytorch(precision, name, tokens, way, gpu):
    mixer = hybrid(name, gpu, causal=way == "causal")
    drawn = make_inputs(tokens, heads=4, key_heads=2, dim=64, width=64)
    inputs = [x.to(gpu, DTYPES[precision]) for x in drawn]
    mask = torch.ones(2, tokens, dtype=torch.bool, device=gpu)
    mask[0, -99:] = mask[1, :5] = False
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    call = AttentionCall(*inputs, SCALING, mask, needs_state=way == "causal")
    if (precision, name, way) == ("exact", "exact keys", "causal"):
        pytest.skip("declined")
    assert (why := FusedWindow().why_not(mixer, kind_of(mixer, call))) == "", why
    found, state = FusedWindow().run(mixer, call)
    again, _ = FusedWindow().run(mixer, call)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    whole = AttentionCall(*(x.float() for x in inputs), SCALING, mask, needs_state=way == "causal")
    wanted, after = Windowed().run(mixer, whole)
    real = mask[:, None, :, None]
    assert torch.equal(found * real, again * real), "two runs differ"
    assert error(found * real, wanted * real) < LIMITS[precision][0]
    if state is not None:
        sums = [x["kv"].double() * x["log_scale"].double().exp()[..., None, None] for x in (state, after)]
        assert float((sums[0] - sums[1]).norm()) <= LIMITS[precision][0] * float(sums[1].norm())


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["hedgehog", "flexformer_n"])
@pytest.mark.parametrize("name", [*HYBRIDS, "no window"])
def test_decoding_steps_equal_the_ops_in_pytorch(name, kernel, gpu):
    if name == "no window":
        mixer = make_mixer(kernel_info(kernel), {}, causal=True, heads=4, key_heads=2, dim=64, width=64).to(gpu)
        first, other = Eager(), OneStep()
    else:
        mixer, first, other = hybrid(name, gpu, causal=True, kernel=kernel), Windowed(), Windowed()
    q, k, v = (x.to(gpu) for x in make_inputs(300, heads=4, key_heads=2, dim=64, width=64))

    def call(start, end, state):
        return AttentionCall(*(x[:, :, start:end] for x in (q, k, v)), SCALING, None, None, state, needs_state=True)

    _, theirs = first.run(mixer, call(0, 120, None))
    ours = {key: x.clone().contiguous() for key, x in theirs.items()}
    for place in range(120, 300):
        now = call(place, place + 1, ours)
        assert (why := FusedStep().why_not(mixer, kind_of(mixer, now))) == "", why
        (found, ours), (wanted, theirs) = FusedStep().run(mixer, now), other.run(mixer, call(place, place + 1, theirs))
        assert error(found, wanted) < 2e-5, place


def test_it_is_chosen(gpu, monkeypatch):
    mixer = make_mixer(kernel_info("hedgehog"), {}, causal=True).to(gpu)
    call = AttentionCall(*(x.to(gpu) for x in make_inputs(50)), SCALING)
    call.v = call.v.bfloat16()
    assert choose(copy.deepcopy(mixer), call).name == "triton"
    monkeypatch.setenv(triton_calls.SWITCH, "0")
    assert choose(mixer, call).name != "triton"
