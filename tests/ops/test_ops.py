"""Every op equals the naive fp32 reference: outputs, states and gradients, at odd lengths, padded, grouped, scaled."""

import pytest
import torch
from support.naive import naive_attention
from support.op_cases import gradients, make, parallel_attention

from linearize.ops import (
    Blocks,
    bidirectional_attention,
    block_attention,
    causal_attention,
    kernel_weights,
    recurrent_attention,
)

LENGTHS = [1, 63, 100, 1000]
OPS = {
    "bidirectional": (bidirectional_attention, False),
    "causal": (causal_attention, True),
    "parallel": (parallel_attention, True),
    "recurrent": (recurrent_attention, True),
}


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("padded", [None, "left", "right"])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.sampled("pairs")
def test_forward_state_and_gradients_equal_naive(name, tokens, padded, scaled):
    op, causal = OPS[name]
    if tokens == 1000 and padded == "left":
        pytest.skip("the three shorter lengths cover left padding; the naive loop is slow at 1000")
    phi_q, phi_k, v, scale, mask = make(tokens, scaled=scaled, padded=padded)
    options = {"key_padding_mask": mask, "log_scale": scale}
    out, state = op(phi_q, phi_k, v, **options)
    expected, expected_state = naive_attention(phi_q, phi_k, v, causal=causal, **options)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.log_scale, expected_state.log_scale)
    torch.testing.assert_close(state.kv, expected_state.kv, rtol=1e-4, atol=1e-4)
    leaves = [x for x in (phi_q, phi_k, v, scale) if x is not None]
    real = out if mask is None else out * mask[:, None, :, None]
    real_expected = expected if mask is None else expected * mask[:, None, :, None]
    for got, want in zip(gradients(real, leaves), gradients(real_expected, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", OPS)
def test_state_hand_over(name, scaled):
    """Two halves, the second from the first's state, equal the whole."""
    op, causal = OPS[name]
    phi_q, phi_k, v, scale, _ = make(101, scaled=scaled)
    whole, whole_state = naive_attention(phi_q, phi_k, v, causal=causal, log_scale=scale)

    def half(part, state):
        piece = None if scale is None else scale[:, :, part]
        return op(
            phi_q[:, :, part],
            phi_k[:, :, part],
            v[:, :, part],
            log_scale=piece,
            initial_state=state,
        )

    first, state = half(slice(0, 37), None)
    second, state = half(slice(37, 101), state)
    if causal:
        torch.testing.assert_close(torch.cat([first, second], dim=2), whole, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(second, whole[:, :, 37:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.kv, whole_state.kv, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_kernel_weights_sum_to_one_and_give_the_output(causal):
    phi_q, phi_k, v, scale, mask = make(41, scaled=True, padded="right")
    weights = kernel_weights(phi_q, phi_k, key_padding_mask=mask, log_scale=scale, causal=causal)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    out = weights @ v.repeat_interleave(2, dim=1)
    expected, _ = naive_attention(phi_q, phi_k, v, causal=causal, key_padding_mask=mask, log_scale=scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_summed_in_fp32(name, dtype):
    """A bf16 running sum of ones stops at 256: the op's must not."""
    op, _ = OPS[name]
    tokens = 3000
    ones = torch.ones(1, 1, tokens, 1, dtype=dtype)
    ramp = torch.arange(tokens, dtype=torch.float32).reshape(1, 1, tokens, 1).div(tokens).to(dtype)
    out, state = op(ones, ones, ramp)
    assert out.dtype == dtype
    assert state.kv.dtype == torch.float32
    assert state.kv[..., 1].item() == tokens
    assert out[0, 0, -1, 0].item() == pytest.approx(ramp.float().mean().item(), rel=1e-2)


@pytest.mark.parametrize("name", ["causal", "parallel", "recurrent"])
def test_no_future_token_changes_an_earlier_output(name):
    op, _ = OPS[name]
    phi_q, phi_k, v, scale, _ = make(90, scaled=True)
    early = op(phi_q, phi_k, v, log_scale=scale)[0][:, :, :50]
    far = scale.detach().clone()
    far[:, :, 50:] += 200.0
    late = op(phi_q, phi_k * torch.where(torch.arange(90) < 50, 1.0, 7.0)[:, None], v, log_scale=far)[0][:, :, :50]
    assert torch.equal(early, late)


@pytest.mark.parametrize("name", OPS)
def test_all_padded_row_is_finite(name):
    op, _ = OPS[name]
    phi_q, phi_k, v, scale, _ = make(9, scaled=True)
    mask = torch.ones(2, 9)
    mask[0] = 0
    out, _ = op(phi_q, phi_k, v, log_scale=scale, key_padding_mask=mask)
    assert torch.isfinite(out).all()
    assert (out[0] == 0).all()


@pytest.mark.parametrize("less", [0.0, 2**-21, -(2**-21), 0.5])
@pytest.mark.parametrize("name", OPS)
def test_the_sum_of_a_row_keeps_away_from_zero_on_its_side(name, less):
    """Written out in numbers, as the naive reference divides like the ops: a sum of exactly zero is positive."""
    op, _ = OPS[name]
    phi_q, phi_k = torch.ones(1, 1, 2, 1), torch.tensor([1.0, -1.0 - less]).view(1, 1, 2, 1)
    out, _ = op(phi_q, phi_k, torch.tensor([3.0, 1.0]).view(1, 1, 2, 1), eps=1e-6)
    total = -less if abs(less) > 1e-6 else -1e-6 if less > 0 else 1e-6
    torch.testing.assert_close(out[0, 0, -1, 0].item(), (2.0 - less) / total, rtol=1e-5, atol=0)


@pytest.mark.parametrize("count", [3, 4, 6, 9])
def test_a_block_state_holds_the_tokens_of_the_last_block(count):
    """From the front, zeros behind them, and their number without padding."""
    q, k, v = (torch.randn(2, 2, 11, size, generator=torch.Generator().manual_seed(size)) for size in (5, 5, 3))
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[0, 11 - count :], mask[1, ::2] = True, True
    state = block_attention(q, k, v, Blocks(4, causal=True), scaling=1.0, key_padding_mask=mask)[1]
    for row, places in enumerate(real.nonzero()[:, 0] for real in mask):
        last = places[len(places) // 4 * 4 :]
        assert int(state.filled[row]) == len(last)
        for got, x in ((state.block_k, k), (state.block_v, v)):
            assert torch.equal(got[row, :, : len(last)], x[row][:, last]) and not got[row, :, len(last) :].any()
