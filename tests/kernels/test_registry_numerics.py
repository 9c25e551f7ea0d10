"""Every kernel stays finite, forward and backward: large inputs, half precision, long texts."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import KERNELS, directions, make_inputs, make_mixer, run, stepwise, variants

CASES = [
    pytest.param(info, direction, window, id=f"{info.name}-{direction}-{window or 'plain'}")
    for info in KERNELS
    for direction in directions(info)
    for window in ([None, 8] if info.windowed else [None])
]
FORMS = [
    pytest.param(info, arguments, id=f"{info.name}-{arguments['form']}")
    for info in KERNELS
    for arguments in variants(info)
    if "form" in arguments
]
LONG = 16384


def extreme(tokens, dtype, limit=60.0, **sizes):
    """Inputs up to +-limit, with runs of the extremes themselves."""
    q, k, v = (x.clamp(-3, 3) * (limit / 3) for x in make_inputs(tokens, **sizes))
    q[..., : tokens // 4, :] = limit
    k[..., tokens // 2 :, ::2] = -limit
    k[..., : tokens // 8, :] = limit
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def assert_finite(mixer, inputs, mask=None):
    out, state = run(mixer, *inputs, mask, needs_state=mixer.shape.causal)
    assert out.dtype == inputs[2].dtype
    assert torch.isfinite(out).all()
    leaves = [*inputs, *mixer.parameters()]
    idle = not getattr(mixer.config, "tied", True)
    found = torch.autograd.grad(out.float().square().mean(), leaves, allow_unused=idle, materialize_grads=idle)
    assert all(torch.isfinite(g).all() for g in found)
    for tensor in (state or {}).values():
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("info", "direction", "window"), CASES)
@pytest.mark.sampled("pairs")
def test_large_inputs(info, direction, window, dtype):
    mixer = make_mixer(info, causal=direction == "causal", window=window)
    assert_finite(mixer, extreme(150, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("info", "arguments"), FORMS)
@pytest.mark.sampled("values")
def test_large_inputs_of_other_forms(info, arguments, dtype):
    for direction in directions(info):
        assert_finite(make_mixer(info, arguments, causal=direction == "causal"), extreme(150, dtype))


@pytest.mark.parametrize(("info", "direction", "window"), CASES)
@pytest.mark.sampled("pairs")
def test_a_model_of_half_parameters(info, direction, window):
    """`model.half()` by hand: parameters and buffers in fp16 too; they are read in fp32."""
    mixer = make_mixer(info, causal=direction == "causal", window=window).half()
    out, _ = run(mixer, *extreme(40, torch.float16))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("info", [i for i in KERNELS if i.causal and i.streamable], ids=lambda i: i.name)
def test_decoding_large_inputs(info):
    mixer = make_mixer(info, causal=True)
    with torch.no_grad():
        inputs = [x.detach() for x in extreme(40, torch.float32)]
        steps, _ = stepwise(mixer, *inputs, prefill=20)
    assert torch.isfinite(steps).all()


@pytest.mark.parametrize(("info", "direction", "window"), CASES)
@pytest.mark.sampled("values", "info")
@pytest.mark.sampled("values", "direction", "window")
def test_long_texts(info, direction, window):
    """16,384 tokens of one head (4,096 with a window): T x T would be 1 GiB."""
    sizes = {"batch": 1, "heads": 1, "key_heads": 1, "dim": 4, "width": 2}
    mixer = make_mixer(
        info, causal=direction == "causal", window=window, **{k: v for k, v in sizes.items() if k != "batch"}
    )
    assert_finite(mixer, extreme(LONG if window is None else LONG // 4, torch.float32, **sizes))


@pytest.mark.parametrize(("info", "direction", "window"), CASES)
@pytest.mark.sampled("values")
def test_fully_padded_rows(info, direction, window):
    mixer = make_mixer(info, causal=direction == "causal", window=window)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0] = False
    assert_finite(mixer, extreme(30, torch.float32, limit=3.0), mask)
