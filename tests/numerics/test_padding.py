"""Whatever padding holds, NaN and infinity too, reaches no real token: every kernel, natively and in PyTorch."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import decode, make_inputs, make_mixer, naive, run
from support.naive import naive_attention
from support.numerics_cases import ENGINES, MIXERS
from support.op_cases import parallel_attention

from linearize.attention.backends.causal import attend_causally
from linearize.ops import (
    Blocks,
    Mapped,
    Window,
    bidirectional_attention,
    block_attention,
    causal_attention,
    empty_state,
    recurrent_attention,
    window_attention,
)

TOKENS = 70
"""More than a chunk of the ops in PyTorch, and than a tile of the native op."""
GARBAGE = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])


def padding(tokens=TOKENS):
    """A row padded on the left and in the middle, one on the right, one of nothing else."""
    mask = torch.ones(3, tokens, dtype=torch.bool)
    mask[0, :9] = mask[0, 30:34] = mask[1, -21:] = mask[2] = False
    return mask


def with_garbage(x, mask):
    """Put what no number should be into the padded tokens of x [B, H, T, D]."""
    holes = ~mask[:, None, :, None].expand_as(x)
    return torch.where(holes, GARBAGE.repeat(x.numel() // 4 + 1)[: x.numel()].view_as(x), x)


def everything(mixer, inputs, mask):
    """Output at real tokens, state, gradients to inputs and parameters, and the output without a gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, _ = run(mixer, *leaves, mask)
    real = mask[:, None].expand(out.shape[:3])
    towards = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    asked = [*leaves, *mixer.parameters()]
    found = torch.autograd.grad((out * towards)[real].sum(), asked, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        quick, state = run(mixer, *inputs, mask, needs_state=mixer.shape.causal)
    return [out[real], quick[real], *(state or {}).values(), *found]


@ENGINES
@pytest.mark.parametrize(("info", "arguments", "direction", "window"), MIXERS)
@pytest.mark.sampled("pairs")
def test_no_kernel_sees_it(switch, info, arguments, direction, window, native):
    switch(native)
    mixer = make_mixer(info, arguments, causal=direction == "causal", window=window)
    mask = padding()
    clean = make_inputs(TOKENS, batch=3)
    dirty = [with_garbage(x, mask) for x in clean]
    assert not all(torch.isfinite(x).all() for x in dirty)
    expected, found = (everything(mixer, inputs, mask) for inputs in (clean, dirty))
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other)
    gradients = found[-3 - len(list(mixer.parameters())) :][:3]
    for gradient in gradients:
        assert torch.equal(gradient.transpose(1, 2)[~mask], torch.zeros_like(gradient.transpose(1, 2)[~mask]))


@pytest.mark.parametrize(("info", "arguments", "direction", "window"), MIXERS)
def test_written_out_weights_do_not_see_it(info, arguments, direction, window):
    mixer = make_mixer(info, arguments, causal=direction == "causal", window=window)
    mask = padding(20)
    clean = make_inputs(20, batch=3)
    real = mask[:, None].expand(3, clean[0].shape[1], -1)
    found = []
    for q, k, v in (clean, [with_garbage(x, mask) for x in clean]):
        leaves = [x.requires_grad_() for x in (q, k)]
        out = naive(mixer, *leaves, torch.where(mask[:, None, :, None], v, 0.0), mask)
        asked = [*leaves, *mixer.parameters()]
        found.append([out[real], *torch.autograd.grad(out[real].square().sum(), asked, allow_unused=True)])
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or (torch.isfinite(one).all() and torch.equal(one, other))


@ENGINES
@pytest.mark.parametrize(
    ("info", "arguments", "direction", "window"), [case for case in MIXERS if case.values[2] == "causal"]
)
@torch.no_grad()
@pytest.mark.sampled("pairs")
def test_a_padded_step_leaves_the_state_alone(switch, info, arguments, direction, window, native):
    if not info.streamable:
        pytest.skip("the kernel says that it does not stream")
    switch(native)
    mixer = make_mixer(info, arguments, causal=True, window=window)
    _, before = run(mixer, *make_inputs(12), needs_state=True)
    mask = torch.tensor([[False], [True]])
    after = []
    for dirty in (False, True):
        token = make_inputs(1, seed=1)
        token = [with_garbage(x, mask) for x in token] if dirty else token
        state = {name: x.clone() for name, x in before.items()}
        after.append(decode(mixer, *token, mask, state=state))
    (clean, expected), (out, state) = after
    assert torch.isfinite(out).all() and torch.equal(out, clean)
    for name, x in state.items():
        assert torch.equal(x, expected[name]) and torch.equal(x[0], before[name][0]), name


def windowed(q, k, v, *, log_scale, key_padding_mask):
    form = Window(5, 0.1, causal=True)
    return window_attention(Mapped(q, q), Mapped(k, k, log_scale), v, form, key_padding_mask=key_padding_mask)


def blockwise(q, k, v, *, log_scale, key_padding_mask):
    return block_attention(q, k, v, Blocks(4, causal=True), scaling=0.1, key_padding_mask=key_padding_mask)


def traced(q, k, v, *, log_scale, key_padding_mask):
    state = empty_state(k, v, scaled=log_scale is not None)
    options = {"key_padding_mask": key_padding_mask, "log_scale": log_scale, "initial_state": state}
    return parallel_attention(q, k, v, **options, normalize=True, eps=1e-30)


OPS = {
    "bidirectional": bidirectional_attention,
    "causal": causal_attention,
    "native": lambda *x, **more: (attend_causally(*x, **more), None),
    "recurrent": recurrent_attention,
    "naive-bidirectional": naive_attention,
    "naive-causal": lambda *x, **more: naive_attention(*x, causal=True, **more),
    "window": windowed,
    "block": blockwise,
    "traced": traced,
}


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    ("name", "native"), [*((name, False) for name in OPS if name != "native"), ("native", True), ("window", True)]
)
def test_no_op_sees_it(switch, name, scaled, native):
    switch(native)
    generator = torch.Generator().manual_seed(0)
    mask = padding()
    phi_q, phi_k = (torch.rand(3, n, TOKENS, 8, generator=generator) for n in (4, 2))
    v = torch.randn(3, 2, TOKENS, 6, generator=generator)
    scale = torch.randn(3, 2, TOKENS, generator=generator) if scaled else None
    found = []
    for dirty in (False, True):
        change = (lambda x: with_garbage(x, mask)) if dirty else (lambda x: x)
        given = [phi_q, change(phi_k), change(v), None if scale is None else change(scale[..., None])[..., 0]]
        leaves = [x.detach().requires_grad_() for x in given if x is not None]
        out, _ = OPS[name](*leaves[:3], log_scale=leaves[3] if scaled else None, key_padding_mask=mask)
        real = mask[:, None].expand(out.shape[:3])
        used = leaves[:3] if name == "block" else leaves
        found.append([out[real], *torch.autograd.grad(out[real].square().sum(), used)])
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(other).all() and torch.equal(one, other)
