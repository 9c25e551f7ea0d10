"""Walking the tokens in parts gives what mapping all of them at once gives: outputs, states and gradients."""

import pytest
import torch
from support.kernel_cases import CASES, DIRECTIONS, IDS, make_inputs, make_mixer

from linearize.attention.backends import streamed
from linearize.attention.call import AttentionCall

TOKENS = 150
STREAMED = [
    pytest.param(info, arguments, direction, id=f"{name}-{direction}")
    for (info, arguments), name in zip(CASES, IDS, strict=True)
    for direction in DIRECTIONS
    if info.feature_dim is not None and getattr(info, direction)
]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(streamed, "NUMBERS", {"cpu": 1})


def mask_of(batch, tokens):
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[0, :70] = False
    mask[1, 130:] = False
    return mask


def gradients(mixer, inputs, mask, at_once, monkeypatch):
    """Output and gradients to q, k, v and the parameters."""
    monkeypatch.setattr(streamed, "RECOMPUTED", 10**9 if at_once else 1)
    leaves = [x.clone().requires_grad_() for x in inputs]
    mixer.zero_grad()
    out, _ = mixer(AttentionCall(*leaves, 0.25, mask))
    real = mask[:, None, :, None]
    pattern = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    (out * pattern * real).sum().backward()
    learned = {name: p.grad for name, p in mixer.named_parameters()}
    return out.detach() * real, [x.grad for x in leaves], learned


@pytest.mark.parametrize(("info", "arguments", "direction"), STREAMED)
@pytest.mark.sampled("values", "info", "direction")
def test_gradients_equal_those_of_all_at_once(info, arguments, direction, monkeypatch):
    mixer = make_mixer(info, arguments, causal=direction == "causal")
    inputs, mask = make_inputs(TOKENS, scale=0.5), mask_of(2, TOKENS)
    want = gradients(mixer, inputs, mask, True, monkeypatch)
    got = gradients(mixer, inputs, mask, False, monkeypatch)
    # Denominators of signed maps come near zero: their numbers are large, and compared by their size.
    size = max(1.0, want[0].abs().max().item())
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5 * size)
    for one, two in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4 * max(1.0, two.abs().max().item()))
    for name, two in want[2].items():
        one = got[2][name]
        assert (one is None) == (two is None)
        if two is not None:
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4 * max(1.0, two.abs().max().item()))


@pytest.mark.parametrize(("info", "arguments", "direction"), STREAMED)
@pytest.mark.sampled("values", "info", "direction")
def test_without_gradient_equals_with(info, arguments, direction):
    mixer = make_mixer(info, arguments, causal=direction == "causal")
    q, k, v = make_inputs(TOKENS, scale=0.5)
    mask = mask_of(2, TOKENS)
    whole, _ = mixer(AttentionCall(q, k, v, 0.25, mask))
    with torch.no_grad():
        walked, state = mixer(AttentionCall(q, k, v, 0.25, mask, needs_state=direction == "causal"))
    real = mask[:, None, :, None]
    size = max(1.0, (whole * real).abs().max().item())
    torch.testing.assert_close(walked * real, (whole * real).detach(), rtol=1e-4, atol=1e-5 * size)
    assert (state is not None) == (direction == "causal")


def test_frozen_parameters_and_inputs_without_gradient(monkeypatch):
    """Only what asks for a gradient gets one."""
    monkeypatch.setattr(streamed, "RECOMPUTED", 1)
    info = next(info for info, _ in CASES if info.name == "hedgehog")
    mixer = make_mixer(info, causal=False)
    mixer.keys.bias.requires_grad_(False)
    q, k, v = make_inputs(TOKENS)
    v.requires_grad_()
    mixer(AttentionCall(q, k, v, 0.25))[0].square().sum().backward()
    assert q.grad is None and v.grad is not None
    assert mixer.keys.bias.grad is None and mixer.keys.weight.grad.abs().sum() > 0


def test_parts_cover_all_tokens_once(monkeypatch):
    q = torch.arange(1000.0).expand(2, 3, 4, -1).transpose(2, 3)
    for numbers in (1, 100_000, 10**9):
        monkeypatch.setattr(streamed, "NUMBERS", {"cpu": numbers})
        cuts = [part.q[0, 0, :, 0].tolist() for part in streamed.parts(AttentionCall(q, q, q, 1.0), 32)]
        assert [i for cut in cuts for i in cut] == list(range(1000))
        assert all(cut[0] % streamed.UNIT == 0 for cut in cuts)
