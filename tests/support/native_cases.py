"""Mixers, inputs and tolerances that the tests of the native op share."""

import torch

from linearize.attention.factory import build_mixer
from linearize.attention.shape import HeadShape
from linearize.core.registry import Hybrid

PAPER = {"form": "paper", "floor": 0.0}
PLAIN = {"magnitude": False}
OPTIONS = {
    "flexformer_n": (
        *({}, {"frequencies": 5}, {"tied": False}, PLAIN, {"form": "damped", "floor": 0.0}),
        *(PAPER, PAPER | {"frequencies": 5}, PAPER | {"tied": False}),
    ),
    "flexformer_s": (PAPER, PAPER | {"frequencies": 21}),
    "hedgehog": ({}, {"activation": "exp"}, {"bias": False}, {"tied": False}),
    "luna": (
        # Random initial functions: unlike exponentials, they have zeros, and no features of 1e4.
        {"start": "paper"},
        {"start": "paper", "shared_heads": True, "hidden": 5},
        {"start": "paper", "shared_mlp": True, "projections": 3, "channels": 1},
        {"start": "paper", "shared_heads": True, "tied": False},
    ),
    "t2r": ({}, {"features": 70}),
}
D, V = 20, 24
CASES = [(name, args) for name in sorted(OPTIONS) for args in OPTIONS[name]]
WINDOW_CASES = [*CASES, ("none", {})]
"""The same with what needs a window: no kernel."""


def learned(name, args, *, causal=False, heads=4, key_heads=2, size=D, value=V, **window):
    """A mixer whose weights are not those of the start."""
    mixer = build_mixer(name, args, HeadShape(heads, key_heads, size, value, causal), Hybrid(**window))
    mixer.reset_parameters(torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return mixer.eval()


def tokens(count, *, batch=2, heads=4, key_heads=2, size=D, value=V, dtype=torch.float32, seed=3):
    """Inputs as models hand them over: the heads of a token side by side in memory."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, size), (key_heads, size), (key_heads, value))
    return [torch.randn(batch, count, n, d, generator=generator).to(dtype).transpose(1, 2) for n, d in shapes]


def padding(count, batch=2):
    mask = torch.rand(batch, count, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[:, 0] = True
    return mask


def close(ours, theirs, tolerance=3e-6):
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    limit = tolerance * max(1.0, theirs.abs().max().item())
    assert (ours.float() - theirs.float()).abs().max().item() <= limit
