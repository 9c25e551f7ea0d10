"""What holds for every kernel with every addition that it takes: weights, and numbers that are none."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.kernel_cases import ADDED, DIM, WIDTH, make_inputs, make_mixer, naive, run, stepwise, stirred
from support.numerics_cases import ENGINES

from linearize.attention.factory import state_bytes
from linearize.core.registry import kernel_info
from linearize.ops.causal import parallel_sums

TOKENS = 20
NAMES = ("info", "arguments", "direction", "hybrid")
MATRIX = pytest.mark.parametrize(NAMES, ADDED)
CAUSAL = pytest.mark.parametrize(NAMES, [case for case in ADDED if case.values[2] == "causal"])


def padding(tokens=TOKENS):
    """A row padded on the left and in the middle, one on the right."""
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[0, :5] = mask[0, 9:12] = mask[1, -7:] = False
    return mask


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@ENGINES
@MATRIX
@torch.no_grad()
@pytest.mark.sampled("pairs", "info", "hybrid", "direction", "native", "padded")
def test_weights_are_those_of_the_output(switch, info, arguments, direction, hybrid, native, padded):
    switch(native)
    mixer, mask = stirred(info, arguments, direction, **hybrid), padding() if padded else None
    inputs = make_inputs(TOKENS)
    real = padding()[:, None].expand(2, inputs[0].shape[1], -1) if padded else slice(None)
    out, want = run(mixer, *inputs, mask)[0][real], naive(mixer, *inputs, mask)[real]
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-4 * max(1.0, float(want.abs().max())))


GARBAGE = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])


def spoiled(x, where, garbage=GARBAGE):
    """Put what no number should be into some tokens [B, T] of x [B, H, T, D]."""
    return torch.where(where[:, None, :, None], garbage.repeat(x.numel())[: x.numel()].view_as(x), x)


def everything(mixer, inputs, mask):
    """Outputs and gradients at tokens, with and without a state: at once, and step by step behind a first part."""
    real = mask[:, None].expand(2, inputs[0].shape[1], -1)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, _ = run(mixer, *leaves, mask)
    gradients = torch.autograd.grad(out[real].square().sum(), leaves)
    results = [out[real].detach(), *(x.transpose(1, 2)[mask] for x in gradients)]
    with torch.no_grad():
        if mixer.shape.causal and mixer.info.streamable:
            results += [run(mixer, *inputs, mask)[0][real]]
            steps, state = stepwise(mixer, *inputs, mask, prefill=11)
            results += [steps[real], *state.values()]
    return results


@ENGINES
@MATRIX
@pytest.mark.sampled("values", "info")
@pytest.mark.sampled("pairs", "hybrid", "direction", "native")
def test_what_padding_holds_reaches_no_token(switch, info, arguments, direction, hybrid, native):
    switch(native)
    mixer, mask = stirred(info, arguments, direction, **hybrid), padding()
    clean = make_inputs(TOKENS)
    want, got = (everything(mixer, inputs, mask) for inputs in (clean, [spoiled(x, ~mask) for x in clean]))
    for one, other in zip(got, want, strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("traced", [False, True], ids=["", "at once"])
@ENGINES
@CAUSAL
@torch.no_grad()
@pytest.mark.sampled("values", "info")
@pytest.mark.sampled("pairs", "hybrid", "which", "native", "traced")
def test_no_row_sees_what_a_later_token_holds(
    monkeypatch, switch, info, arguments, direction, hybrid, native, traced, which
):
    switch(native)
    mixer, inputs, at = stirred(info, arguments, direction, **hybrid), make_inputs(80), 70
    if traced:
        # As on a GPU and in traced graphs: all chunks at once, and nothing is read.
        monkeypatch.setattr("linearize.ops.causal.causal_sums", parallel_sums)
        monkeypatch.setattr("linearize.ops.window_causal.causal_sums", parallel_sums)
    where = torch.zeros(2, 80, dtype=torch.bool)
    where[1, at] = True
    given = dict(zip("qkv", inputs, strict=True))
    _, start = run(mixer, *(x[:, :, :9] for x in inputs), needs_state=True) if info.streamable else (None, None)
    spoilt = {**given, which: spoiled(given[which], where, GARBAGE[:3])}

    def outputs(inputs):
        found = [run(mixer, *inputs.values())[0]]
        if start is not None:
            before = {name: x.clone() for name, x in start.items()}
            rest = (x[:, :, 9:] for x in inputs.values())
            found.append(run(mixer, *rest, state=before, needs_state=True)[0])
        return found

    for one, other in zip(outputs(spoilt), outputs(given), strict=True):
        first = at - given["q"].shape[2] + one.shape[2]
        assert torch.equal(one[:, :, :first], other[:, :, :first])
        assert torch.equal(one[0], other[0])
        assert one[1, :, first].isnan().any()


PIECES = (0, 1, 2, 8, 9, 10, 11, 17, 18, 19, 20)
"""Where the calls of the next test begin and end: single tokens and several, before and after the window is full."""


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@ENGINES
@CAUSAL
@torch.no_grad()
@pytest.mark.sampled("values", "info")
@pytest.mark.sampled("pairs", "hybrid", "native", "padded")
def test_pieces_equal_the_whole(switch, info, arguments, direction, hybrid, native, padded):
    """Rows of different lengths, and calls of one or more tokens after a state, which maps keys when they leave it."""
    if not info.streamable:
        pytest.skip("its state grows")
    switch(native)
    mixer, mask, inputs = stirred(info, arguments, direction, **hybrid), padding() if padded else None, make_inputs(20)
    want, outputs, state = run(mixer, *inputs, mask)[0], [], None
    for start, end in itertools.pairwise(PIECES):
        part = None if mask is None else mask[:, start:end]
        out, state = run(mixer, *(x[:, :, start:end] for x in inputs), part, state=state, needs_state=True)
        outputs.append(out)
    real = padding()[:, None].expand(2, inputs[0].shape[1], -1) if padded else slice(None)
    got, want = torch.cat(outputs, dim=2)[real], want[real]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * max(1.0, float(want.abs().max())))
    # The linear part's sums are all that has the size of features.
    assert {x.shape[3] for name, x in state.items() if x.ndim == 4 and name not in ("kv", "channels")} <= {DIM, WIDTH}


@ENGINES
@pytest.mark.parametrize("exact", [0, 16])
@torch.no_grad()
def test_the_numbers_of_a_state(switch, exact, native):
    """Of one row: sums, and keys and values of the window, sinks and exact keys; it was 83,587 with features."""
    switch(native)
    features, dim, heads, window, sinks = 128, 64, 2, 128, 4
    hybrid = {"window": window, "sinks": sinks, "scale": "linear", "exact_keys": exact}
    mixer = make_mixer(kernel_info("hedgehog"), causal=True, dim=dim, width=dim, **hybrid)
    state = run(mixer, *make_inputs(3, batch=1, dim=dim, width=dim), needs_state=True)[1]
    held, places = heads * 2 * dim, window + sinks + exact
    floats = heads * (features * (dim + 1) + 1) + places * held + exact * heads
    assert sum(x.numel() for x in state.values()) == floats + window + exact + 1
    assert exact or floats + window + 1 == 50_563 <= 51_000
    # Masks have one byte for a token, and the count of tokens eight.
    assert state_bytes("hedgehog", {}, mixer.shape, mixer.hybrid) == 4 * floats + window + exact + 8
