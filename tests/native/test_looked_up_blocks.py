"""Routed blocks in the native op: its choices and outputs equal those of the ops in PyTorch."""

from dataclasses import replace

import pytest
import torch
from support.native_cases import CASES, D, V, close, learned, padding
from support.native_cases import tokens as drawn

from linearize.attention.backends import native as backend
from linearize.attention.backends.choose import choose, explain
from linearize.attention.call import AttentionCall
from linearize.attention.native import engine
from linearize.ops import Window
from linearize.ops.window_parts import CHANNELS, choose_blocks
from linearize.training.stage_one.loss import Targets, cross_entropy

DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
LENGTHS = (1, 9, 48, 200, 700)
"""Tokens: 700 are more than a tile of the op has."""


def tokens(count, **options):
    """Inputs whose products have exact sums, so that rounding decides no choice."""
    exact = [(32 * x.float()).round().div(32).to(x.dtype) for x in drawn(count, **options)]
    # The heads of a token side by side, also if they have one number each.
    return [x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) for x in exact]


SOME_HEADS = pytest.mark.parametrize("heads", [(), (1,), (0, 2, 3)], ids=["all", "one", "three"])


@torch.no_grad()
def both_ways(switch, mixer, inputs, mask=None):
    found = []
    for on in (True, False):
        switch(on)
        call = AttentionCall(*inputs, D**-0.5, mask, needs_state=mixer.shape.causal)
        found.append((choose(mixer, call).name, *mixer(call)))
    assert found[1][0] == "window"
    return found


@torch.no_grad()
def rounding(mixer, inputs, mask, out):
    """Return how far fp32 may lead each row [B, H, T]: signed weights, whose sums cancel, make of its rounding more.

    So do the kernel's weights of looked-up keys, which are subtracted: up to 1e-5 of the row's sum (`routed.LARGEST`).
    """
    q, k, v = inputs
    weights = mixer.weights(q, k, scaling=D**-0.5, key_padding_mask=mask)
    subtracts = mixer.positive and mixer.info.name != "none" and mixer.hybrid.routed_heads
    return (1e-5 if subtracts else 3e-6) * weights.abs().sum(dim=-1) * (v.abs().max() + out.abs().amax(dim=-1))


@DIRECTIONS
@pytest.mark.parametrize("key_heads", [2, 4], ids=["grouped", "ungrouped"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(("window", "sinks", "blocks"), [(4, 2, "2:3"), (8, 0, "34"), (40, 13, "3:40"), (9, 5, "7:1")])
@pytest.mark.parametrize(("name", "args"), [*CASES, ("none", {})])
@SOME_HEADS
@pytest.mark.sampled("values")
def test_equals_the_ops_in_pytorch(switch, name, args, blocks, sinks, window, masked, key_heads, causal, heads):
    form = {"window": window, "sinks": sinks, "routed_blocks": blocks, "routed_heads": heads}
    mixer = learned(name, args, causal=causal, key_heads=key_heads, **form)
    for count in LENGTHS:
        mask = padding(count) if masked else None
        inputs = tokens(count, key_heads=key_heads)
        (name, ours, after), (_, theirs, wanted) = both_ways(switch, mixer, inputs, mask)
        assert name == ("native" if mixer.positive else "window")
        real = torch.ones(2, count, dtype=torch.bool) if mask is None else mask
        of_heads = real[:, None].expand(-1, 4, -1)
        limits = rounding(mixer, inputs, mask, theirs)
        assert ((ours - theirs).abs().amax(dim=-1) <= limits)[of_heads].all()
        assert (after or {}).keys() == (wanted or {}).keys()
        for key, tensor in (after or {}).items():
            close(tensor.float(), wanted[key].float(), 1e-5)
            assert tensor.dtype == wanted[key].dtype, key


@DIRECTIONS
@pytest.mark.parametrize(("size", "value"), [(D, V), (1, 65), (33, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sizes_and_types(switch, dtype, size, value, causal):
    sizes = {"size": size, "value": value}
    mixer = learned("hedgehog", {}, causal=causal, window=6, sinks=2, routed_blocks="3:5", scale="linear", **sizes)
    inputs = drawn(110, dtype=dtype, **sizes)
    (name, ours, _), (_, theirs, _) = both_ways(switch, mixer, inputs)
    assert name == "native" and ours.dtype == dtype
    close(ours, theirs, 1e-5 if dtype == torch.float32 else 2**-8)


@torch.no_grad()
def step_both_ways(switch, watch, mixer, inputs, mask=None, first=23):
    """Continue natively and in PyTorch from the same state: outputs of the steps and the state after."""
    switch(True)
    steps = watch("window_step")
    part = None if mask is None else mask[:, :first]
    switch(False)
    start = mixer(AttentionCall(*(x[:, :, :first] for x in inputs), D**-0.5, part, needs_state=True))[1]
    found = []
    for on in (True, False):
        switch(on)
        state, outputs = {name: x.clone() for name, x in start.items()}, []
        for i in range(first, inputs[0].shape[2]):
            now = [x[:, :, i : i + 1] for x in inputs]
            part = None if mask is None else mask[:, i : i + 1]
            out, state = mixer(AttentionCall(*now, D**-0.5, part, state=state, needs_state=True))
            outputs.append(out)
        assert len(steps) == len(outputs)
        found.append((torch.cat(outputs, dim=2), state))
    return found


def same_states(after, wanted):
    """What is kept of a token is as it came, to the bit; in empty places of the ring anything may be."""
    assert after.keys() == wanted.keys()
    for key, tensor in after.items():
        if key in ("kv", "log_scale"):
            close(tensor, wanted[key], 1e-5)
        elif key in ("tokens", "ring_mask", "all_k", "all_v", "channels"):
            assert torch.equal(tensor, wanted[key]), key


@pytest.mark.parametrize("key_heads", [2, 4], ids=["grouped", "ungrouped"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(("window", "sinks", "blocks"), [(4, 2, "2:3"), (8, 0, "34"), (20, 13, "3:20"), (9, 5, "7:1")])
@pytest.mark.parametrize(("name", "args"), [*CASES, ("none", {})])
@SOME_HEADS
@pytest.mark.sampled("values")
def test_steps_equal_those_of_pytorch(switch, watch, name, args, blocks, sinks, window, masked, key_heads, heads):
    form = {"window": window, "sinks": sinks, "routed_blocks": blocks, "routed_heads": heads}
    mixer = learned(name, args, causal=True, key_heads=key_heads, **form)
    if not mixer.positive:
        pytest.skip("negative weights are not subtracted")
    inputs, mask = tokens(90, key_heads=key_heads), padding(90) if masked else None
    (ours, after), (theirs, wanted) = step_both_ways(switch, watch, mixer, inputs, mask)
    real = torch.ones(2, 67, dtype=torch.bool) if mask is None else mask[:, 23:]
    real = real[:, None].expand(-1, 4, -1)
    limits = rounding(mixer, inputs, mask, torch.cat([theirs.new_zeros(*theirs.shape[:2], 23, V), theirs], dim=2))
    assert ((ours - theirs).abs().amax(dim=-1) <= limits[:, :, 23:])[real].all()
    assert not ours[~real].any()
    same_states(after, wanted)


@pytest.mark.parametrize("key_heads", [2, 4], ids=["grouped", "ungrouped"])
@pytest.mark.parametrize("blocks", ["9", "3:5"])
@pytest.mark.parametrize(("size", "value"), [(D, V), (1, 65), (33, 3), (64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sizes_and_types_of_steps(switch, watch, dtype, size, value, blocks, key_heads):
    sizes = {"size": size, "value": value, "key_heads": key_heads}
    mixer = learned("hedgehog", {}, causal=True, window=6, sinks=2, routed_blocks=blocks, scale="linear", **sizes)
    (ours, after), (theirs, wanted) = step_both_ways(switch, watch, mixer, tokens(70, dtype=dtype, **sizes))
    assert ours.dtype == dtype
    close(ours, theirs, 1e-5 if dtype == torch.float32 else 2**-8)
    same_states(after, wanted)


def test_steps_fade(switch, watch):
    mixer = learned("hedgehog", {}, causal=True, window=6, routed_blocks="9", scale="linear", trained_length=30)
    (ours, _), (theirs, _) = step_both_ways(switch, watch, mixer, tokens(70))
    close(ours, theirs, 1e-5)


@pytest.mark.parametrize("bias", [0.0, 4.0, 20.0])
def test_steps_do_not_subtract_weights_that_are_too_large(switch, watch, bias):
    """As for whole rows: the weights of the other keys are summed up one by one."""
    mixer = learned("hedgehog", {}, causal=True, window=4, sinks=1, routed_blocks="20:2", scale="linear")
    with torch.no_grad():
        mixer.query_scale.bias.fill_(bias)
    (ours, _), (theirs, _) = step_both_ways(switch, watch, mixer, tokens(70))
    close(ours, theirs, 1e-5)


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("absurd", [torch.nan, torch.inf])
def test_steps_with_absurd_numbers(switch, watch, where, absurd):
    """They reach no earlier token, no other head and no other row."""
    mixer = learned("none", {}, causal=True, window=4, sinks=1, routed_blocks="5")
    inputs = tokens(70)
    inputs[1 if where == "k" else 2][0, 0, 30] = absurd
    (ours, _), (theirs, _) = step_both_ways(switch, watch, mixer, inputs)
    apart = torch.ones(2, 4, 47, dtype=torch.bool)
    apart[0, :2, 30 - 23 :] = False
    assert not ours[0, :2, 30 - 23].isfinite().all()
    close(ours[apart], theirs[apart], 1e-5)


def test_threads_make_no_difference_to_steps(switch, watch):
    mixer, before = learned("hedgehog", {}, heads=6, key_heads=3, causal=True, window=8, routed_blocks="9"), 1
    inputs, found = tokens(60, heads=6, key_heads=3), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(step_both_ways(switch, watch, mixer, inputs)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])


def test_no_memory_changes_no_state(switch, monkeypatch):
    mixer, inputs = learned("none", {}, causal=True, window=4, routed_blocks="5"), tokens(60)
    switch(True)
    call = AttentionCall(*(x[:, :, :59] for x in inputs), D**-0.5, needs_state=True)
    with torch.no_grad():
        state = mixer(call)[1]
        before = {name: x.clone() for name, x in state.items()}
        monkeypatch.setattr(engine().library, "linearize_window_step", lambda *_: 1)
        with pytest.raises(MemoryError, match="no memory"):
            mixer(AttentionCall(*(x[:, :, 59:] for x in inputs), D**-0.5, state=state, needs_state=True))
    assert all(torch.equal(state[name], x) for name, x in before.items())


@torch.no_grad()
def test_steps_equal_the_whole_row(switch):
    switch(True)
    mixer, inputs = learned("hedgehog", {}, causal=True, window=8, sinks=2, routed_blocks="3:4"), tokens(90)
    call = AttentionCall(*(x[:, :, :50] for x in inputs), D**-0.5, needs_state=True)
    outputs, whole = [], mixer(replace(call, q=inputs[0], k=inputs[1], v=inputs[2]))[0]
    out, state = mixer(call)
    for i in range(50, 90):
        q, k, v = (x[:, :, i : i + 1] for x in inputs)
        out, state = mixer(replace(call, q=q, k=k, v=v, state=state))
        outputs.append(out)
    close(torch.cat(outputs, dim=2), whole[:, :, 50:], 1e-5)


def gradients(mixer, inputs, mask):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = mixer(AttentionCall(*leaves, D**-0.5, mask))[0]
    real = torch.ones(out.shape[::2], dtype=torch.bool) if mask is None else mask
    loss = out[real[:, None].expand(out.shape[:3])].float().square().sum()
    out = out.masked_fill(~real[:, None, :, None], 0.0)
    return [out, *torch.autograd.grad(loss, [*leaves, *mixer.parameters()], allow_unused=True)]


@DIRECTIONS
@pytest.mark.parametrize("key_heads", [2, 4], ids=["grouped", "ungrouped"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(("window", "sinks", "blocks"), [(4, 2, "2:3"), (8, 0, "5"), (40, 13, "3:40"), (9, 5, "7:1")])
@pytest.mark.parametrize("scale", ["none", "linear"])
@pytest.mark.parametrize(("name", "args"), [("hedgehog", {}), ("t2r", {}), ("none", {})])
@SOME_HEADS
@pytest.mark.sampled("values")
def test_gradients_equal_those_of_pytorch(
    switch, name, args, scale, blocks, sinks, window, masked, key_heads, causal, heads
):
    scale = "none" if name == "none" else scale
    form = {"window": window, "sinks": sinks, "routed_blocks": blocks, "routed_heads": heads, "scale": scale}
    mixer = learned(name, args, causal=causal, key_heads=key_heads, **form)
    if scale != "none":
        # As after training, the kernel's weights are no larger than softmax's, or gradients are their rounding alone.
        mixer.query_scale.bias.data.sub_(3.0)
    for count in (9, 150, 600):
        mask = padding(count) if masked else None
        found = []
        for on in (True, False):
            switch(on)
            assert choose(mixer, AttentionCall(*tokens(count, key_heads=key_heads), 1.0)).name == (
                "native" if on else "window"
            )
            found.append(gradients(mixer, tokens(count, key_heads=key_heads), mask))
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                close(ours, theirs, 3e-5)


@DIRECTIONS
def test_weights_that_are_too_large_are_not_subtracted(switch, monkeypatch, causal):
    """If no other key has them, a difference of fp32 sums would have no correct digit."""
    mixer = learned("hedgehog", {}, causal=causal, window=4, routed_blocks="99:4", scale="linear")
    reads, attend = [], backend.window_attention
    monkeypatch.setattr(backend, "window_attention", lambda *inputs, **more: reads.append(1) or attend(*inputs, **more))
    for bias in (0.0, 20.0):
        with torch.no_grad():
            mixer.query_scale.bias.fill_(bias)
        (name, ours, _), (_, theirs, _) = both_ways(switch, mixer, tokens(90))
        assert name == "native"
        close(ours, theirs, 1e-5)
        assert len(reads) == (bias > 0.0)


@DIRECTIONS
@pytest.mark.parametrize("blocks", [1, 3, 34])
@pytest.mark.parametrize("count", [5, 40, 900, 2600])
def test_choices_are_those_of_pytorch(switch, count, blocks, causal):
    """Also among equal scores, NaN and infinity; all numbers are whole, so that sums are exact.

    Rows are more than a tile of the op, and the longest are long enough for its sample of the keys.
    """
    switch(True)
    draw, rows = torch.Generator().manual_seed(count), min(count, 70)
    for width, values, sinks, size in ((12, 2, 0, 1), (12, 10**3, 5, 2), (6, 10**3, 2, 3), (20, 10**3, 3, 1)):
        form = Window(7, 1.0, causal, sinks=sinks, blocks=blocks, block_size=size)
        # No two channels of a query are equally large.
        q = torch.stack([1 + torch.randperm(width, generator=draw) for _ in range(8 * rows)]).view(2, 4, rows, width)
        q = q.float() * (2 * torch.randint(2, q.shape, generator=draw) - 1)
        channels = torch.randint(-values, values, (2, 2, width, -(-count // size) * size), generator=draw).float()
        # An infinite number times zero is NaN, so they only stand where all channels count.
        for odd in (torch.nan, torch.inf, -torch.inf) if width <= CHANNELS else (torch.nan,):
            channels[(torch.rand(2, 2, 1, channels.shape[3], generator=draw) < 0.05).expand(channels.shape)] = odd
        place = torch.arange(rows)
        places = (place + (count - rows) * place // max(1, rows - 1)).repeat(2, 1)
        counts = torch.tensor([count, count // 2 + 1])
        got, want = (choose(q, channels, places, counts, form) for choose in (engine().choose, choose_blocks))
        assert torch.equal(got.sort(dim=-1).values, want.sort(dim=-1).values)


@DIRECTIONS
@torch.no_grad()
def test_stage_one_chooses_with_it(switch, watch, causal):
    """A PyTorch choice took most of the time of a training with looked-up keys."""
    mixer = learned("hedgehog", {}, causal=causal, key_heads=2, window=6, sinks=2, routed_blocks="3:2", scale="linear")
    (q, k, _), mask, rows = tokens(70, key_heads=2), padding(70), torch.tensor([3, 20, 41, 69])
    targets, found, calls = Targets(q, k, D**-0.5, causal, mask), [], watch("choose")
    for on in (True, False):
        switch(on)
        assert bool(calls) != on
        sides = mixer.mapped(q, k, scaling=D**-0.5, key_padding_mask=mask, rows=rows)
        window = mixer.form(D**-0.5)
        loss, gradients = cross_entropy(*sides, targets.sampled(rows), None, window, gradient=True)
        found.append([loss, *(x for x in gradients if x is not None)])
    assert len(found[0]) == 5
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_explanation_names_what_it_does_not_compute(switch):
    switch(True)
    mixer = learned("hedgehog", {}, causal=True, window=6, routed_blocks="3:5")
    whole, gradient, step = explain(mixer, 100)
    assert whole[1] == gradient[1] == step[1] == "native"
    signed = learned(
        *next(case for case in CASES if not learned(*case).positive), causal=True, window=6, routed_blocks="3:5"
    )
    assert "negative" in dict(explain(signed, 100)[0][2])["native"]
