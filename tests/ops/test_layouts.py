"""Every op and mixer reads tensors however they lie in memory: transposed, strided, expanded."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import ADDED, decode, make_inputs, run, stirred
from support.numerics_cases import ENGINES

from linearize.attention.backends.causal import attend_causally
from linearize.ops import (
    Blocks,
    Mapped,
    Window,
    advance,
    bidirectional_attention,
    block_attention,
    causal_attention,
    floored_attention,
    recurrent_attention,
    window_attention,
)

TOKENS = 70


def transposed(x):
    """Heads and tokens swapped in memory, as projections leave them."""
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def strided(x):
    """Every other number of a larger tensor."""
    return torch.stack([x, torch.full_like(x, 7)], dim=-1).flatten(-2)[..., ::2]


def moved(x):
    """The batch last in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def expanded(x):
    """One row for the whole batch."""
    return x[:1].expand_as(x)


LAYOUTS = pytest.mark.parametrize("layout", [transposed, strided, moved, expanded])


def windowed(q, k, v, *, log_scale=None, key_padding_mask=None):
    sides = Mapped(q, q), Mapped(k, k, log_scale)
    return window_attention(*sides, v, Window(5, 0.1, causal=True), key_padding_mask=key_padding_mask)


def blockwise(q, k, v, *, log_scale=None, key_padding_mask=None):
    return block_attention(q, k, v, Blocks(4, causal=True), scaling=0.1, key_padding_mask=key_padding_mask)


OPS = {
    "bidirectional": bidirectional_attention,
    "causal": causal_attention,
    "native": lambda *x, **more: (attend_causally(*x, **more), None),
    "recurrent": recurrent_attention,
    "floored": lambda *x, **more: floored_attention(*x, 0.1, op=causal_attention, **more),
    "window": windowed,
    "block": blockwise,
}


def features(tokens, layout=lambda x: x):
    generator = torch.Generator().manual_seed(0)
    phi_q, phi_k = (torch.rand(2, n, tokens, 6, generator=generator) for n in (4, 2))
    v, scale = (torch.randn(2, 2, tokens, *size, generator=generator) for size in ((6,), ()))
    mask = torch.rand(2, tokens, generator=generator) > 0.2
    return [layout(x) for x in (phi_q, phi_k, v, scale, mask)]


def check(call, layout):
    """Outputs, and gradients where there are any, are those of contiguous copies."""
    for one, other in zip(call(layout), call(lambda x: layout(x).contiguous()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(1.0, float(other.abs().max())))


@LAYOUTS
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", OPS)
def test_ops(switch, name, masked, layout):
    def call(layout):
        *leaves, mask = features(TOKENS, layout)
        leaves = [x.detach().requires_grad_() for x in leaves]
        out, _ = OPS[name](*leaves[:3], log_scale=leaves[3], key_padding_mask=mask if masked else None)
        used = leaves[:3] if name == "block" else leaves
        return out.detach(), *torch.autograd.grad(out.square().sum(), used)

    check(call, layout)


@LAYOUTS
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@torch.no_grad()
def test_a_step(scaled, masked, layout):
    """Log-scales that a layer learned lie transposed: two rows or more could not be decoded."""

    def call(layout):
        *given, scale, mask = features(1, layout)
        options = {"log_scale": scale if scaled else None, "key_padding_mask": mask if masked else None}
        *_, before = causal_attention(*features(9)[:3], log_scale=features(9)[3] if scaled else None)
        out, after = advance(*given, type(before)(*(layout(x).clone() for x in before)), **options)
        return out, *after

    check(call, layout)


@LAYOUTS
@ENGINES
@pytest.mark.parametrize(("info", "arguments", "direction", "hybrid"), ADDED)
@pytest.mark.sampled("values")
@pytest.mark.sampled("pairs", "direction", "hybrid", "layout", "native")
def test_mixers(switch, info, arguments, direction, hybrid, layout, native):
    switch(native)
    mixer = stirred(info, arguments, direction, **hybrid)
    mask = torch.tensor([[True] * 9 + [False] * 4 + [True] * 7]).expand(2, -1)

    def call(layout):
        inputs = [layout(x).requires_grad_() for x in make_inputs(20)]
        # Rows of padding may hold anything.
        out = run(mixer, *inputs, mask)[0] * mask[:, None, :, None]
        results = [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]
        if direction == "causal" and info.streamable:
            with torch.no_grad():
                _, state = run(mixer, *inputs, mask, needs_state=True)
                for number in (1, 2):
                    token = [layout(x) for x in make_inputs(1, seed=number)]
                    out, state = decode(mixer, *token, mask[:, :1], state=state)
                    results.append(out)
        return results

    check(call, layout)
