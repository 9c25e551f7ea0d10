"""NaN in, NaN out, natively as in PyTorch: never a finite number made of one."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import HEADS, KEY_HEADS, decode, make_inputs, make_mixer, run, stepwise
from support.numerics_cases import ENGINES, MIXERS

from linearize.attention.native.build import native_kernels
from linearize.core.registry import kernel_info

TOKENS, AT = 70, 52
GROUP = HEADS // KEY_HEADS


def reached(mixer, at):
    """Which queries [T] see the key of token `at`."""
    tokens = torch.arange(TOKENS)
    seen = tokens >= at if mixer.shape.causal else torch.ones(TOKENS, dtype=torch.bool)
    block = getattr(mixer.config, "block", None)
    return seen if block is None else seen & (tokens // block == at // block)


@ENGINES
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize(("info", "arguments", "direction", "window"), MIXERS)
@torch.no_grad()
@pytest.mark.sampled("pairs")
def test_inputs(switch, info, arguments, direction, window, which, native):
    """One number of one head of one batch entry: what depends on it is NaN, nothing else is another number."""
    switch(native)
    mixer = make_mixer(info, arguments, causal=direction == "causal", window=window)
    inputs = dict(zip("qkv", make_inputs(TOKENS), strict=True))
    clean, _ = run(mixer, *inputs.values())
    inputs[which][1, 1, AT, 2] = float("nan")
    out, _ = run(mixer, *inputs.values())
    heads = [1] if which == "q" else list(range(GROUP, 2 * GROUP))
    rows = torch.arange(TOKENS) == AT if which == "q" else reached(mixer, AT)
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[1, heads] = rows[:, None]
    if which == "v":
        touched[..., :2] = touched[..., 3:] = False
    assert out[touched].isnan().all()
    # No other row is, and none becomes another number. A norm of the output spreads it over the row, and so does the
    # shift that the parts of a window share.
    assert torch.equal(out.isnan().any(dim=-1), touched.any(dim=-1))
    assert mixer.output is not None or window is not None or torch.equal(out.isnan(), touched)
    others = ~touched.any(dim=-1)
    assert torch.equal(out[others], clean[others])
    bound = 0.0 if window is None else 1e-5
    torch.testing.assert_close(out[~out.isnan()], clean[~out.isnan()], rtol=bound, atol=bound)
    assert not out[0].isnan().any() and not out[1, heads[0] - 1].isnan().any()


@ENGINES
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hybrid", [{}, {"sinks": 2}, {"routed_blocks": 2}], ids=["", "sinks", "routed"])
@pytest.mark.parametrize("absurd", [float("nan"), float("inf")])
@torch.no_grad()
def test_without_a_kernel_keys_outside_the_window_do_not_count(switch, absurd, hybrid, causal, native):
    """They have no weight, so no number of theirs reaches a row, in decoding either."""
    switch(native)
    mixer = make_mixer(kernel_info("none"), causal=causal, window=5, **hybrid)
    q, k, v = make_inputs(TOKENS)
    clean, _ = run(mixer, q, k, v)
    # In all channels, so that no query chooses its block.
    k[1, 1, AT] = absurd * torch.tensor([1, -1]).repeat(k.shape[3] // 2)
    distance = torch.arange(TOKENS) - AT
    near = (distance >= 0) & (distance < 5) if causal else distance.abs() <= 2
    touched = torch.zeros(clean.shape[:3], dtype=torch.bool)
    touched[1, GROUP : 2 * GROUP] = near
    for out in [run(mixer, q, k, v)[0], *([stepwise(mixer, q, k, v, prefill=40)[0]] if causal else [])]:
        assert torch.equal(out.isnan().any(dim=-1), touched)
        if "routed_blocks" not in hybrid:
            torch.testing.assert_close(out[~touched], clean[~touched])


@pytest.mark.parametrize(("info", "arguments", "direction", "window"), MIXERS)
@torch.no_grad()
def test_weights(switch, info, arguments, direction, window):
    """One number of one of the kernel's tensors: all that depends on it is NaN, in decoding too, both ways alike."""
    mixer = make_mixer(info, arguments, causal=direction == "causal", window=window)
    inputs, token = make_inputs(TOKENS), make_inputs(1, seed=1)

    def outputs():
        out, state = run(mixer, *inputs, needs_state=mixer.shape.causal)
        if not (mixer.shape.causal and info.streamable):
            return [out]
        return [out, decode(mixer, *token, state=state)[0]]

    switch(False)
    clean = outputs()
    tensors = [*mixer.named_parameters(), *mixer.named_buffers()]
    for name, tensor in [(name, tensor) for name, tensor in tensors if name != "inputs.batches"]:
        for place in {0, tensor[-1].numel() - 1}:
            numbers = tensor[-1].view(-1)
            kept = numbers[place].item()
            found = []
            for value, native in ((1.5 * kept + 0.1, False), (float("nan"), False), (float("nan"), True)):
                numbers[place] = value
                switch(native)
                found.append(outputs())
            numbers[place] = kept
            for now, other, *both in zip(clean, *found, strict=True):
                depends = (now - other).abs() > 1e-4 * (1 + now.abs())
                for one in both:
                    assert one[depends].isnan().all(), (name, place)
                    torch.testing.assert_close(one[~one.isnan()], now[~one.isnan()], rtol=1e-3, atol=1e-4)
                # Rows whose keys are all inside the window have no use for features: natively they stay numbers.
                assert not (both[1].isnan() & ~both[0].isnan()).any(), (name, place)
                assert window is not None or torch.equal(both[0].isnan(), both[1].isnan()), (name, place)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", native_kernels())
@pytest.mark.parametrize("which", ["q", "k", "v", "weights"])
@pytest.mark.sampled("pairs")
def test_gradients(switch, name, causal, which):
    """Where PyTorch's gradients are NaN, native ones are; where those are numbers, these are NaN or the same."""
    mixer = make_mixer(kernel_info(name), causal=causal)
    inputs = dict(zip("qkv", make_inputs(TOKENS), strict=True))
    with torch.no_grad():
        if which == "weights":
            next(mixer.parameters())[-1].view(-1)[0] = float("nan")
        else:
            inputs[which][1, 1, AT, 2] = float("nan")
    found = []
    for native in (False, True):
        switch(native)
        leaves = [x.detach().requires_grad_() for x in inputs.values()]
        out, _ = run(mixer, *leaves)
        found.append(torch.autograd.grad(out.square().sum(), [*leaves, *mixer.parameters()]))
    for number, (theirs, ours) in enumerate(zip(*found, strict=True)):
        assert ours.isnan().any()
        if number < 3:
            # What a query sees lies before it. In chunks of 64 and in tiles of 48 tokens, other rows fall with these.
            rows = slice(AT + 1) if which == "q" and causal and number else slice(AT, None)
            assert theirs[:, :, rows].isnan().any()
            assert ours[:, :, rows][theirs[:, :, rows].isnan()].isnan().all()
        else:
            # By heads: luna's functions in PyTorch are sums over segments, natively over units.
            assert torch.equal(
                ours.reshape(len(ours), -1).isnan().any(1), theirs.reshape(len(theirs), -1).isnan().any(1)
            )
        both = ~ours.isnan() & ~theirs.isnan()
        torch.testing.assert_close(ours[both], theirs[both], rtol=1e-3, atol=1e-4)
