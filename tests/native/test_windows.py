"""Softmax windows joined to kernels in the native op: outputs and the state after equal those of the ops in PyTorch."""

import random

import pytest
import torch
from support.native_cases import WINDOW_CASES, D, V, close, learned, padding, tokens
from support.rounding import UNIT, allowed, deviation, gradients_in_double

from linearize.attention.call import AttentionCall
from linearize.attention.native import engine
from linearize.attention.native.calls import Engine

SCALING = D**-0.5
LENGTHS = (1, 15, 48, 49, 200)
"""Tokens: within a tile of the op (48), one of them, one more, several."""
GROUPS = pytest.mark.parametrize("key_heads", [2, 4], ids=["grouped", "ungrouped"])
DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


@torch.no_grad()
def attend(mixer, q, k, v, mask=None):
    return mixer(AttentionCall(q, k, v, q.shape[-1] ** -0.5, mask, needs_state=mixer.shape.causal))


def both_ways(switch, mixer, inputs, mask=None):
    found = []
    for on in (True, False):
        switch(on)
        found.append(attend(mixer, *inputs, mask))
    return found


def of_real_tokens(out, mask):
    return out if mask is None else out[mask[:, None].expand(-1, out.shape[1], -1)]


@GROUPS
@DIRECTIONS
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (4, 2), (7, 40), (64, 4), (130, 0)])
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(("name", "args"), WINDOW_CASES)
@pytest.mark.sampled("values")
def test_equals_the_ops_in_pytorch(switch, name, args, masked, window, sinks, causal, key_heads):
    mixer = learned(name, args, causal=causal, key_heads=key_heads, window=window, sinks=sinks)
    for count in LENGTHS:
        mask = padding(count) if masked else None
        (ours, after), (theirs, wanted) = both_ways(switch, mixer, tokens(count, key_heads=key_heads), mask)
        # Signed weights: sums near zero make outputs, and rounding, large.
        tolerance = 3e-6 if mixer.positive else 3e-4
        close(of_real_tokens(ours, mask), of_real_tokens(theirs, mask), tolerance)
        if causal:
            assert after.keys() == wanted.keys()
            for key, tensor in after.items():
                close(tensor.float(), wanted[key].float())
                assert tensor.dtype == wanted[key].dtype and tensor.is_contiguous(), key
        else:
            assert after is None and wanted is None


@GROUPS
@DIRECTIONS
@pytest.mark.parametrize("value", [V, 64, 3, 65])
@pytest.mark.parametrize("size", [D, 1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.sampled("values")
def test_sizes_and_types(switch, dtype, size, value, causal, key_heads):
    sizes = {"size": size, "value": value, "key_heads": key_heads}
    mixer = learned("hedgehog", {}, causal=causal, window=6, sinks=2, **sizes)
    inputs, mask = tokens(110, dtype=dtype, **sizes), padding(110)
    (ours, after), (theirs, wanted) = both_ways(switch, mixer, inputs, mask)
    close(of_real_tokens(ours, mask), of_real_tokens(theirs, mask), 3e-6 if dtype == torch.float32 else 2**-8)
    for key, tensor in (after or {}).items():
        if key in ("kv", "log_scale"):
            close(tensor, wanted[key])
        else:
            assert torch.equal(tensor, wanted[key]), key


def gradients(mixer, inputs, mask=None):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, _ = mixer(AttentionCall(*leaves, SCALING, mask))
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    weights = weights if mask is None else weights * mask[:, None, :, None]
    return torch.autograd.grad((out.float() * weights).sum(), [*leaves, *mixer.parameters()], allow_unused=True)


@GROUPS
@DIRECTIONS
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (4, 2), (7, 40), (64, 4), (130, 0)])
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(("name", "args"), WINDOW_CASES)
@pytest.mark.sampled("values")
def test_gradients_equal_those_of_the_ops_in_pytorch(switch, name, args, masked, window, sinks, causal, key_heads):
    """Of q, k, v and of every weight of the maps."""
    mixer = learned(name, args, causal=causal, key_heads=key_heads, window=window, sinks=sinks)
    for count in (1, 49, 130):
        inputs, mask, found = tokens(count, key_heads=key_heads), padding(count) if masked else None, []
        for on in (True, False):
            switch(on)
            found.append(gradients(mixer, inputs, mask))
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                close(ours, theirs, 2e-5 if mixer.positive else 3e-3)


@torch.no_grad()
def random_case(seed):
    """Draw a mixer, inputs, mask and gradient: holes in the mask, sinks beyond the row, single tokens, odd sizes."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    name, args = dice.choice(WINDOW_CASES)
    heads, batch, size, value = (
        dice.choice(some) for some in ((1, 2, 3), (1, 2), (1, 7, 16, 20, 40), (1, 3, 16, 24, 64, 65))
    )
    key_heads, causal = dice.choice([n for n in range(1, heads + 1) if heads % n == 0]), dice.random() < 0.5
    count, window, sinks = (dice.choice(some) for some in ((1, 1, 2, 7, 47, 50, 100), (1, 2, 8, 33), (0, 0, 1, 5, 40)))
    sizes = {"heads": heads, "key_heads": key_heads, "size": size, "value": value}
    mixer = learned(name, args, causal=causal, window=window, sinks=sinks, **sizes)
    q, k, v = (dice.choice((0.5, 1.0, 4.0)) * x for x in tokens(count, batch=batch, **sizes))
    mask = torch.rand(batch, count, generator=generator) < dice.choice((0.2, 0.7, 0.95))
    mask = mask if dice.random() < 0.6 else None
    towards = torch.randn(batch, heads, count, value, generator=generator)
    towards = towards if mask is None else towards * mask[:, None, :, None]
    return mixer, (q, k, v), mask, towards


def check_random_case(switch, seed):
    """The output and all gradients, natively and in PyTorch: both against written-out weights in fp64."""
    mixer, inputs, mask, towards = random_case(seed)
    scaling, count = inputs[0].shape[-1] ** -0.5, inputs[0].shape[2]
    terms = inputs[0].shape[-1] + mixer.feature_dim + inputs[2].shape[-1] + 16 * count
    # At every size of rounding up to the bound: a key may change sides at relu's kink, or at a sum that is held.
    written_out = gradients_in_double(mixer, mask, scaling)
    given = [*inputs, towards, *mixer.parameters()]
    exact, moves = deviation(written_out, given)
    _, far = deviation(written_out, given, roundings=allowed(1.0, terms))
    largest = max(x.abs().max().item() for x in exact[1:])
    real = slice(None) if mask is None else mask[:, None].expand(towards.shape[:3])
    for on in (True, False):
        switch(on)
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, _ = mixer(AttentionCall(*leaves, scaling, mask))
        asked = [*leaves, *mixer.parameters()]
        found = torch.autograd.grad(out, asked, towards, allow_unused=True, materialize_grads=True)
        for number, (one, wanted, move, whole) in enumerate(zip((out, *found), exact, moves, far, strict=True)):
            difference = (one.detach().double() - wanted)[real if number == 0 else slice(None)]
            # An idle weight's gradient is exactly 0 as written out; in another order, what terms leave that cancel.
            # A key on the other side of a kink moves the result by the jump; rounding comes on top of that.
            limit = allowed(move or UNIT * largest, terms) + whole
            assert torch.isfinite(one).all() or mask is not None
            assert not difference.numel() or difference.abs().max() <= limit, (seed, on, number)


@pytest.mark.parametrize("block", [pytest.param(n, marks=[pytest.mark.slow] * (n > 0)) for n in range(10)])
def test_random_cases(switch, block):
    for seed in range(10 * block, 10 * block + 10):
        check_random_case(switch, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(1, 20))
def test_many_random_cases(switch, block):
    for seed in range(100 * block, 100 * block + 100):
        check_random_case(switch, seed)


@DIRECTIONS
def test_padding_changes_no_gradient(switch, causal):
    """Whatever it holds."""
    mixer, mask = learned("hedgehog", {}, causal=causal, window=6, sinks=3), padding(100)
    inputs = tokens(100)
    none = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
    for ours, theirs in zip(gradients(mixer, none, mask), gradients(mixer, inputs, mask), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


@DIRECTIONS
def test_gradients_in_bfloat16(switch, causal):
    mixer, found = learned("hedgehog", {}, causal=causal, window=8, sinks=2), []
    for on in (True, False):
        switch(on)
        found.append(gradients(mixer, tokens(100, dtype=torch.bfloat16)))
    for ours, theirs in zip(*found, strict=True):
        # The output, which the gradient starts from, is rounded to bf16.
        close(ours, theirs, 2e-2 * theirs.abs().max().item())


@DIRECTIONS
def test_gradients_where_parts_are_of_very_different_size(switch, causal):
    mixer = learned("hedgehog", {}, causal=causal, window=4, sinks=1, scale="linear")
    for size in (1e-3, 30.0, 300.0):
        q, k, v = tokens(120)
        found = []
        for on in (True, False):
            switch(on)
            found.append(gradients(mixer, [q * size, k, v]))
        for ours, theirs in zip(*found, strict=True):
            assert torch.isfinite(ours).all()
            close(ours, theirs, max(2e-5, 1e-4 * size))


def test_it_is_what_runs(monkeypatch, switch):
    """With a gradient too; through states PyTorch has it."""
    calls, window = [], Engine.window
    monkeypatch.setattr(Engine, "window", lambda *args, **more: calls.append(1) or window(*args, **more))
    for causal in (False, True):
        mixer = learned("flexformer_n", {}, causal=causal, window=8, sinks=2)
        attend(mixer, *tokens(30))
        gradients(mixer, tokens(30))
    assert len(calls) == 4
    mixer(AttentionCall(*tokens(30), SCALING, needs_state=True))
    assert len(calls) == 4
    for causal in (False, True):
        gradients(learned("hedgehog", {"activation": "exp"}, causal=causal, window=8), tokens(30))
    assert len(calls) == 6


@pytest.mark.parametrize("climb", [3.0, 300.0])
def test_gradients_of_key_scales_far_apart(switch, watch, climb):
    """Where one scale for all keys would leave early queries nothing, the ops in PyTorch are differentiated."""
    calls, found = watch("window_gradient"), []
    mixer, (q, k, v) = learned("hedgehog", {}, causal=True, window=4, sinks=1, scale="linear"), tokens(120)
    k[..., 0] = torch.linspace(-1, 1, 120)
    with torch.no_grad():
        mixer.key_scale.weight.zero_()[:, 0] = climb
    for on in (True, False):
        switch(on)
        found.append(gradients(mixer, (q, k, v)))
    assert calls == (["window_gradient"] if climb == 3.0 else [])
    for ours, theirs in zip(*found, strict=True):
        assert torch.isfinite(ours).all()
        close(ours, theirs, 2e-5)


def test_no_memory_for_a_gradient_is_said(monkeypatch, switch):
    monkeypatch.setattr(engine().library, "linearize_window_gradient", lambda *_: 1)
    with pytest.raises(MemoryError, match="no memory"):
        gradients(learned("hedgehog", {}, window=4), tokens(30))


@GROUPS
@pytest.mark.parametrize(("name", "args"), [("hedgehog", {}), ("hedgehog", {"activation": "exp"}), ("luna", {})])
@pytest.mark.parametrize("window", [1, 5, 60])
def test_later_tokens_do_not_change_a_bit(switch, window, name, args, key_heads):
    mixer = learned(name, args, causal=True, key_heads=key_heads, window=window, sinks=2)
    q, k, v = tokens(150, key_heads=key_heads)
    before, _ = attend(mixer, q, k, v)
    for x in (q, k, v):
        x[:, :, 101:] *= -30.0
    after, _ = attend(mixer, q, k, v)
    assert torch.equal(before[:, :, :101], after[:, :, :101])
    assert not torch.equal(before[:, :, 101:], after[:, :, 101:])


@DIRECTIONS
def test_padding_does_not_change_real_tokens(switch, causal):
    """Not to the bit: where its numbers are is not what they are."""
    mixer = learned("hedgehog", {}, causal=causal, window=6, sinks=3)
    q, k, v = tokens(100)
    short, _ = attend(mixer, *(x[:, :, :70] for x in (q, k, v)))
    mask = torch.arange(100).expand(2, -1) < 70
    padded, _ = attend(mixer, *(x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (q, k, v)), mask)
    close(padded[:, :, :70], short)
    left, _ = attend(mixer, *(x.roll(30, dims=2) for x in (q, k, v)), mask.roll(30, dims=1))
    close(left[:, :, 30:], short)


@DIRECTIONS
def test_parts_of_very_different_size(switch, causal):
    mixer = learned("hedgehog", {"activation": "exp"}, causal=causal, window=4, sinks=1)
    for size in (1e-3, 30.0, 300.0):
        q, k, v = tokens(120)
        (ours, _), (theirs, _) = both_ways(switch, mixer, [q * size, k, v])
        assert torch.isfinite(ours).all()
        # Scores of thousands: their own rounding, times e.
        close(ours, theirs, max(3e-6, 1e-5 * size))
    nothing = torch.zeros(2, 120, dtype=torch.bool)
    assert (attend(mixer, *tokens(120), nothing)[0] == 0).all()


@DIRECTIONS
def test_no_number_stays_none(switch, causal):
    mixer = learned("hedgehog", {}, causal=causal, window=4)
    for which in range(3):
        inputs = tokens(120)
        inputs[which][0, 0, 60] = torch.nan
        (ours, _), (theirs, _) = both_ways(switch, mixer, inputs)
        assert ours.isnan().any()
        assert (ours.isnan() | ~theirs.isnan())[:, :, 60:].all()


@DIRECTIONS
def test_threads_make_no_difference(switch, causal):
    mixer = learned("hedgehog", {}, heads=6, key_heads=3, causal=causal, window=8, sinks=2)
    inputs, before, found = tokens(200, heads=6, key_heads=3), torch.get_num_threads(), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(attend(mixer, *inputs)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_no_memory_is_said(monkeypatch, switch):
    mixer = learned("hedgehog", {}, window=4)
    monkeypatch.setattr(engine().library, "linearize_window", lambda *_: 1)
    with pytest.raises(MemoryError, match="no memory"):
        attend(mixer, *tokens(30))
