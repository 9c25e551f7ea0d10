"""Random layers: windows, sinks, exact keys, log-scales; natively and in PyTorch as exact as fp32 allows."""

import itertools
import random

import pytest
import torch
from support.native_cases import CASES, learned, tokens
from support.rounding import allowed, deviation, gradients_in_double

from linearize.attention.call import AttentionCall
from linearize.attention.hybrid import UNITS

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
        hybrid |= {"exact_keys": chance.choice([0, 1, 2, 7, 33, 200])}
    sizes = {"key_heads": chance.choice([1, 2, 4]), "size": chance.choice([1, 3, 16, 20, 33, 64])}
    sizes["value"] = chance.choice([1, 3, 24, 65])
    count = chance.choice([1, 2, 47, 48, 49, 97, chance.randint(1, 160)])
    causal = chance.random() < 0.6
    mask = torch.rand(2, count, generator=torch.Generator().manual_seed(seed)) > 0.3 if chance.random() < 0.4 else None
    if causal and window is not None and hybrid["scale"] != "none" and seed % 2:
        hybrid["trained_length"] = 1 + seed % count
        if mask is not None:
            # A step of rows with different lengths is PyTorch's.
            mask[1] = mask[0]
    if mask is not None and window is None:
        # Rounding cannot be measured at a query that sees nothing: there the written-out weights come from -1e30.
        mask[:, 0] = True
    for attempt in itertools.count():
        if attempt == 20:
            # Where a network's units are off, its log-scales are equal but for rounding.
            hybrid["scale"] = "linear"
        mixer = learned(name, args, causal=causal, **sizes, **hybrid)
        inputs = tokens(count, seed=seed + 10_000 * attempt, **sizes)
        if distinct(mixer, inputs, mask):
            break
    return mixer, inputs, mask


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
        out, state = mixer(AttentionCall(*piece, scaling, part, state=state, needs_state=mixer.shape.causal))
        outputs.append(out)
    return torch.cat(outputs, dim=2), state


def distinct(mixer, inputs, mask):
    """Whether the keys' log-scales are so far apart that no rounding changes which are the largest."""
    if not mixer.hybrid.exact_keys:
        return True
    found = mixer.mapped(*inputs[:2], scaling=inputs[0].shape[-1] ** -0.5, key_padding_mask=mask)[1].log_scale
    if found is None or found.shape[-1] == 1:
        return True
    gaps = found.detach().sort(dim=-1).values.diff()
    return bool((gaps[gaps > 0] > 2e-6 * found.abs().max()).all())


RUN = [pytest.param(seed, marks=() if seed < 20 else pytest.mark.slow) for seed in range(2_000)]


@pytest.mark.parametrize("seed", RUN)
def test_random_layers(switch, watch, seed):
    mixer, inputs, mask = draw(seed)
    count, causal = inputs[0].shape[2], mixer.shape.causal
    real = slice(None) if mask is None else mask[:, None].expand(-1, 4, -1)
    calls = watch("window", "attend", "window_gradient", "gradients", "window_step", "step")
    ways = ["window", "window_gradient"] if mixer.window else ["attend", "gradients"]
    written_out = gradients_in_double(mixer, mask, inputs[0].shape[-1] ** -0.5)
    names = ["out", "q", "k", "v", *(name for name, _ in mixer.named_parameters())]
    for on in (True, False):
        switch(on)
        out, towards, found = attend(mixer, *inputs, mask)
        assert calls == (ways if on else [])
        if on:
            terms = sum(x.shape[-1] for x in (inputs[0], inputs[2])) + mixer.feature_dim + UNITS + 8 * count
            exact, moves = deviation(written_out, [*inputs, towards, *mixer.parameters()])
            exact[0], out = exact[0][real], out[real]
            bounds = [allowed(move, terms) for move in moves]
        else:
            out = out[real]
        for name, ours, wanted, bound in zip(names, (out, *found), exact, bounds, strict=True):
            assert ((ours - wanted).abs() <= bound).all(), (name, on)
        calls.clear()
        # Causally in steps of one token, and what is left of them.
        start = max(1, count - seed % 40) if causal else count
        out, state = decode(mixer, inputs, mask, start)
        steps = ["window_step" if mixer.window else "step"] * (count - start)
        assert calls == (["window" if mixer.window else "attend", *steps] if on else [])
        calls.clear()
        assert ((out[real] - exact[0]).abs() <= bounds[0]).all()
        if on:
            after = state
    if causal:
        compare_states(after, state)


def compare_states(ours, theirs):
    """Of the same form; and the same exact keys in the same order."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape and tensor.dtype == theirs[name].dtype, name
        assert tensor.is_contiguous(), name
    if "kept_mask" in ours:
        there = ours["kept_mask"]
        assert torch.equal(there, theirs["kept_mask"])
        for name in ("kept_k", "kept_v"):
            mine, wanted = (x[name] * there[:, None, :, None] for x in (ours, theirs))
            assert torch.equal(mine, wanted), name


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("special", [None, torch.nan, torch.inf, -torch.inf], ids=str)
def test_of_equal_keys_the_oldest_are_exact(switch, special, causal):
    """Decoded as well, from any place; and what is no number is the smallest."""
    mixer = learned("hedgehog", {}, causal=causal, window=3, sinks=1, exact_keys=4, scale="linear")
    inputs, generator = tokens(70), torch.Generator().manual_seed(5)
    with torch.no_grad():
        mixer.key_scale.weight.zero_()[:, 0] = 1.0
    inputs[1][..., 0] = torch.randint(0, 4, inputs[1].shape[:3], generator=generator).float()
    if special is not None:
        mixer.key_scale.forward = lambda k: torch.where(k[..., 0] == 3.0, special, k[..., 0])
    priority = mixer.key_scale(inputs[1]).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).tolist()
    for start in (70, 2, 40) if causal and special is None else (70,):
        found = []
        for on in (True, False):
            switch(on)
            out, state = decode(mixer, inputs, None, start)
            found.append(out)
            if not causal:
                continue
            for b in range(2):
                for h in range(2):
                    # By hand: of the keys that left, sorted by log-scale and age, the first four, in their order.
                    row = sorted(range(1, 67), key=lambda j: (-priority[b][h][j], j))[:4]
                    assert torch.equal(state["kept_k"][b, h], inputs[1][b, h, sorted(row)]), (on, start)
        if special is None:
            torch.testing.assert_close(*found, rtol=0.0, atol=1e-5)
