"""Every op on a device equals the naive reference in fp32 on the CPU: outputs, states, gradients, in fp32 and bf16."""

from __future__ import annotations

import pytest
import torch
from support.naive import naive_attention
from support.op_cases import gradients, make

from linearize.ops import bidirectional_attention, causal_attention, recurrent_attention

OPS = {
    "bidirectional": (bidirectional_attention, False),
    "causal": (causal_attention, True),
    "recurrent": (recurrent_attention, True),
}
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Relative error allowed in the output: fp32 sums in another order; one rounding to bf16 and two of what goes in."""


def error(found, wanted):
    """Norm of the difference over the norm of what is wanted, or over that of hundredths where it is as good as 0.

    With a single key the gradient of its log-scale is 0, because terms of size 1 cancel; each is rounded to fp32.
    """
    wanted = wanted.detach().double().cpu()
    return float((found.detach().double().cpu() - wanted).norm() / max(wanted.norm(), 1e-2 * wanted.numel() ** 0.5))


def on(device, leaves, dtype):
    """Leaves on a device: features and scales in fp32, values (the third) in `dtype`."""
    return [
        x.detach().to(device, dtype if place == 2 else torch.float32).requires_grad_() for place, x in enumerate(leaves)
    ]


@pytest.mark.sampled("pairs")
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize(("tokens", "padded"), [(1, None), (63, "left"), (257, "right"), (1000, None)])
@pytest.mark.parametrize("name", OPS)
def test_forward_state_and_gradients_equal_naive(name, tokens, padded, scaled, device, dtype):
    op, causal = OPS[name]
    if name == "recurrent" and tokens == 1000:
        tokens = 100  # One launch per token.
    *inputs, scale, mask = make(tokens, features=16, width=16, scaled=scaled, padded=padded)
    leaves = [x for x in (*inputs, scale) if x is not None]
    there = on(device, leaves, dtype)
    # The reference sees the values as they are after their rounding.
    here = on(torch.device("cpu"), [x.detach().cpu().float() for x in there], torch.float32)

    def run(op, given, mask, **more):
        scales = given[3] if scaled else None
        return op(*given[:3], key_padding_mask=mask, log_scale=scales, **more)

    out, state = run(op, there, None if mask is None else mask.to(device))
    expected, wanted = run(naive_attention, here, mask, causal=causal)
    assert (out.device.type, out.dtype, state.kv.dtype) == (device.type, dtype, torch.float32)
    assert error(out.float(), expected) < LIMITS[dtype]
    assert error(state.kv, wanted.kv) < 2e-5
    real = 1.0 if mask is None else mask[:, None, :, None]
    ours = gradients(out.float().cpu() * real, there)
    for found, exact in zip(ours, gradients(expected * real, here), strict=True):
        assert found.device.type == device.type
        assert error(found, exact) < 10 * LIMITS[dtype]


@pytest.mark.parametrize("name", OPS)
def test_sums_of_half_precision_are_fp32(name, device):
    """A bf16 running sum of ones stops at 256."""
    op, _ = OPS[name]
    ones = torch.ones(1, 1, 600, 1, dtype=torch.bfloat16, device=device)
    _, state = op(ones, ones, ones)
    assert state.kv.dtype == torch.float32 and state.kv[..., 1].item() == 600


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_causal_in_parts_equals_the_whole(scaled, device, dtype):
    """A long prompt, a shorter part, then single tokens: decoding from the state equals one forward."""
    phi_q, phi_k, v, scale, _ = make(90, features=16, width=16, scaled=scaled)
    phi_q, phi_k, v, *more = on(device, [x for x in (phi_q, phi_k, v, scale) if x is not None], dtype)
    whole, last = causal_attention(phi_q, phi_k, v, log_scale=more[0] if scaled else None)
    state, parts = None, []
    for part in (slice(0, 65), slice(65, 80), *(slice(i, i + 1) for i in range(80, 90))):
        op = causal_attention if part.stop - part.start > 1 else recurrent_attention
        pieces = [x[:, :, part] for x in (phi_q, phi_k, v)]
        scales = more[0][:, :, part] if scaled else None
        out, state = op(*pieces, log_scale=scales, initial_state=state)
        parts.append(out)
    assert error(torch.cat(parts, dim=2).float(), whole) < LIMITS[dtype]
    assert error(state.kv, last.kv) < 2e-5
