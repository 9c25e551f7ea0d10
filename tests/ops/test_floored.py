"""Denominators with a floor: forward, gradient, states and padding against the written-out weights."""

import pytest
import torch

from linearize.ops import (
    bidirectional_attention,
    causal_attention,
    floored_attention,
    kernel_weights,
    recurrent_attention,
)

FLOOR = 0.4


def signed(tokens=40, *, scaled, seed=0):
    """Features of which nearly as many are negative as positive, so that sums cross zero and the floor is met often."""
    generator = torch.Generator().manual_seed(seed)
    phi_q, phi_k, v = (torch.randn(2, n, tokens, f, generator=generator) for n, f in ((4, 6), (2, 6), (2, 5)))
    mask = torch.rand(2, tokens, generator=generator) > 0.2
    return phi_q, phi_k + 0.5, v, 3 * torch.randn(2, 2, tokens, generator=generator) if scaled else None, mask


def written_out(phi_q, phi_k, v, log_scale, mask, causal):
    options = {"key_padding_mask": mask, "log_scale": log_scale, "causal": causal, "floor": FLOOR}
    return kernel_weights(phi_q, phi_k, **options) @ v.repeat_interleave(2, dim=1)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_written_out_weights_forward_and_gradient(causal, scaled):
    phi_q, phi_k, v, scale, mask = signed(scaled=scaled)
    leaves = [x.requires_grad_() for x in (phi_q, phi_k, v, scale) if x is not None]
    op = causal_attention if causal else bidirectional_attention
    fast, _ = floored_attention(phi_q, phi_k, v, FLOOR, op=op, key_padding_mask=mask, log_scale=scale)
    slow = written_out(phi_q, phi_k, v, scale, mask, causal)
    real = mask[:, None, :, None]
    torch.testing.assert_close(fast * real, slow * real, rtol=1e-4, atol=1e-5)
    towards = torch.randn(fast.shape, generator=torch.Generator().manual_seed(1)) * real
    for one, other in zip(*(torch.autograd.grad((x * towards).sum(), leaves) for x in (fast, slow)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_the_floor_is_met_and_bounds_rows(causal):
    phi_q, phi_k, *_ = signed(scaled=False)
    plain = kernel_weights(phi_q, phi_k, causal=causal)
    bounded = kernel_weights(phi_q, phi_k, causal=causal, floor=FLOOR)
    assert plain.abs().sum(-1).max() > 100
    assert bounded.abs().sum(-1).max() <= 1 / FLOOR + 1e-4
    met = bounded.sum(-1) < 1 - 1e-4
    assert 0.1 < met.float().mean() < 0.9
    torch.testing.assert_close(bounded[~met], plain[~met])
    # Where no feature is negative, no row meets it.
    sizes = phi_q.abs(), phi_k.abs()
    torch.testing.assert_close(kernel_weights(*sizes, causal=causal, floor=1.0), kernel_weights(*sizes, causal=causal))


@pytest.mark.parametrize("scaled", [False, True])
def test_pieces_and_steps_equal_the_whole(scaled):
    phi_q, phi_k, v, scale, mask = signed(90, scaled=scaled)
    options = {"floor": FLOOR, "op": causal_attention}
    whole, wanted = floored_attention(phi_q, phi_k, v, key_padding_mask=mask, log_scale=scale, **options)
    found, state = [], None
    for part in [slice(0, 70), *(slice(i, i + 1) for i in range(70, 90))]:
        out, state = floored_attention(
            *(x[:, :, part] for x in (phi_q, phi_k, v)),
            key_padding_mask=mask[:, part],
            log_scale=None if scale is None else scale[..., part],
            initial_state=state,
            floor=FLOOR,
            op=recurrent_attention if part.stop - part.start == 1 else causal_attention,
        )
        found.append(out)
    torch.testing.assert_close(torch.cat(found, dim=2), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.kv, wanted.kv, rtol=1e-4, atol=1e-5)
    assert state.kv.shape == (2, 2, 6, 5 + 2)
    # Padding at the end changes nothing before it.
    late = mask.clone()
    late[:, 60:] = False
    one, _ = floored_attention(phi_q, phi_k, v, key_padding_mask=late, log_scale=scale, **options)
    torch.testing.assert_close(one[:, :, :60], whole[:, :, :60], rtol=1e-5, atol=1e-6)
