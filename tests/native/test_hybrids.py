"""Random layers: windows, sinks, exact keys, log-scales; natively and in PyTorch as exact as fp32 allows."""

import random

import pytest
import torch
from support.native_cases import CASES, learned, tokens
from support.rounding import allowed, deviation, gradients_in_double

from linearize.attention.call import AttentionCall
from linearize.attention.scale import UNITS

POSITIVE = [(name, args) for name, args in CASES if learned(name, args).positive]
"""Learned log-scales are for positive maps."""


def draw(seed):
    """Return a random mixer, its inputs and a mask, or None, with holes."""
    chance = random.Random(seed)
    name, args = chance.choice(POSITIVE)
    window = chance.choice([None, 1, 2, 5, 17, 48, 64, 130])
    hybrid = {"scale": chance.choice(["none", "linear", "linear", "network"])}
    if window is not None:
        hybrid |= {"window": window, "sinks": chance.choice([0, 0, 1, 4, 200])}
    sizes = {"key_heads": chance.choice([1, 2, 4]), "size": chance.choice([1, 3, 16, 20, 33, 64])}
    sizes["value"] = chance.choice([1, 3, 24, 65])
    count = chance.choice([1, 2, 47, 48, 49, 97, chance.randint(1, 160)])
    mixer = learned(name, args, causal=chance.random() < 0.6, **sizes, **hybrid)
    mask = torch.rand(2, count, generator=torch.Generator().manual_seed(seed)) > 0.3 if chance.random() < 0.4 else None
    return mixer, tokens(count, seed=seed, **sizes), mask


def attend(mixer, q, k, v, mask):
    """Output, and the gradients to q, k, v and the parameters."""
    real = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if mask is None else mask
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, _ = mixer(AttentionCall(*leaves, q.shape[-1] ** -0.5, mask))
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)) * real[:, None, :, None]
    # Some are idle: without a window a factor of the queries, in short rows the keys' features.
    asked = [*leaves, *mixer.parameters()]
    return out, towards, torch.autograd.grad(out, asked, towards, allow_unused=True, materialize_grads=True)


@torch.no_grad()
def decode(mixer, inputs, mask, start):
    """Output of a call of the first tokens and steps of one, and the state after."""
    scaling, outputs, state = inputs[0].shape[-1] ** -0.5, [], None
    count = inputs[0].shape[2]
    for cut in (slice(0, start), *(slice(i, i + 1) for i in range(start, count))):
        part = None if mask is None else mask[:, cut]
        piece = [x[:, :, cut] for x in inputs]
        out, state = mixer(AttentionCall(*piece, scaling, part, state=state, needs_state=True))
        outputs.append(out)
    return torch.cat(outputs, dim=2), state


RUN = [pytest.param(seed, marks=() if seed < 100 else pytest.mark.slow) for seed in range(2_000)]


@pytest.mark.parametrize("seed", RUN)
def test_random_layers(switch, watch, seed):
    mixer, inputs, mask = draw(seed)
    count, causal = inputs[0].shape[2], mixer.shape.causal
    real = slice(None) if mask is None else mask[:, None].expand(-1, 4, -1)
    calls = watch("window", "attend", "window_step", "step")
    written_out = gradients_in_double(mixer, mask, inputs[0].shape[-1] ** -0.5)
    names = ["out", "q", "k", "v", *(name for name, _ in mixer.named_parameters())]
    for on in (True, False):
        switch(on)
        out, towards, found = attend(mixer, *inputs, mask)
        assert calls == (["window" if mixer.window else "attend"] if on else [])
        if on:
            terms = sum(x.shape[-1] for x in (inputs[0], inputs[2])) + mixer.feature_dim + UNITS + 8 * count
            exact, moves = deviation(written_out, [*inputs, towards, *mixer.parameters()])
            exact[0], out = exact[0][real], out[real]
            bounds = [allowed(move, terms) for move in moves]
        else:
            out = out[real]
        for name, ours, wanted, bound in zip(names, (out, *found), exact, bounds, strict=True):
            assert (ours - wanted).abs().max().item() <= bound if ours.numel() else True, (name, on)
        calls.clear()
        if not causal or count == 1:
            continue
        start = 1 + seed % (count - 1)
        out, state = decode(mixer, inputs, mask, start)
        steps = ["window_step" if mixer.window else "step"] * (count - start)
        assert calls == ([*(["window"] if mixer.window else ["attend"]), *steps] if on else [])
        calls.clear()
        assert (out[real] - exact[0]).abs().max().item() <= bounds[0]
        if on:
            after = state
    if causal and count > 1:
        assert after.keys() == state.keys()
        for name, ours in after.items():
            assert ours.shape == state[name].shape and ours.dtype == state[name].dtype and ours.is_contiguous(), name
